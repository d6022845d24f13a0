"""Python as a tool of a model that plays an environment."""

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
    """What a program prints, and how it failed if it did, as text for a model, of about `longest` characters at most.

    It waits for the program. within: see Sandbox.run. Raises what Sandbox raises; an error of the program is text.
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
        # A traceback says more than the status.
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
    """Beginning and end of a text that is too long: what was printed last is often the result."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}\n[{len(text) - longest} characters left out]\n{text[len(text) - longest // 2 :]}"
