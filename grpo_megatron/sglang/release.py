"""EngineControl makes all calls to a running SGLang engine and hides differences between SGLang's releases.

It supports 0.5.23 (the CPU stack) and 0.5.17 (the GPU stack). No other module checks which release is
installed. tests/integration/test_sglang_releases.py makes all these calls in the Python environments of both.
"""

import asyncio
import os
import pickle
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.lora import LoraConfig, peft_config
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.sglang.kv_pressure import EngineLoad

# Arguments of GPU engines that differ from SGLang's defaults.
#
# cuda_graph_backend_prefill: the default on CUDA, `breakable`, can compute a prompt's keys and values
# wrongly, or read memory that is not its own (sglang#37606). Its graphs hold the tensors between their
# segments only by weak references, so graphs that are captured later reuse that memory. All releases from
# 0.5.17 to 0.5.23 have this bug. tests/unit/test_engine_environment.py fails with the first release that
# does not have it.
GPU_ARGUMENTS = {"cuda_graph_backend_prefill": "disabled"}

# SGLang's modes of pausing requests: drop the keys and values of their tokens, or keep them.
PAUSES = ("retract", "in_place")

# SGLang's answer to a call that it can refuse: (whether it was successful, message).
Accepted = tuple[bool, str]


_FIRST_WITH_SPANS = "0.5.20"


def check_release(rollout: RolloutConfig) -> None:
    """Raise UserError if the installed SGLang is too old for rollout.on_update.

    Settings other than `wait` let responses go on while weights are updated. SGLang must then report which
    weight version sampled each token, which it does since 0.5.20.
    """
    if rollout.on_update == OnUpdate.wait:
        return
    installed = version("sglang")
    if Version("0.5") < Version(installed) < Version(_FIRST_WITH_SPANS):
        raise UserError(
            f"rollout.on_update={rollout.on_update.value} needs SGLang {_FIRST_WITH_SPANS} or later, which "
            f"reports the weight version of each token, but SGLang {installed} is installed; set "
            "rollout.on_update=wait"
        )


def unname_reports(reader: Any) -> None:
    """Have SGLang keep its schedulers' reports in a file without a name, if they come from several nodes.

    With data-parallel attention on several nodes, the reports arrive over the network, and SGLang writes them
    to a file in /dev/shm. It creates the file in this process when the first report is read. This is too late
    for Children.unlink_shared_files, and SGLang never deletes the file.

    reader: SGLang's reader of the reports, which has not read any report yet.
    """
    if hasattr(reader, "_shm_path"):
        reader._shm_path = reader._shm_reader.path = f"/proc/self/fd/{os.memfd_create('sglang_loads')}"


class EngineControl:
    """Interface to one SGLang engine that is the same for all supported releases of SGLang.

    Calls that SGLang can refuse return Accepted, which is (whether SGLang accepted the call, message). Errors
    that SGLang raises are passed on unchanged.
    """

    # Name of the LoRA adapter with which SGLang computes all requests.
    _adapter: str | None = None

    def __init__(self, engine: Any):
        """Wrap a running engine.

        engine: an object of the class sglang.Engine in this process.
        """
        from sglang.srt.managers import io_struct

        self._engine, self._manager, self._requests = engine, engine.tokenizer_manager, io_struct
        unname_reports(self._manager.load_snapshot_reader)

    async def sample(
        self,
        request_number: int,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        routed: int | None,
        top: int,
        cache: str = "",
        report: Callable[[list[int], list[float]], None] | None = None,
        report_every: int = 1,
    ) -> dict[str, Any]:
        """Sample one response and return SGLang's answer: a dict with `output_ids` and `meta_info`.

        If the task that awaits this call is cancelled, the request is aborted. CancelledError is raised after
        SGLang has ended the request.

        request_number: a number that no other request to this engine has.
        prompt_ids: token ids of the prompt.
        sampling: SGLang's sampling parameters.
        routed: index of the first token whose experts (MoE) are returned; None: no experts are returned.
            SGLang stores experts along with keys and values, so they are known for tokens in the prefix cache
            too.
        top: number of most likely tokens to return for each response token; 0: none.
        cache: name of a prefix cache. A request reuses only prefixes of requests with the same name; "": the
            common cache. SGLang before 0.5.20 ignores the name.
        report: called with (ids, log-probs) of the tokens sampled since its last call, while the response is
            incomplete. None: nothing is reported.
        report_every: number of tokens after which `report` is called.

        Raises ValueError if SGLang refuses the request.
        """
        wanted = {} if routed is None else {"return_routed_experts": True, "routed_experts_start_len": routed}
        if top:
            wanted["top_logprobs_num"] = top
        # Releases before 0.5.20 have no such argument. They refuse updates while requests run, and drop their
        # cache at each update, so that all prefixes in it are of one version.
        if cache and self.knows_spans:
            wanted["cache_salt"] = cache
        wanted |= {"input_ids": prompt_ids, "return_logprob": True, "rid": _request_id(request_number)}
        wanted["lora_path"] = self._adapter
        if report:
            answer = self._reported(wanted, sampling | {"stream_interval": report_every}, report)
        else:
            answer = self._engine.async_generate(sampling_params=sampling, **wanted)
        call = asyncio.ensure_future(answer)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not self.abort(request_number):
                call.cancel()
            await asyncio.wait({call})
            raise

    async def _reported(
        self,
        wanted: dict[str, Any],
        sampling: dict[str, Any],
        report: Callable[[list[int], list[float]], None],
    ) -> dict[str, Any]:
        """Sample one response as a stream, pass new tokens to `report`, and return SGLang's last answer.

        The last answer contains the whole response.

        wanted: arguments of sglang.Engine.async_generate, except for the sampling parameters.
        sampling: SGLang's sampling parameters.
        report: called with the ids and log-probs of new tokens, while the response is incomplete.

        Raises ValueError if SGLang refuses the request.
        """
        answers = await self._engine.async_generate(sampling_params=sampling, stream=True, **wanted)
        seen = 0
        async for answer in answers:
            meta = answer["meta_info"]
            new = meta["output_token_logprobs"][seen:]
            if meta["finish_reason"] is None and new:
                seen += len(new)
                report([token for _, token, _ in new], [logprob for logprob, _, _ in new])
        reason = answer["meta_info"]["finish_reason"]
        if reason.get("status_code"):  # without a stream, SGLang raises it
            raise ValueError(reason["message"])
        return answer

    def abort(self, request_number: int) -> bool:
        """Abort a request that waits or runs in SGLang's scheduler, so that its call of `sample` returns.

        Return True if the request is being aborted. Return False, and do nothing, if the scheduler does not
        have the request, for example because SGLang is paused. The caller must then cancel its call of
        SGLang.
        """
        state = self._manager.rid_to_state.get(_request_id(request_number))
        if state is None or not state.dispatched:
            return False
        self._manager.abort_request(_request_id(request_number))
        return True

    async def score(self, sequences: list[list[int]]) -> list[list[tuple[float | None, int, None]]]:
        """Return (log-prob, id, None) of every token of each sequence, at temperature 1.

        The log-prob of the first token is None.
        """
        answers = await self._engine.async_generate(
            input_ids=sequences,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=0,
            lora_path=self._adapter,
        )
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

    def shutdown(self) -> None:
        self._engine.shutdown()

    def load(self) -> EngineLoad:
        """Return how many requests run and wait in SGLang's schedulers, as of their last reports.

        A scheduler writes a report to a file when it reads prompts, every 15 decoding steps, and when it
        becomes idle. The first call opens the file, so it must come before the file's name is removed.
        """
        reports = self._manager.load_snapshot_reader.read_all()  # one for each data-parallel attention group
        return EngineLoad(
            sum(report.num_running_reqs for report in reports),
            sum(report.num_waiting_reqs for report in reports),
            max((report.timestamp for report in reports), default=0.0),
        )

    @property
    def last_heard(self) -> float:
        """Time of the last message, such as new tokens, from SGLang's scheduler: seconds since the epoch."""
        return self._manager.last_receive_tstamp

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a response, from the model's config.json and generation_config.json."""
        return frozenset(self._manager.model_config.hf_eos_token_id or ())

    @property
    def knows_spans(self) -> bool:
        """True if SGLang reports which weight version sampled which tokens of a response (since 0.5.20).

        Earlier releases report only one version for a response: the version when the response ended.
        """
        return "weight_versions" in self._requests.BatchTokenIDOutput.__struct_fields__

    async def prepare(self, lora: LoraConfig | None, num_ranks: int) -> Accepted:
        """Prepare a new engine for requests. Return (whether SGLang accepted the call, message).

        All objects that exist now are excluded from garbage collection in the engine's processes, for speed.
        SGLang's own server does this too. Otherwise each collection traverses all imported objects, which
        takes 0.1 to 0.3 s in each of the three processes.

        lora: settings of the LoRA adapter with which SGLang computes all requests from now on. Its values are
            zero, until a weight sync writes others into SGLang's buffers. None: no adapter.
        num_ranks: number of the engine's tensor-parallel ranks.
        """
        accepted = (True, "") if lora is None else await self._create_adapter(lora, num_ranks)
        await self._manager.freeze_gc()
        return accepted

    async def _create_adapter(self, lora: LoraConfig, num_ranks: int) -> Accepted:
        answer = await self._manager.load_lora_adapter_from_tensors(
            self._requests.LoadLoRAAdapterFromTensorsReqInput(
                lora_name="policy",
                config_dict=peft_config(lora, base=""),
                serialized_named_tensors=[pickle.dumps({})] * num_ranks,
                pinned=True,
            )
        )
        if answer.success:
            self._adapter = "policy"
            # SGLang fills the adapter's buffers before the first request with it, and never again, because
            # the adapter is pinned.
            await self._engine.async_generate(
                input_ids=[0],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                lora_path=self._adapter,
            )
        return answer.success, answer.error_message

    async def pause(self, keep_cache: bool) -> None:
        """Pause all requests until `resume`.

        keep_cache: True to keep the keys and values of the requests' tokens. False: `resume` computes them
            anew.
        """
        mode = PAUSES[keep_cache]
        await self._manager.pause_generation(self._requests.PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        await self._manager.continue_generation(self._requests.ContinueGenerationReqInput())

    async def begin_weight_update(self) -> Accepted:
        """Prepare the engine for new weights. Return (whether the engine accepted the call, message).

        Releases of SGLang before 0.5.21 accept weights at any time. For them nothing is done.
        """
        if not hasattr(self._manager, "begin_weight_update"):
            return True, ""
        return await self._manager.begin_weight_update(self._requests.BeginWeightUpdateReqInput(), None)

    async def call_loader(self, payload: bytes, num_ranks: int, loader: str) -> Accepted:
        """Call a function on every tensor-parallel rank of the engine, as SGLang's custom weight loader.

        The function gets the rank's model and named tensors. Return (whether SGLang accepted the call,
        message).

        payload: the named tensors, pickled. All ranks get the same ones.
        num_ranks: number of the engine's tensor-parallel ranks.
        loader: import path of the function.
        """
        request = self._requests.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * num_ranks, load_format=loader, flush_cache=False
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
        """Release parts of the engine's memory.

        SGLang crashes if its scheduler is not idle, or if one of the parts is released already. The caller
        (EngineMemory) must check both.

        tags: SGLang's names of the parts: "weights", "kv_cache" (the values of memory.MemoryPart).
        """
        await self._manager.release_memory_occupation(
            self._requests.ReleaseMemoryOccupationReqInput(tags=tags)
        )

    async def resume_memory(self, tags: list[str]) -> None:
        """Allocate parts of the engine's memory again. All of these parts must have been released before.

        tags: SGLang's names of the parts: "weights", "kv_cache" (the values of memory.MemoryPart).
        """
        await self._manager.resume_memory_occupation(self._requests.ResumeMemoryOccupationReqInput(tags=tags))

    async def tag(self, version: int) -> None:
        """Set the weight version that samples report from now on. SGLang sends no confirmation."""
        if hasattr(self._manager, "update_weight_version"):
            request = self._requests.UpdateWeightVersionReqInput(
                new_version=str(version), abort_all_requests=False
            )
            await self._manager.update_weight_version(request)
        else:
            # Before 0.5.21 only the tokenizer manager has the version. After a weight update it makes this
            # call itself.
            self._manager._update_weight_version_if_provided(str(version))


def _request_id(number: int) -> str:
    """Return a request's number as text of 32 characters, the length of the ids that SGLang itself chooses.

    All ids must have the same length. When SGLang aborts a request, it also aborts every request whose id
    begins with the id of that request.
    """
    return f"{number:032d}"


def weight_spans(meta: dict[str, Any], length: int) -> tuple[WeightSpan, ...]:
    """Return which weight version sampled which tokens of a response, as consecutive spans of its tokens.

    meta: SGLang's meta_info of the response. Before SGLang 0.5.20 it contains only one version, which is
        returned for the whole response.
    length: number of tokens of the response.
    """
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    return tuple(WeightSpan(int(span["version"]), span["start"], span["end"]) for span in spans)
