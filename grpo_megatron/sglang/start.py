"""The start of SGLang on one node of an engine, within a Ray actor's process."""

import gc
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from grpo_megatron.cluster.gpu_environment import preload_environment

# Longer than any engine takes to start, in seconds.
_LONGEST_START = 3600.0


def meeting_file() -> tuple[BinaryIO, str]:
    """Create the file through which an engine's processes on this node find each other (rendezvous).

    Return (file, path). The path is valid as long as this process keeps the file open. The file takes the
    place of SGLang's rendezvous port.

    The file has no name in any folder. A file with a name would be left behind if SIGKILL ends the engine. It
    could not be deleted after the rendezvous either, because process groups that are created later need it
    too.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - held as long as the engine
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def start_engine(arguments: dict[str, Any]) -> Any:
    """Start SGLang on this node, and return its sglang.Engine.

    SGLang's processes are child processes of this process. SGLang must not have been imported before, because
    the memory saver and, on a CPU, a fast start are prepared before the import. Files in /dev/shm that dead
    engines have left behind are deleted.

    arguments: {name: value} of the arguments of sglang.Engine.
    """
    unlink_files_of_the_dead()
    if arguments.get("enable_memory_saver"):
        # SGLang preloads the memory saver's library into its schedulers. They inherit this environment.
        os.environ |= preload_environment(os.environ, torch.version.cuda)
    on_cpu = arguments.get("device") == "cpu"
    if on_cpu:
        from grpo_megatron.sglang.without_gpu import forking

        forking.prepare()  # first, so that both processes import SGLang at the same time
    # Garbage collections during the import take a quarter of its time and find nothing, as all imported
    # objects stay.
    gc.disable()
    import sglang.srt.entrypoints.engine

    gc.enable()
    engine = sglang.srt.entrypoints.engine.Engine
    if on_cpu:
        from grpo_megatron.sglang.without_gpu import memory_saver

        memory_saver.register()  # this process, which starts the schedulers, uses the memory saver too
        engine = forking.forking(engine)
    return engine(**arguments)


def unlink_files_of_the_dead() -> None:
    """Delete the shared-memory files in /dev/shm that dead SGLang processes of this user have left behind.

    Each file has 24 MiB and is named /dev/shm/sgl_shm_KIND_PID_RANDOM. Only engines that were killed while
    they started leave such files. Once an engine has started, node.Children.unlink_shared_files removes its
    files. Files younger than an hour stay, because containers may share /dev/shm: a process id that is
    unknown here may be that of an engine that starts in another container.
    """
    oldest = time.time() - _LONGEST_START
    for path in Path("/dev/shm").glob("sgl_shm_*"):
        pid = path.name.split("_")[-2]
        with suppress(OSError):  # another process has deleted it
            own = path.stat().st_uid == os.getuid() and path.stat().st_mtime < oldest
            if pid.isdigit() and own and not psutil.pid_exists(int(pid)):
                path.unlink()
