"""A check, before a run with the reward `code`, that a correct program passes in the sandbox.

If reward.code.preamble or a limit makes this program fail, it would also make every response fail.
"""

from dataclasses import fields
from functools import cache

from grpo_megatron.config.sandbox import CodeConfig, Isolation, SandboxLimits
from grpo_megatron.errors import printable, shortened
from grpo_megatron.sandbox.program import Ended, Outcome, Program
from grpo_megatron.sandbox.run import Sandbox

_PROGRAM = Program("print(int(input()) + int(input()))", stdin="40\n2\n")
_PRINTS = "42\n"

# Limits that can have ended a program, by the way in which it ended.
_KEYS = {
    Ended.time: ("seconds",),
    Ended.cpu: ("cpu_seconds",),
    Ended.memory: ("memory_mib",),
    Ended.threads: ("threads",),
    Ended.files: ("files", "files_mib"),
    Ended.output: ("output_kib",),
}


def problem(options: CodeConfig, preamble: str) -> str | None:
    """Run a simple, correct program in the sandbox. Return why it fails, or None if it passes.

    If this program fails, every program of a response would fail, too. The returned text is a message to the
    user. It names the limit that was exceeded, or reward.code.preamble if the program passes without this
    preamble. The result is cached: a process runs the program only once for the same settings.

    options: section `reward.code` of the configuration.
    preamble: code that is put before the program; "" for none.

    Raises UserError if this machine cannot isolate programs as reward.code.isolation requires.
    """
    limits = tuple(getattr(options.limits, field.name) for field in fields(SandboxLimits))
    why = _failure(options.isolation, limits, "")
    if why is not None:
        return (
            "a correct program that adds two numbers fails in the sandbox, so every response would fail: "
            f"{why}"
        )
    why = _failure(options.isolation, limits, preamble) if preamble else None
    if why is not None:
        return f"reward.code.preamble makes a correct program fail, so every response would fail: {why}"
    return None


@cache
def _failure(isolation: Isolation, values: tuple[float, ...], preamble: str) -> str | None:
    limits = SandboxLimits(*values)
    source = f"{preamble}\n{_PROGRAM.source}" if preamble else _PROGRAM.source
    try:
        with Sandbox(limits, isolation) as sandbox:
            outcome = sandbox.run(Program(source, stdin=_PROGRAM.stdin))
    except (RuntimeError, OSError) as error:
        return str(error)
    if outcome.succeeded and outcome.stdout == _PRINTS:
        return None
    return _why(outcome, limits)


def _why(outcome: Outcome, limits: SandboxLimits) -> str:
    """Return why the trial program (it adds two numbers) failed in the sandbox, for a message to the user.

    outcome: outcome of the program's run in the sandbox.
    limits: limits of the sandbox in this run.
    """
    if outcome.ended != Ended.itself:
        keys = " or ".join(
            f"reward.code.limits.{name}={getattr(limits, name):g}" for name in _KEYS[outcome.ended]
        )
        return f"it exceeds {keys}; raise this limit"
    lines = outcome.stderr.strip().splitlines()
    if outcome.succeeded:
        return f"it printed {shortened(repr(outcome.stdout))} instead of {_PRINTS!r}"
    return printable(shortened(lines[-1], 200)) if lines else f"it ended with status {outcome.status}"
