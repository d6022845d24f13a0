"""A node of an SGLang engine: its child processes, and the Ray actor that holds those of the further nodes of an engine over several."""

import asyncio
import os
from typing import Any

import psutil
import ray

from grpo_megatron.cluster.processes import Process, redirect_output
from grpo_megatron.sglang.start import start_engine


class Children:
    """SGLang's processes on this node, as they are now."""

    def __init__(self) -> None:
        # Python's own helpers are children too, which come and go.
        found = psutil.Process().children(recursive=True)
        self._processes = [child for child in found if "sglang::" in " ".join(child.cmdline())]

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._processes]

    @property
    def alive(self) -> bool:
        return all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self._processes)


@ray.remote
class EngineNode:
    """Serves nothing: its schedulers follow those of the engine's first node."""

    def __init__(self, process: Process, arguments: dict[str, Any]):
        redirect_output(process.log)
        self._engine = start_engine(arguments)
        self._children = Children()

    async def ready(self) -> int:
        """Returns the process id once the node is up."""
        return os.getpid()

    async def end(self) -> None:
        """Returns as soon as a child of SGLang's is gone."""
        while self._children.alive:
            await asyncio.sleep(1.0)

    async def shutdown(self) -> None:
        self._engine.shutdown()
