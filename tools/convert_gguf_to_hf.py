"""Convert a GGUF file, the format of llama.cpp, to an HF checkpoint with a tokenizer.

    python tools/convert_gguf_to_hf.py FILE.gguf OUT_DIR [--dtype bfloat16] [--tokenizer HF_DIR]

The model may be Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE. Quantised weights are dequantised, but what
quantising lost stays lost: use the model's own HF checkpoint where you can get it. Weights are written in
float32 unless --dtype says otherwise. The tool needs memory for a shard of 1 GiB and for the largest tensor
in float32, and no packages beyond those of the project.
"""

import argparse

from grpo_megatron.commands.convert import call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="FILE.gguf", help="file to convert")
    parser.add_argument("target", metavar="OUT_DIR", help="folder to write the HF checkpoint to")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of the weights that are written (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer", metavar="HF_DIR", help="take the tokenizer of this folder, not the one in the file"
    )
    options = parser.parse_args()

    def work() -> None:
        import torch

        from grpo_megatron.conversion.gguf_to_hf import gguf_to_hf

        count = gguf_to_hf(options.source, options.target, getattr(torch, options.dtype), options.tokenizer)
        print(f"wrote {options.target}: {count:,} parameters")

    call(parser, work)


if __name__ == "__main__":
    main()
