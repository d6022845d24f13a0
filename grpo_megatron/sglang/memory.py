"""Release and resumption of an engine's memory, for engines that share their GPUs with the trainer."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

import torch

from grpo_megatron.cluster.memory import anonymous_bytes
from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.release import EngineControl

# Number of polls until the scheduler must be idle. A scheduler that runs ahead of its device is busy for some
# milliseconds after the requests of its last batch have ended.
_IDLE_POLLS, _IDLE_POLL_SECONDS = 200, 0.05


class MemoryPart(Enum):
    """A part of an engine's memory that can be released. The value is SGLang's name (tag) of the part.

    The contents of a part are lost when it is released.
    """

    weights = "weights"
    kv_cache = "kv_cache"


class EngineMemory:
    """Releases and resumes the memory of an engine, and records which parts are released.

    The record is needed because SGLang keeps none. SGLang would accept requests or weights while the memory
    for them is released, and then crash.
    """

    def __init__(self, name: str, control: EngineControl, await_call: Callable[[str, Awaitable], Awaitable]):
        """Manage the memory of a running engine. No part of the memory may be released yet.

        name: name of the engine in error messages.
        await_call: function (name of a call to SGLang, awaitable) that awaits the call and returns its
            result. SGLangEngine passes a function that raises an error if SGLang dies meanwhile.
        """
        self._name, self._control, self._await_call = name, control, await_call
        self._released: set[MemoryPart] = set()

    def must_have(self, *parts: MemoryPart) -> None:
        """Raise RuntimeError if one or more of these parts of the engine's memory are released."""
        gone = [part.value for part in parts if part in self._released]
        if gone:
            raise RuntimeError(
                f"{self._name} has released the memory of its {' and '.join(gone)}; call resume_memory first"
            )

    async def release(self) -> None:
        """Release all parts of the engine's memory that are not released yet. The prefix cache is dropped.

        Raises RuntimeError if requests still run after ten seconds.
        """
        held = [part.value for part in MemoryPart if part not in self._released]
        if not held:
            return
        await self._until_idle()
        await self._await_call("release_memory_occupation", self._control.release_memory(held))
        self._released = set(MemoryPart)

    async def _until_idle(self) -> None:
        """Wait until SGLang's scheduler is idle. A busy scheduler dies if it is asked to release its memory.

        Raises RuntimeError if the scheduler is still busy after ten seconds.
        """
        for _ in range(_IDLE_POLLS):
            if (await self._await_call("flush_cache", self._control.flush_cache()))[0]:
                return
            await asyncio.sleep(_IDLE_POLL_SECONDS)
        raise RuntimeError(f"{self._name} is still generating, so its memory cannot be released")

    async def resume(self, part: MemoryPart) -> None:
        """Allocate the memory of a part again, if it is released. The contents are undefined afterwards."""
        if part not in self._released:
            return
        await self._await_call("resume_memory_occupation", self._control.resume_memory([part.value]))
        self._released.remove(part)


def engine_bytes(children: Children) -> int:
    """Return the bytes of memory in use by an engine on this node.

    With GPUs, this is the memory in use on the engine's fullest GPU. It includes the memory of all processes
    that use this GPU, such as the trainer. Without GPUs, it is the anonymous memory of SGLang's child
    processes.

    children: SGLang's child processes on this node.
    """
    devices = torch.cuda.device_count()
    if devices:
        # Ask the driver. torch does not know about unmapped memory, and within a container one cannot see
        # which process uses which memory.
        return max(torch.cuda.device_memory_used(device) for device in range(devices))
    return sum(anonymous_bytes(pid) for pid in children.pids)
