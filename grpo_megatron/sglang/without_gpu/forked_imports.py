"""Imports of the process from which SGLang's processes are forked on a CPU, see `forking`."""

import ctypes
import gc
import signal

_PR_SET_PDEATHSIG = 1
# End this process when the engine's process ends. SGLang makes the same call in its own processes, so they
# end with this process. Without these calls, the processes would be left behind.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

gc.disable()

import ray  # noqa: E402, F401 - each child process imports it, like the engine's process
import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401

gc.enable()
gc.freeze()  # garbage collections in forked processes skip the objects that exist now
