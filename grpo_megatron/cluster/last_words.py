"""What a process that died leaves behind: how it ended, as far as anybody knows, and the end of its log."""

import re

import psutil
from ray.exceptions import RayError

from grpo_megatron.errors import shortened
from grpo_megatron.process_tree import killed_for_memory

_LINES = 3
_TAIL_BYTES = 20_000
_BAR = re.compile(r"\d+%.*\d+/\d+ \[")  # of tqdm
# Python's faulthandler, which Ray turns on in its workers, names the signal of a crash so; the stack comes behind it.
_CRASH = "Fatal Python error: "
_killed_before = killed_for_memory()


def last_words(log: str, error: RayError | None = None) -> tuple[str, list[str]]:
    """(how it ended, at most three lines). error: as Ray reported the death. The lines are those from a crash on, or else the log's last
    ones; without what every start writes."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return _how(error, ""), ["(the log cannot be read from here)"]
    lines = worth_showing(text.splitlines())
    crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
    chosen = lines[-_LINES:] if crash is None else lines[crash : crash + _LINES]
    return _how(error, "" if crash is None else lines[crash]), [shortened(line, 300) for line in chosen]


def worth_showing(lines: list[str]) -> list[str]:
    """Neither empty lines, nor progress bars, nor warnings with the line of source that Python prints below each."""
    kept, below_warning = [], False
    for line in lines:
        if "warn" in line.lower() or "Ignore import error" in line:  # of SGLang, for models that need other packages
            below_warning = True
        elif line.strip() and not _BAR.search(line) and not (below_warning and line.startswith(" ")):
            kept.append(line)
            below_warning = False
    return kept


def _how(error: RayError | None, crash: str) -> str:
    if crash:
        return f" ({crash.removeprefix(_CRASH)})"
    text = str(error or "")
    if "running low on memory" in text or "NODE_OUT_OF_MEMORY" in text:
        return " (ended by Ray because its node was out of memory)"
    if code := re.search(r"exit code (\d+)", text):
        return f" (with exit status {code[1]})"
    if "connection error code 2" not in text:
        detail = re.search(r"Worker exit detail: ([^.]+)", text)
        return f" ({shortened(detail[1], 100)})" if detail else ""
    # Its connection broke: it had no time to say anything. Ray does not tell the signal.
    if _on_this_machine(text) and killed_for_memory() > _killed_before:
        return " (by SIGKILL, as it seems: this machine was out of memory, and the kernel killed processes)"
    return " (by SIGKILL, as it seems: by hand, or by the kernel for lack of memory)"


def _on_this_machine(report: str) -> bool:
    """Whether the process that Ray reports was here: only of this machine it is known whether the kernel killed processes."""
    address = re.search(r"^\s*ip: (\S+)$", report, re.MULTILINE)
    here = {one.address for interface in psutil.net_if_addrs().values() for one in interface}
    return address is not None and address[1] in here
