"""Convert an HF checkpoint to Megatron's distributed format, which loads in any layout.

    python tools/convert_hf_to_megatron.py HF_DIR OUT_DIR [--processes N]

Memory is some 0.2 GB for each process, whatever the model. After an interruption the same command continues; until OUT_DIR is whole
it is called OUT_DIR.partial.
"""

import argparse

from grpo_megatron.commands.convert import add_processes, call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="HF_DIR")
    parser.add_argument("target", metavar="OUT_DIR")
    add_processes(parser)
    options = parser.parse_args()

    def work() -> None:
        from grpo_megatron.conversion.hf_to_megatron import hf_to_megatron

        print(f"wrote {options.target}: {hf_to_megatron(options.source, options.target, options.processes)}")

    call(parser, work, continues=True)


if __name__ == "__main__":  # the processes that share the work import this file
    main()
