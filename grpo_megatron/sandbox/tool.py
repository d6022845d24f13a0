"""run_python runs Python code that a model wrote, as a tool that environments can offer to the model."""

from grpo_megatron.config.sandbox import Isolation, SandboxLimits
from grpo_megatron.sandbox.program import Ended, Outcome, Program
from grpo_megatron.sandbox.run import Sandbox

_ERROR_LINES = 8


def run_python(
    source: str,
    limits: SandboxLimits | None = None,
    isolation: Isolation = Isolation.full,
    longest: int = 4000,
    within: float | None = None,
) -> str:
    """Run a Python program in a sandbox, and return its output as text for a model.

    If the program fails, no exception is raised. The text then includes the program's error message, or the
    limit that the program exceeded.

    source: source code of the program.
    limits: limits of the program. If None, the default limits hold.
    isolation: the least isolation that the caller accepts.
    longest: approximate maximum number of characters of stdout, and also of the error message.
    within: maximum number of wall-clock seconds of the program. If None, it is ten times limits.seconds.

    Raises UserError if this machine cannot isolate programs as `isolation` requires. Raises RuntimeError if
    the sandbox itself fails.
    """
    limits = limits or SandboxLimits()
    with Sandbox(limits, isolation) as sandbox:
        outcome = sandbox.run(Program(source), within)
    parts = [without_middle(outcome.stdout.rstrip("\n"), longest)]
    if not outcome.succeeded:
        parts += [
            without_middle("\n".join(outcome.stderr.rstrip().splitlines()[-_ERROR_LINES:]), longest),
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


def without_middle(text: str, longest: int) -> str:
    """Return the text, shortened in the middle if it has more than `longest` characters.

    The end is kept because the last line is often the result.
    """
    if len(text) <= longest:
        return text
    return (
        f"{text[: longest // 2]}\n[{len(text) - longest} characters left out]\n"
        f"{text[len(text) - longest // 2 :]}"
    )
