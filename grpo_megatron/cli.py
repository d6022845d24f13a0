"""The command line: grpo-megatron train | sft | selftest | status | report | config | doctor."""

import argparse
import io
import json
import sys
import warnings

from grpo_megatron.commands import config as config_commands
from grpo_megatron.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 for a UserError (one message on stderr).

    1 if `config diff` finds a difference, selftest a fault, or `status` a run that ended otherwise than well.
    """
    parser = argparse.ArgumentParser(prog="grpo-megatron", description="GRPO post-training on Megatron-core and SGLang.")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = {
        "train": "GRPO training",
        "sft": "supervised warm start",
        "selftest": "do engine and trainer of a training run agree, and if not, why",
    }
    for name, text in runs.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", metavar="FILE", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    _add_looks(commands)
    config_commands.add_parser(commands)
    commands.add_parser("doctor", help="what this machine has, whether it works, and what that allows")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name need not be text that a terminal can show
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from grpo_megatron.commands.doctor import doctor

        return doctor()
    # Optional accelerator packages announce their absence at import, many times over.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|image Python extension).*")
    try:
        if options.command == "config":
            return config_commands.run(options)
        if options.command == "selftest":
            return _selftest(options)
        if options.command == "status":
            from grpo_megatron.commands.status import status

            return status(options.folder, options.json)
        if options.command == "report":
            from grpo_megatron.commands.report import report

            return report(options.folder, options.against, options.out)
        print(json.dumps(_run(options)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_looks(commands) -> None:
    """The commands that look at a run's folder. commands: what ArgumentParser.add_subparsers returns."""
    status = commands.add_parser("status", help="what a run does now; exit status 1 if it failed, was interrupted or is gone")
    status.add_argument(
        "--json", action="store_true", help="for programs: all that is recorded, with every scalar of the last step"
    )
    report = commands.add_parser("report", help="one HTML page about a run: curves, phases, samples, configuration")
    report.add_argument("--against", metavar="OTHER_RUN_DIR", help="a run to compare with, in curves and configuration")
    report.add_argument("--out", metavar="FILE", help="where to write the page; report.html in RUN_DIR if not given")
    for command in (status, report):
        command.add_argument("folder", metavar="RUN_DIR", help="folder of the run")


def _selftest(options) -> int:
    from grpo_megatron.commands.selftest import as_json, selftest
    from grpo_megatron.preflight.load import load_config

    verdict = selftest(load_config(options.config, options.overrides))
    print(verdict.text())
    print(json.dumps(as_json(verdict)))
    return 0 if verdict.passed else 1


def _run(options) -> dict:
    from grpo_megatron.preflight.load import load_config

    config = load_config(options.config, options.overrides, options.command)
    if options.command == "sft":
        from grpo_megatron.commands.sft import sft

        return sft(config)
    from grpo_megatron.commands.train import train

    return train(config)


if __name__ == "__main__":
    sys.exit(main())
