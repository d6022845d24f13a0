"""What the releases of SGLang differ in; the rest of the package does not ask which one is installed.

For 0.5.23 (the CPU stack) and 0.5.17 (the GPU stack). tests/unit/test_sglang_releases.py holds what is called here against both.
"""

from typing import Any

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.weight_sync import PauseMode

# What SGLang answers where it can refuse: whether it did as asked, and why not.
Accepted = tuple[bool, str]


class EngineControl:
    """What is asked of a running engine besides samples."""

    def __init__(self, manager: Any):
        """manager: SGLang's TokenizerManager, in this process."""
        from sglang.srt.managers import io_struct

        self._manager, self._requests = manager, io_struct

    @property
    def knows_spans(self) -> bool:
        """Since 0.5.20: samples say which of their tokens which weights sampled; before, only under which weights they ended."""
        return "weight_versions" in self._requests.BatchTokenIDOutput.__struct_fields__

    async def freeze_gc(self) -> None:
        """Take what is in memory now out of the garbage collections of all of the engine's processes."""
        await self._manager.freeze_gc()

    async def pause(self, mode: PauseMode) -> None:
        await self._manager.pause_generation(self._requests.PauseGenerationReqInput(mode=mode.value))

    async def resume(self) -> None:
        await self._manager.continue_generation(self._requests.ContinueGenerationReqInput())

    async def begin_weight_update(self) -> Accepted:
        """Before 0.5.21 weights are taken at any time."""
        if not hasattr(self._manager, "begin_weight_update"):
            return True, ""
        return await self._manager.begin_weight_update(self._requests.BeginWeightUpdateReqInput(), None)

    async def load(self, payloads: list[bytes], load_format: str | None) -> Accepted:
        """payloads: of each tensor-parallel rank. load_format: a custom loader by its name; None: the model's own."""
        request = self._requests.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, flush_cache=False
        )
        return await self._manager.update_weights_from_tensor(request, None)

    async def end_weight_update(self) -> Accepted:
        if not hasattr(self._manager, "end_weight_update"):
            return True, ""
        return await self._manager.end_weight_update(self._requests.EndWeightUpdateReqInput(), None)

    async def flush_cache(self) -> Accepted:
        answer = await self._manager.flush_cache()
        return answer.success, answer.message

    async def tag(self, version: int) -> None:
        """What is sampled from now on carries this version. Has no answer: the tags of samples are checked."""
        if hasattr(self._manager, "update_weight_version"):
            request = self._requests.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
            await self._manager.update_weight_version(request)
        else:
            # Before 0.5.21 the tag is the tokenizer manager's alone, which sets it like this after an update.
            self._manager._update_weight_version_if_provided(str(version))


def weight_spans(meta: dict[str, Any], length: int) -> tuple[WeightSpan, ...]:
    """Which weights sampled which of a response's tokens. meta: SGLang's meta_info; before 0.5.20 it has the last version only."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    return tuple(WeightSpan(int(span["version"]), span["start"], span["end"]) for span in spans)
