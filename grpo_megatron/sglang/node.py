"""The processes on one node of an SGLang engine.

`Children` are SGLang's child processes on a node. `EngineNode` is the Ray actor that holds them on the
further nodes of an engine that spans several nodes.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from grpo_megatron.cluster.processes import Process, redirect_output
from grpo_megatron.sglang.start import start_engine

# Prefix of the shared-memory files of SGLang's processes: 24 MiB per group of ranks, and some KiB per engine.
_SHARED = "/dev/shm/sgl"


class Children:
    """SGLang's processes that are child processes of this process. They are looked up once, at creation.

    The class is used to detect dead engines, to measure their memory, and to delete their shared-memory
    files.
    """

    def __init__(self) -> None:
        # Python's helper processes, which come and go, are children too and are skipped.
        self._processes = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # the process has ended
                if "sglang::" in " ".join(child.cmdline()):
                    self._processes.append(child)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._processes]

    def states(self) -> list[str]:
        """Return the state of each child process as text, such as `sglang::scheduler (pid 7) stopped`."""
        found = []
        for child in self._processes:
            with suppress(psutil.NoSuchProcess):
                found.append(f"{child.cmdline()[0].split('_TP')[0]} (pid {child.pid}) {child.status()}")
        return found

    def unlink_shared_files(self) -> None:
        """Remove the child processes' shared-memory files from /dev/shm while the processes still use them.

        Every process must have opened its files already. The files are freed when the processes end. If they
        were not removed, they would stay in /dev/shm forever, because SGLang ends its processes by SIGKILL.
        """
        for pid in self.pids:
            with suppress(OSError):  # the process has just died, which is detected elsewhere
                mapped = Path(f"/proc/{pid}/maps").read_text().split()
                for path in {word for word in mapped if word.startswith(_SHARED)}:
                    Path(path).unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        return all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self._processes)


@ray.remote
class EngineNode:
    """The Ray actor for a further node of an engine that spans several nodes.

    An SGLangEngine actor on the engine's first node receives all requests. On each other node, an EngineNode
    actor starts SGLang's scheduler processes, which follow the schedulers on the first node.
    """

    def __init__(self, process: Process, arguments: dict[str, Any]):
        redirect_output(process.log)
        self._engine = start_engine(arguments)
        self._children = Children()
        self._children.unlink_shared_files()

    async def ready(self) -> int:
        """Return the id of this process. The call returns only after SGLang has started on this node."""
        return os.getpid()

    async def end(self) -> None:
        """Wait until one of SGLang's child processes on this node ends, then return.

        The SGLangEngine actor on the engine's first node makes this call, to notice if this node fails.
        """
        while self._children.alive:
            await asyncio.sleep(1.0)

    async def shutdown(self) -> None:
        self._engine.shutdown()
