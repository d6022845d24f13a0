"""The start of SGLang on one node of an engine, in the process of a Ray actor."""

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def start_engine(arguments: dict[str, Any]) -> Any:
    """sglang.Engine(**arguments), whose processes on this node are children of this one."""
    unlink_files_of_the_dead()
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
