"""A program for the Python that has verifiers: it checks an environment, lists its tasks, or serves it.

Usage: `python -P program.py check|tasks|serve`, with the settings as one line of JSON on stdin. The program
imports nothing of this project. The server lives as long as its stdin stays open.
"""

import itertools
import json
import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The wire and the configuration of verifiers change between minor releases.
_RELEASE = "0.4."
_OF_THE_RUN = "reward.on_failure says what becomes of an episode that fails, so set retries to 0"


class _Refused(Exception):
    """The settings or the installation cannot be used. The message says why."""


class _Parent:
    """The process that started this one, as the pipe that verifiers watches for its parent's end."""

    def recv(self) -> None:
        """Return when the parent has ended, or has closed this process's stdin."""
        sys.stdin.read()


def _config(settings):
    """Return verifiers' configuration of the environment, which is an EnvConfig. Raises _Refused."""
    try:
        installed = version("verifiers")
    except PackageNotFoundError as error:
        raise _Refused(f"{sys.executable} has no package verifiers") from error
    if not installed.startswith(_RELEASE):
        raise _Refused(f"{sys.executable} has verifiers {installed}, but {_RELEASE}x is needed")
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    config, changed = resolve_env_config(settings["env"]), {}
    for name, agent in agent_config_fields(config).items():
        if agent.client is not None:
            continue
        if agent.retries.max_retries or agent.retries.rules:
            raise _Refused(f"env.{name}.retries: {_OF_THE_RUN}")
        if agent.max_turns is None:
            changed[name] = agent.model_copy(update={"max_turns": settings["max_turns"]})
    if config.retries.max_retries or config.retries.rules:
        raise _Refused(f"env.retries: {_OF_THE_RUN}")
    return config.model_copy(update=changed)


def _check(settings) -> None:
    config = _config(settings)
    from verifiers.v1.utils.loaders import load_environment

    load_environment(config)


def _tasks(settings) -> None:
    """Write the data of tasks to the file settings["out"], one line of JSON for each.

    settings["number"] is the number of tasks; None: all.
    """
    config = _config(settings)
    from verifiers.v1.utils.loaders import load_taskset

    taskset, number = load_taskset(config.taskset), settings["number"]
    if number is None and not taskset.bounded:
        raise _Refused("the task set has no end; say how many tasks to write (--number)")
    with Path(settings["out"]).open("w", encoding="utf-8") as file:
        for task in itertools.islice(taskset, number):
            # Fields with defaults are left out, but not within fields: the role of a message is a default.
            whole = task.data.model_dump(mode="json")
            set_fields = task.data.model_dump(exclude_defaults=True)
            file.write(json.dumps({name: whole[name] for name in set_fields}) + "\n")


def _serve(settings) -> None:
    config = _config(settings)
    from verifiers.v1.serve import serve_env

    serve_env(max_workers=1, address=settings["address"], death_pipe=_Parent(), config=config)


def main() -> int:
    """Do what the command line asks, and return the exit status. Errors are told at the end of stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    # The user's own task sets may be in the working directory.
    sys.path.insert(0, "")
    action, settings = sys.argv[1], json.loads(sys.stdin.readline())
    try:
        {"check": _check, "tasks": _tasks, "serve": _serve}[action](settings)
    except Exception as error:
        if not isinstance(error, _Refused):
            logging.exception("failed")
        text = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
