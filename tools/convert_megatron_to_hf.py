"""Convert a Megatron checkpoint (of the conversion tool, of a training run, of Megatron-LM) to an HF checkpoint.

    python tools/convert_megatron_to_hf.py CHECKPOINT_DIR OUT_DIR [--hf HF_DIR] [--dtype bfloat16] [--fp8] [--processes N]

CHECKPOINT_DIR holds actor/, as runs/NAME/checkpoints/step_XXXXXXXX does, or is such a folder itself, as Megatron-LM's
iter_XXXXXXX. It may have been saved in any layout. --hf names the model the run started from, for configuration and tokenizer;
converted checkpoints bring theirs. --fp8 writes the matrices of all layers, except routers, in FP8 with a scale for each block of 128 x
128, as DeepSeek-V3's checkpoints have them. After an interruption the same command continues; until OUT_DIR is whole it is called
OUT_DIR.partial.
"""

import argparse

from grpo_megatron.commands.convert import add_processes, call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="CHECKPOINT_DIR")
    parser.add_argument("target", metavar="OUT_DIR")
    parser.add_argument("--hf", metavar="HF_DIR")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in config.json"
    )
    parser.add_argument("--fp8", action="store_true")
    add_processes(parser)
    options = parser.parse_args()

    def work() -> None:
        import torch

        from grpo_megatron.conversion.megatron_to_hf import megatron_to_hf

        dtype = getattr(torch, options.dtype) if options.dtype else None
        progress = megatron_to_hf(
            options.source, options.target, options.hf, options.processes, dtype, options.fp8
        )
        print(f"wrote {options.target}: {progress}")

    call(parser, work, continues=True)


if __name__ == "__main__":  # the processes that share the work import this file
    main()
