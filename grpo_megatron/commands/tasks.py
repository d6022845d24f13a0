"""`grpo-megatron tasks`: writes the tasks of a published environment as records to train on."""

import argparse


def add_parser(commands) -> None:
    """Add the command `tasks` with its options to the command line of `grpo-megatron`.

    commands: the object that ArgumentParser.add_subparsers of `grpo-megatron` returned.
    """
    parser = commands.add_parser("tasks", help="write the tasks of rollout.environment=verifiers:ID")
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument("--out", metavar="FILE", required=True, help="new file for the records, .jsonl")
    parser.add_argument("--number", type=int, metavar="N", help="write only the first N tasks")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Execute `grpo-megatron tasks`: write the records, and print their number. Return exit status 0.

    Raises UserError if the configuration names no task set, or if its tasks cannot be loaded or written.
    """
    from grpo_megatron.config.load import must_be_legal, resolve
    from grpo_megatron.errors import UserError
    from grpo_megatron.rollout.published.tasks import write_tasks

    settings = resolve(options.config, options.overrides)
    must_be_legal(list(settings.refused.values()))
    rollout = settings.config.rollout
    if rollout.task_set is None:
        raise UserError("tasks are those of verifiers: set rollout.environment=verifiers:ID")
    count = write_tasks(rollout, options.out, options.number)
    print(f"{options.out}: {count} tasks of {rollout.environment}")
    return 0
