"""Convert a Megatron checkpoint to an HF checkpoint.

    python tools/convert_megatron_to_hf.py CHECKPOINT_DIR OUT_DIR
        [--hf HF_DIR] [--dtype bfloat16] [--fp8] [--processes N]

The checkpoint may come from tools/convert_hf_to_megatron.py, from a training run, or from Megatron-LM, and
may have been saved in any parallel layout. CHECKPOINT_DIR contains a folder actor/, like
runs/NAME/checkpoints/step_XXXXXXXX, or is itself the folder with the weights, like Megatron-LM's
iter_XXXXXXX.

--hf names the model that the run started from. Configuration and tokenizer are copied from there. Converted
checkpoints contain their own. --fp8 writes the matrices of all layers, except routers, in FP8 with a scale
for each block of 128 x 128, in the format of DeepSeek-V3's checkpoints.

After an interruption, run the same command again to continue. The output folder is called OUT_DIR.partial
until it is complete.
"""

import argparse

from grpo_megatron.commands.convert import add_processes, call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="CHECKPOINT_DIR", help="folder of the Megatron checkpoint")
    parser.add_argument("target", metavar="OUT_DIR", help="folder to write the HF checkpoint to")
    parser.add_argument(
        "--hf",
        metavar="HF_DIR",
        help="model that the run started from, for a checkpoint that was not converted",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights that are written; default: as in config.json",
    )
    parser.add_argument(
        "--fp8", action="store_true", help="write the matrices in FP8, with a scale per block of 128 x 128"
    )
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


if __name__ == "__main__":  # the worker processes import this file
    main()
