"""Compare a Megatron checkpoint with the HF checkpoint that it was converted from.

    python tools/verify_checkpoint.py HF_DIR MEGATRON_DIR [--bits-only] [--processes N]

First, every tensor is read from both checkpoints and compared bit by bit. Then our model and transformers'
compute float32 logits of the same random tokens. They may differ by at most 1e-5 of the largest logit. This
second check needs memory for the whole model in float32; --bits-only skips it. Nothing is written. The exit
status is 1 if anything differs.
"""

import argparse

from grpo_megatron.commands.convert import add_processes, call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hf", metavar="HF_DIR", help="folder of the HF checkpoint")
    parser.add_argument("megatron", metavar="MEGATRON_DIR", help="folder of the Megatron checkpoint")
    parser.add_argument("--bits-only", action="store_true", help="compare the bits only, not the logits")
    add_processes(parser)
    options = parser.parse_args()

    def work() -> int:
        from grpo_megatron.conversion.verify import LOGITS_BOUND, different_bits, logits_difference

        lines, progress = different_bits(options.hf, options.megatron, options.processes)
        print("\n".join(lines or [f"every tensor is the same, bit for bit: {progress}"]))
        if options.bits_only:
            return 1 if lines else 0
        difference, largest = logits_difference(options.hf, options.megatron)
        bound = LOGITS_BOUND * largest
        fine = difference <= bound  # False for NaN
        print(
            f"logits differ by up to {difference:.2e} "
            f"({'within' if fine else 'beyond'} the bound of {bound:.2e})"
        )
        return 0 if fine and not lines else 1

    call(parser, work)


if __name__ == "__main__":  # the worker processes import this file
    main()
