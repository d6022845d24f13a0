"""run_python: Python as a tool for a model in an environment."""

from grpo_megatron.config.sandbox import Isolation, SandboxLimits
from grpo_megatron.sandbox.run import Ended, Outcome, Program, Sandbox

_ERROR_LINES = 8


def run_python(
    source: str,
    limits: SandboxLimits | None = None,
    isolation: Isolation = Isolation.full,
    longest: int = 4000,
    within: float | None = None,
) -> str:
    """Run a program and return its output as text for a model, including its error if it fails.

    longest: approximate maximum number of characters of the text.
    within: see Sandbox.run.
    Errors of the program are part of the text. Raises only the errors of Sandbox.
    """
    limits = limits or SandboxLimits()
    with Sandbox(limits, isolation) as sandbox:
        outcome = sandbox.run(Program(source), within)
    parts = [_shortened(outcome.stdout.rstrip("\n"), longest)]
    if not outcome.succeeded:
        parts += [
            _shortened("\n".join(outcome.stderr.rstrip().splitlines()[-_ERROR_LINES:]), longest),
            _why(outcome, limits),
        ]
    return "\n".join(filter(None, parts)) or "(no output)"


def _why(outcome: Outcome, limits: SandboxLimits) -> str:
    if outcome.ended == Ended.itself:
        # If there is a traceback, it says more than the status.
        return "" if outcome.stderr.strip() else f"(exit status {outcome.status})"
    most = {
        Ended.time: f"{limits.seconds:g} s",
        Ended.cpu: f"{limits.cpu_seconds} s of processor time",
        Ended.memory: f"{limits.memory_mib} MiB of memory",
        Ended.threads: f"{limits.threads} threads",
        Ended.files: f"{limits.files} files or {limits.files_mib} MiB in files",
        Ended.output: f"{limits.output_kib} KiB of output",
    }
    return f"(ended: more than {most[outcome.ended]})"


def _shortened(text: str, longest: int) -> str:
    """Return the text, or only its beginning and end if it is too long.

    The end is kept, because the last line is often the result.
    """
    if len(text) <= longest:
        return text
    return (
        f"{text[: longest // 2]}\n[{len(text) - longest} characters left out]\n"
        f"{text[len(text) - longest // 2 :]}"
    )
