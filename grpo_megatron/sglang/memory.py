"""What an engine gives back to whom it shares its devices with, and takes again."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

import torch

from grpo_megatron.cluster.memory import anonymous_bytes
from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.release import EngineControl

# A scheduler that runs ahead of its device ends its last batch some milliseconds after the requests in it.
_IDLE_POLLS, _IDLE_POLL_SECONDS = 200, 0.05


class Part(Enum):
    """By SGLang's tags. Contents of either are lost when it is released."""

    weights = "weights"
    kv_cache = "kv_cache"


class EngineMemory:
    """Asks SGLang, whose schedulers hold the memory, and knows what is released.

    SGLang itself would take a request, or weights, into memory that is not there, and die of it.
    """

    def __init__(self, name: str, control: EngineControl, waited_for: Callable[[str, Awaitable], Awaitable]):
        """name: of the engine, in messages. waited_for: (call, awaitable) -> its result."""
        self._name, self._control, self._waited_for = name, control, waited_for
        self._released: set[Part] = set()

    def must_have(self, *parts: Part) -> None:
        """Raises RuntimeError if one of them is released."""
        gone = [part.value for part in parts if part in self._released]
        if gone:
            raise RuntimeError(
                f"{self._name} has given back the memory of its {' and '.join(gone)}, which must be resumed first"
            )

    async def release(self) -> None:
        """Give back all parts. Nothing may be running. Raises RuntimeError if one is released already."""
        self.must_have(*Part)
        await self._until_idle()
        await self._waited_for(
            "release_memory_occupation", self._control.release_memory([part.value for part in Part])
        )
        self._released = set(Part)

    async def _until_idle(self) -> None:
        """A scheduler that is asked to release its memory before it is idle ends."""
        for _ in range(_IDLE_POLLS):
            if (await self._waited_for("flush_cache", self._control.flush_cache()))[0]:
                return
            await asyncio.sleep(_IDLE_POLL_SECONDS)
        raise RuntimeError(f"{self._name} still generates, and may not give back its memory")

    async def resume(self, part: Part) -> None:
        """Have the memory of a part again, with undefined contents. Raises RuntimeError if it is not released."""
        if part not in self._released:
            raise RuntimeError(f"{self._name} still has the memory of its {part.value}")
        await self._waited_for("resume_memory_occupation", self._control.resume_memory([part.value]))
        self._released.remove(part)


def engine_bytes(children: Children) -> int:
    """What an engine occupies: all that is in use on the fullest of its GPUs, by whomever; without GPUs the memory of its children."""
    devices = torch.cuda.device_count()
    if devices:
        # As the driver says it: torch does not know what is unmapped, and a container does not see whose the rest is.
        return max(torch.cuda.device_memory_used(device) for device in range(devices))
    return sum(anonymous_bytes(pid) for pid in children.pids)
