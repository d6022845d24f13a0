"""The start of SGLang on one node of an engine, in the process of a Ray actor."""

import gc
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from grpo_megatron.cluster.gpu_environment import preload_environment


def meeting_file() -> tuple[BinaryIO, str]:
    """A file by which the processes on this node find each other, and a path to it that is there as long as this process holds it.

    It has no name of its own: an engine ends by SIGKILL, and each one would leave a file behind. It cannot be deleted when they have
    met, because groups that are made later meet there too.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - held as long as the engine
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def start_engine(arguments: dict[str, Any]) -> Any:
    """Return sglang.Engine(**arguments). Its processes on this node are children of this one."""
    unlink_files_of_the_dead()
    if arguments.get("enable_memory_saver"):
        # SGLang preloads the memory saver's library into its schedulers. They inherit this environment.
        os.environ |= preload_environment(os.environ, torch.version.cuda)
    on_cpu = arguments.get("device") == "cpu"
    if on_cpu:
        from grpo_megatron.sglang import cpu_processes

        cpu_processes.prepare()  # first, so that it imports SGLang while this process does
    # What is imported stays: garbage collections meanwhile find nothing, and take a quarter of the time.
    gc.disable()
    import sglang.srt.entrypoints.engine

    gc.enable()
    engine = sglang.srt.entrypoints.engine.Engine
    if on_cpu:
        from grpo_megatron.sglang import cpu_memory

        cpu_memory.register()  # also asked for here, where schedulers are started
        engine = cpu_processes.forking(engine)
    return engine(**arguments)


def unlink_files_of_the_dead() -> None:
    """Those in memory, of 24 MiB, of SGLang's processes of this user that were killed during their start.

    Later they have no names any more, see node.Children. SGLang names them sgl_shm_KIND_PID_RANDOM.
    """
    for path in Path("/dev/shm").glob("sgl_shm_*"):
        pid = path.name.split("_")[-2]
        with suppress(OSError):  # somebody else has removed it
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid)):
                path.unlink()
