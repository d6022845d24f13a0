"""Diagnosis of a dead process: how it ended, and the lines of its log that tell why."""

import re

from ray.exceptions import OutOfMemoryError, RayError

from grpo_megatron.cluster.ray_errors import ENDED, plain
from grpo_megatron.errors import shortened

_LINES = 3
_TAIL_BYTES = 50_000
_BAR = re.compile(r"\d+%.*\d+/\d+ \[")  # a progress bar of tqdm
# Ray turns on Python's faulthandler in its workers. This line of it names the signal of a crash. The stack
# follows.
_CRASH = "Fatal Python error: "
_TRACEBACK = "Traceback (most recent call last):"
_SEVERE = re.compile(
    r"\b(ERROR|CRITICAL|FATAL|error|Error|[A-Z]\w*(Error|Exception)|out of memory|Killed|Aborted|assert\w*)\b"
)
# Lines that every start of an engine or a rank writes, whether or not it succeeds.
_HARMLESS = (
    "Ignore import error when loading",  # SGLang's, for models that need other packages
    "No HuggingFace chat template found",  # the driver turns messages into tokens
    "init_cpu_threads_env and shared memory based AllReduce is disabled",
    "Fail to set RLIMIT_NOFILE",
    "Signal handler is not added because the engine is not in the main thread",
    "Cannot detect CUDA architecture",
)
# Errors that only report the end of another process. That process's own error comes before them.
_AFTEREFFECTS = re.compile(
    r"Rank \d+ scheduler died|Scheduler or DataParallelController|Received sigquit|EOFError|BrokenPipeError"
    r"|ConnectionResetError|Child process unexpectedly failed|KeyboardInterrupt|SystemExit"
)


def last_words(log: str, error: RayError | None = None) -> tuple[str, list[str]]:
    """Return how a dead process ended, and lines of its log that explain why, for an error message.

    log: path of the process's log.
    error: Ray's error about the death; None if there is none.

    Returns (how, lines):

    - how: text in brackets such as ` (with exit status 1)`, or "" if the way it ended is not known.
    - lines: at most three lines. If the log reports a crash (signal), they are this report. Otherwise they
      are the end of the last traceback, or the last lines with errors, or the last lines of the log. If Ray
      killed the process for lack of memory, they say which processes used the most memory, and what to
      change. If the log cannot be read, the only line says so.
    """
    if how := killed_by_ray(error):
        return how, _needed_memory(plain(error))
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return _how(error, ""), ["(this node cannot read the log)"]
    lines = worth_showing(text.splitlines())
    crash = next((index for index, line in enumerate(lines) if line.startswith(_CRASH)), None)
    chosen = _cause(lines) if crash is None else lines[crash : crash + _LINES]
    return _how(error, "" if crash is None else lines[crash]), [shortened(line, 300) for line in chosen]


def worth_showing(lines: list[str]) -> list[str]:
    """Return the lines of a log that can explain a failure, in order.

    These lines are left out: blank lines, progress bars, warnings, notes that every start of an engine or
    rank writes, and indented lines below a warning or a note.
    """
    kept, below_warning = [], False
    for line in lines:
        if re.search(r"warn", line, re.IGNORECASE) or any(text in line for text in _HARMLESS):
            below_warning = True
        elif line.strip() and not _BAR.search(line) and not (below_warning and line.startswith(" ")):
            kept.append(line)
            below_warning = False
    return kept


def _cause(lines: list[str]) -> list[str]:
    """Choose the lines of a log that explain a failure best, at most three.

    If the log has a traceback, the chosen lines are the place and the exception of the last traceback.
    Otherwise they are the last lines with an error, or, if there are none, the last lines of the log. Errors
    that only report the end of another process are ignored.
    """
    found = [block for block in _tracebacks(lines) if not _AFTEREFFECTS.search(block[-1])]
    if found:
        place = [line for line in found[-1][:-1] if line.lstrip().startswith("File ")]
        return [*place[-1:], found[-1][-1]]
    severe = [line for line in lines if _SEVERE.search(line) and not _AFTEREFFECTS.search(line)]
    return (severe or lines)[-_LINES:]


def _tracebacks(lines: list[str]) -> list[list[str]]:
    """Return the Python tracebacks in a log, each as a list of lines whose last line is the exception."""
    found = []
    for start, line in enumerate(lines):
        if _TRACEBACK in line:
            indent = len(line) - len(line.lstrip())
            block = []
            for below in lines[start + 1 :]:
                block.append(below)
                if len(below) - len(below.lstrip()) <= indent:
                    break
            if block:
                found.append(block)
    return found


def _how(error: RayError | None, crash: str) -> str:
    """Return how a process ended as text in brackets, such as ` (with exit status 1)`; "" if it is not known.

    error: Ray's error about the death; None if there is none.
    crash: the line of the log that names the signal of a crash, or "".
    """
    if crash:
        return f" ({crash.removeprefix(_CRASH)})"
    text = plain(error) if error else ""
    if "running low on memory" in text or "NODE_OUT_OF_MEMORY" in text:
        return " (ended by Ray because its node was out of memory)"
    if code := re.search(r"exit code (\d+)", text):
        return f" (with exit status {code[1]})"
    if "connection error code 2" not in text:
        detail = re.search(r"Worker exit detail: ([^.]+)", text)
        if detail:
            return f" ({shortened(detail[1], 100)})"
        return (
            ""
            if not text.strip() or isinstance(error, ENDED)
            else f" ({shortened(text.splitlines()[0], 200)})"
        )
    # The process's connection broke before it could report a reason. Ray does not tell the signal.
    return " (probably killed by SIGKILL, sent manually or by the kernel for lack of memory)"


def killed_by_ray(error: Exception | None) -> str:
    """Return a text in brackets if Ray's memory monitor killed a process for lack of memory, otherwise "".

    The text says on which node this happened, and how much memory was used there.

    error: the error of a call to the process, or None.
    """
    if not isinstance(error, OutOfMemoryError):
        return ""
    report = plain(error)
    node = re.search(r"IP: ([^,)\s]+)", report)
    used = re.search(r"([\d.]+)GB(?: used)? / ([\d.]+)GB", report)
    how = f"ended by Ray because its node{f' {node[1]}' if node else ''} was out of memory"
    return f" ({how}: {used[1]} of {used[2]} GB were used)" if used else f" ({how})"


def _needed_memory(report: str) -> list[str]:
    """Return one or two lines for an error message: which processes used the most memory, and what to change.

    report: text of Ray's error about the killed process. It lists processes of the node with their memory.
    """
    users = re.findall(r"^(\d+)\t([\d.]+)\t(.+)$", report, re.MULTILINE)[:_LINES]
    said = ", ".join(
        f"{shortened(command, 60)} (process {pid}) with {size} GB" for pid, size, command in users
    )
    lines = [f"the processes that used the most memory on that node: {said}"] if said else []
    return [
        *lines,
        "give the job more memory on each node, or lower rollout.engine.max_total_tokens (the KV cache of "
        "an engine on a CPU), train.max_tokens_per_micro_batch or reward.workers; see "
        "docs/troubleshooting.md",
    ]
