"""The command line `grpo-megatron COMMAND`.

Commands: train | sft | reward-model | eval | serve | selftest | status | report | trajectories | ledger |
recording | config | plan | tasks | doctor.

Exit status:
    0        done
    1        an unexpected error; its traceback is in the log that the message names. Also: `config diff`
             found a difference, `selftest` or `doctor` found a fault, `status` found a run that did not end
             well, or `ledger` found samples that do not balance
    2        wrong input, configuration or environment (UserError): the message says what to do; the same
             command would fail again
    3        a process that the run needs (a rank, an engine, Ray's daemons) is lost and could not be replaced
    75       stopped on request (SIGINT, SIGTERM, SIGHUP, SIGUSR1): the same command continues the run
    130      interrupted twice, and ended at once
    141      the reader of stdout is gone, as with `| head`; only for commands that are not runs. A run goes
             on without a reader
    128 + N  the driver was killed by signal N
"""

import argparse
import io
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from grpo_megatron.commands import config as config_commands
from grpo_megatron.commands import plan as plan_command
from grpo_megatron.commands import tasks as tasks_command
from grpo_megatron.config.command import Command
from grpo_megatron.errors import Stopped, UserError, last_message
from grpo_megatron.files import disk_is_full, json_text
from grpo_megatron.logs import show_messages
from grpo_megatron.run.guard import Guard

_RUNS = {
    "train": "train a model with GRPO",
    "sft": "train a model on examples (supervised warm start)",
    "reward-model": "train a reward model on preferences",
    "eval": "evaluate a model on held-out prompts, without training",
    "serve": "serve the Tinker API for a training loop of your own, with one model and one client",
    "selftest": "check whether engine and trainer of a training run agree, and find out why not",
}
# {command: its module in grpo_megatron.commands, which has a function of the same name}
_MODULES = {
    Command.train: "train",
    Command.sft: "sft",
    Command.reward_model: "reward_model",
    Command.eval: "evaluate",
}


def main(arguments: list[str] | None = None) -> int:
    """Parse and execute the command line `grpo-megatron COMMAND ...`, and return the exit status.

    arguments: the words after `grpo-megatron`; None: the arguments of this process. With None, on Linux, a
        run also gets a keeper, a process that kills all processes that the run leaves behind.
    """
    show_messages()
    options = _parse(arguments)
    # Without optional accelerator packages, libraries repeat a warning at each import.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|image Python extension).*")
    is_run, command = options.command in _RUNS, partial(options.run, options)
    if arguments is None and is_run and sys.platform == "linux":
        from grpo_megatron.commands.keeper import keep

        return keep(partial(_drive, command))
    if arguments is None and not is_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly behind `| head`, as other tools do
    try:
        return command(Guard()) if is_run else command()
    except (UserError, Stopped) as error:
        print(last_message(error), file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if is_run or not disk_is_full(error):
            raise
        place = f" of {error.filename}" if error.filename else ""
        print(
            f"error: no space left on the disk{place}; free some space and run the command again",
            file=sys.stderr,
        )
        return UserError.exit_status


def _drive(command, keeper) -> int:
    from grpo_megatron.commands.driver import drive

    return drive(command, keeper)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line. The result's `run` is the function that executes the chosen command.

    A command that is a run, such as `train`, is executed by run(options, guard), with a Guard (an object that
    can end a run after a signal). Any other command is executed by run(options). Both return the exit status.

    arguments: the words after `grpo-megatron`; None: the arguments of this process.
    """
    parser = argparse.ArgumentParser(
        prog="grpo-megatron", description="GRPO post-training on Megatron-core and SGLang."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in _RUNS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", metavar="FILE", help="YAML file")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="values that override the file's"
        )
        command.set_defaults(run={"selftest": _selftest, "serve": _serve}.get(name, _train))
        if name == "serve":
            _add_address(command)
    _add_readers(commands)
    config_commands.add_parser(commands)
    plan_command.add_parser(commands)
    tasks_command.add_parser(commands)
    doctor = commands.add_parser(
        "doctor", help="check this machine's hardware and software, and show what they allow"
    )
    doctor.set_defaults(run=_lazy("doctor"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A file name may contain characters that the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    return _intermixed(parser, arguments)


def _intermixed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse a command line in which `key=value` words may stand before, between and after options.

    This function is needed because argparse's parse_args accepts only one contiguous group of such words,
    and argparse's parse_intermixed_args does not support subcommands. If an argument is not known, the
    process prints a usage message and exits.

    parser: parser of the whole command line. A subcommand that takes `key=value` words stores them in
        `overrides`.
    arguments: the words after `grpo-megatron`; None: the arguments of this process.
    """
    options, left = parser.parse_known_args(arguments)
    takes_more = hasattr(options, "overrides")
    wrong = [word for word in left if word.startswith("-") or not takes_more]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if takes_more:
        options.overrides += left
    return options


def _add_readers(commands) -> None:
    """Add the commands that read files of a run: `status`, `report`, `trajectories`, `ledger`, `recording`.

    commands: the object that ArgumentParser.add_subparsers returned for the parser of `grpo-megatron`.
    """
    status = commands.add_parser(
        "status", help="show what a run is doing; exit status 1 if it failed, was interrupted or is gone"
    )
    status.add_argument(
        "--json",
        action="store_true",
        help="print JSON, for programs: all that is recorded, with every scalar of the last step",
    )
    status.set_defaults(run=_lazy("status", "folder", "json"))
    report = commands.add_parser(
        "report", help="write an HTML page about a run: curves, phases, samples, configuration"
    )
    report.add_argument(
        "--against", metavar="OTHER_RUN_DIR", help="run to compare with, in curves and configuration"
    )
    report.add_argument(
        "--out", metavar="FILE", help="file to write the page to; default: report.html in RUN_DIR"
    )
    report.set_defaults(run=_lazy("report", "folder", "against", "out"))
    ledger = commands.add_parser(
        "ledger",
        help="show what became of each sample; exit status 1 unless each has ended exactly once",
    )
    ledger.add_argument("--json", action="store_true", help="print JSON, for programs")
    ledger.add_argument(
        "--steps",
        type=int,
        default=20,
        metavar="N",
        help="number of steps to show, the last ones; default: 20",
    )
    ledger.add_argument("--sample", type=int, metavar="ID", help="show what happened to a sample, in order")
    ledger.add_argument(
        "--prompt", type=int, metavar="UID", help="show what happened to all samples of a prompt"
    )
    ledger.set_defaults(run=_lazy("ledger", "folder", "json", "steps", "sample", "prompt"))
    for command in (status, report, _add_trajectories(commands), ledger):
        command.add_argument("folder", metavar="RUN_DIR", help="folder of the run")
    recording = commands.add_parser(
        "recording", help="print a recording (rollout.record) as JSON, one line for each step"
    )
    recording.add_argument("path", metavar="PATH", help="the recording")
    recording.add_argument("--step", type=int, metavar="N", help="the only step to print; default: all")
    recording.set_defaults(run=_lazy("recording", "path", "step"))


def _add_trajectories(commands) -> argparse.ArgumentParser:
    """Add the command `trajectories` without its RUN_DIR, and return its parser."""
    parser = commands.add_parser(
        "trajectories", help="write an HTML page with a step's trajectories as trees of turns"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the step; default: the last one")
    parser.add_argument("--prompt", type=int, metavar="UID", help="the only prompt to show")
    parser.add_argument("--sample", type=int, metavar="ID", help="the only sample to show")
    parser.add_argument(
        "--recording", metavar="PATH", help="the recording; default: the run's rollout.record"
    )
    parser.add_argument("--model", metavar="FOLDER", help="folder with the tokenizer; default: model.path")
    parser.add_argument(
        "--out", metavar="FILE", help="file to write the page to; default: trajectories_N.html in RUN_DIR"
    )
    parser.set_defaults(
        run=_lazy("trajectories", "folder", "step", "prompt", "sample", "recording", "model", "out")
    )
    return parser


def _lazy(command: str, *options: str) -> Callable[[argparse.Namespace], int]:
    """Return a function that executes a command with the parsed options, and returns the exit status.

    The command's module is imported when the function is called, so that other commands start quickly.

    command: name of the command.
    options: names of the options that the command's function takes, in the order of its parameters.
    """
    return lambda parsed: _function(command)(*(getattr(parsed, option) for option in options))


def _function(name: str) -> Callable[..., Any]:
    """Import the module `name` of grpo_megatron.commands, and return its function of the same name."""
    return getattr(import_module(f"grpo_megatron.commands.{name}"), name)


def _selftest(options: argparse.Namespace, guard: Guard) -> int:
    from grpo_megatron.commands.selftest import as_json, selftest
    from grpo_megatron.preflight.check import load_config

    verdict = selftest(load_config(options.config, options.overrides), guard=guard)
    _print_result(f"{verdict.text()}\n{json_text(as_json(verdict))}")
    return 0 if verdict.passed else 1


def _train(options: argparse.Namespace, guard: Guard) -> int:
    from grpo_megatron.preflight.check import load_config

    command = Command(options.command)
    config = load_config(options.config, options.overrides, command)
    _print_result(json_text(_function(_MODULES[command])(config, guard)))
    return 0


def _add_address(serve: argparse.ArgumentParser) -> None:
    """Add the options of the command `serve` to its parser."""
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0: a free one; default: 8000")
    serve.add_argument(
        "--name", metavar="MODEL", help="name by which clients ask for the model; default: model.path"
    )
    serve.add_argument(
        "--lost-after",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time without a sign of life after which a client counts as lost; the SDK gives one every 10 s; "
        "default: 60",
    )


def _serve(options: argparse.Namespace, guard: Guard) -> int:
    from grpo_megatron.preflight.check import load_config
    from grpo_megatron.serve.command import serve

    config = load_config(options.config, options.overrides, Command.serve)
    serve(config, options.host, options.port, options.name, options.lost_after, guard)
    return 0


def _print_result(text: str) -> None:
    with suppress(OSError):  # nobody reads stdout any more; a file in the run's folder has the result too
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
