"""Convert an HF checkpoint to Megatron's distributed format, which loads in any layout.

python tools/convert_hf_to_megatron.py HF_DIR OUT_DIR
"""

import argparse

from grpo_megatron.commands.convert import hf_to_megatron
from grpo_megatron.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="HF_DIR")
    parser.add_argument("target", metavar="OUT_DIR")
    options = parser.parse_args()
    try:
        hf_to_megatron(options.source, options.target)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"wrote {options.target}")


if __name__ == "__main__":  # saving starts a helper process, which imports this file
    main()
