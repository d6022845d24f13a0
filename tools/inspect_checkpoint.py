"""List what a checkpoint contains, or how two checkpoints differ.

    python tools/inspect_checkpoint.py PATH [PATH2]
        [--hf HF_DIR] [--keys] [--no-digest] [--json] [--processes N]

PATH is an HF folder, a converted checkpoint, a training run's checkpoint (checkpoints/step_XXXXXXXX) or
Megatron-LM's (iter_XXXXXXX). There is one line for each tensor: name, shape, dtype, bytes, and the beginning
of its digest, which is the SHA-256 of its elements in row-major order.

Tensors are listed with HF's names and shapes in both formats, so that the digests of equal weights are equal.
For a training run's checkpoint, --hf names its model. Without it, the checkpoint is listed under Megatron's
own keys, as with --keys.

With PATH2, only differences are listed. The exit status is 1 if there is any.
"""

import argparse

from grpo_megatron.commands.convert import add_processes, call
from grpo_megatron.files import json_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="checkpoint to list, or two to compare")
    parser.add_argument("--hf", metavar="HF_DIR", help="model of a training run's checkpoint")
    parser.add_argument("--keys", action="store_true", help="list Megatron's own keys")
    parser.add_argument(
        "--no-digest", action="store_true", help="leave out the digests, which need all weights to be read"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_processes(parser)
    options = parser.parse_args()
    if len(options.paths) > 2:
        parser.error("give at most two checkpoints")

    def work() -> int:
        from grpo_megatron.conversion.listing import differences, listing

        found = [
            listing(path, options.hf, options.keys, not options.no_digest, options.processes)
            for path in options.paths
        ]
        if len(found) == 1:
            print(json_text(found[0].as_json()) if options.json else found[0].text())
            return 0
        lines = differences(*found)
        print(json_text({"differences": lines}) if options.json else "\n".join(lines or ["no difference"]))
        return 1 if lines else 0

    call(parser, work)


if __name__ == "__main__":  # the worker processes import this file
    main()
