"""Imported by the process from which SGLang's processes on a CPU are forked, before the first one is; see cpu_processes."""

import ctypes
import gc
import signal

_PR_SET_PDEATHSIG = 1
# Its children end with it, by SGLang's own call of this. It must not outlive the engine's process, which would leave them behind.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

gc.disable()

import ray  # noqa: E402, F401 - what the engine's process was started with, each child imports too
import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401

gc.enable()
gc.freeze()  # no collection of a child walks through what it shares with the others
