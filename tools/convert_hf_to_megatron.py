"""Convert an HF checkpoint to Megatron's distributed format, which loads in any parallel layout.

    python tools/convert_hf_to_megatron.py HF_DIR OUT_DIR [--processes N]

Each process needs about 0.2 GB of memory, whatever the size of the model. After an interruption, run the same
command again to continue. The output folder is called OUT_DIR.partial until it is complete.
"""

import argparse

from grpo_megatron.commands.convert import add_processes, call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="HF_DIR", help="folder of the HF checkpoint")
    parser.add_argument("target", metavar="OUT_DIR", help="folder to write the Megatron checkpoint to")
    add_processes(parser)
    options = parser.parse_args()

    def work() -> None:
        from grpo_megatron.conversion.hf_to_megatron import hf_to_megatron

        print(f"wrote {options.target}: {hf_to_megatron(options.source, options.target, options.processes)}")

    call(parser, work, continues=True)


if __name__ == "__main__":  # the worker processes import this file
    main()
