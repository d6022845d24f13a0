"""Every call to a running SGLang engine, and what its releases differ in; nobody else asks which one is installed.

For 0.5.23 (the CPU stack) and 0.5.17 (the GPU stack). tests/integration/test_sglang_releases.py makes all these calls with the Python of
both.
"""

from typing import Any

import torch

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.weight_sync import PauseMode

# Arguments of engines on GPUs in which this project departs from SGLang's defaults.
#
# cuda_graph_backend_prefill: the default on CUDA, `breakable`, can compute a prompt's keys and values
# wrongly, or read memory that is not its own (sglang#37606). Its graphs keep the tensors between their
# segments by weak references, so graphs that are captured later reuse that memory. All releases from 0.5.17
# to 0.5.23 do. tests/unit/test_engine_environment.py fails with the first one that does not.
GPU_ARGUMENTS = {"cuda_graph_backend_prefill": "disabled"}

# What SGLang answers where it can refuse: whether it did as asked, and why not.
Accepted = tuple[bool, str]


class EngineControl:
    """Methods that return Accepted are refused by the engine where that is false; the others raise what SGLang raises."""

    def __init__(self, engine: Any):
        """engine: an sglang.Engine, of this process."""
        from sglang.srt.managers import io_struct

        self._engine, self._manager, self._requests = engine, engine.tokenizer_manager, io_struct

    async def sample(
        self, prompt_ids: list[int], sampling: dict[str, Any], routed: int | None, top: int
    ) -> dict[str, Any]:
        """SGLang's answer. routed: it says which experts tokens went to, from this one on; None: it does not. top: how many of the
        likeliest tokens it names at each place.

        SGLang keeps the experts of a token beside its keys and values, so it knows those of tokens it finds in its prefix cache.
        """
        wanted = {} if routed is None else {"return_routed_experts": True, "routed_experts_start_len": routed}
        if top:
            wanted["top_logprobs_num"] = top
        return await self._engine.async_generate(
            input_ids=prompt_ids, sampling_params=sampling, return_logprob=True, **wanted
        )

    async def score(self, sequences: list[list[int]]) -> list[list[tuple[float | None, int, str | None]]]:
        """(log-prob, id, text) of every token of each sequence, at temperature 1; the first one has no log-prob."""
        answers = await self._engine.async_generate(
            input_ids=sequences,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

    def shutdown(self) -> None:
        self._engine.shutdown()

    def abort(self) -> None:
        """End all requests, waiting and running; `sample` returns what they have."""
        self._manager.abort_request(abort_all=True)

    @property
    def last_heard(self) -> float:
        """When SGLang's scheduler last answered anything, such as the tokens of some decoding steps; seconds since the epoch."""
        return self._manager.last_receive_tstamp

    @property
    def end_ids(self) -> frozenset[int]:
        """The ends that SGLang reads from the model's config.json and generation_config.json."""
        return frozenset(self._manager.model_config.hf_eos_token_id or ())

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

    async def load_tensors(self, tensors: list[tuple[str, torch.Tensor]], num_ranks: int) -> Accepted:
        """By their HF names, by the model's own loader; for the ranks of this node."""
        from sglang.srt.utils import MultiprocessingSerializer

        # One payload for each: the file handles inside can be taken once only.
        return await self._load(
            [MultiprocessingSerializer.serialize(tensors) for _ in range(num_ranks)], None
        )

    async def call_loader(self, payload: bytes, num_ranks: int, loader: str) -> Accepted:
        """A function, by its name, on every rank. payload: of the named tensors that it gets, as pickle makes it."""
        return await self._load([payload] * num_ranks, loader)

    async def _load(self, payloads: list[bytes], load_format: str | None) -> Accepted:
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

    async def release_memory(self, tags: list[str]) -> None:
        """See sglang.memory: the scheduler must be idle, and none of the parts released."""
        await self._manager.release_memory_occupation(
            self._requests.ReleaseMemoryOccupationReqInput(tags=tags)
        )

    async def resume_memory(self, tags: list[str]) -> None:
        """Only what is released."""
        await self._manager.resume_memory_occupation(self._requests.ResumeMemoryOccupationReqInput(tags=tags))

    async def tag(self, version: int) -> None:
        """What is sampled from now on carries this version. Has no answer: the tags of samples are checked."""
        if hasattr(self._manager, "update_weight_version"):
            request = self._requests.UpdateWeightVersionReqInput(
                new_version=str(version), abort_all_requests=False
            )
            await self._manager.update_weight_version(request)
        else:
            # Before 0.5.21 the tag is the tokenizer manager's alone, which sets it like this after an update.
            self._manager._update_weight_version_if_provided(str(version))


def weight_spans(meta: dict[str, Any], length: int) -> tuple[WeightSpan, ...]:
    """Which weights sampled which of a response's tokens. meta: SGLang's meta_info; before 0.5.20 it has the last version only."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    return tuple(WeightSpan(int(span["version"]), span["start"], span["end"]) for span in spans)
