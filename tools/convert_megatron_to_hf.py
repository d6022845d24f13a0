"""Convert a Megatron checkpoint (of the conversion tool or of a training run) to an HF checkpoint.

    python tools/convert_megatron_to_hf.py CHECKPOINT_DIR OUT_DIR [--hf HF_DIR] [--dtype bfloat16]

CHECKPOINT_DIR holds actor/, as runs/NAME/checkpoints/step_XXXXXXXX does. --hf names the model the run
started from, for configuration and tokenizer; converted checkpoints bring theirs.
"""

import argparse

import torch

from grpo_megatron.commands.convert import megatron_to_hf
from grpo_megatron.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="CHECKPOINT_DIR")
    parser.add_argument("target", metavar="OUT_DIR")
    parser.add_argument("--hf", metavar="HF_DIR")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in config.json")
    options = parser.parse_args()
    try:
        megatron_to_hf(options.source, options.target, options.hf, getattr(torch, options.dtype) if options.dtype else None)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"wrote {options.target}")


if __name__ == "__main__":
    main()
