"""One SGLang engine as a Ray actor: token ids in, token ids and log-probs out.

Requests go in by `submit`, finished ones come out of `poll` as soon as they end: one Ray call
carries many samples, and nobody waits for the slowest of a group. What releases of SGLang differ in
is in release.py, and every call to it.
"""

import asyncio
import base64
import os
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import ray

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.heart import Heart
from grpo_megatron.cluster.processes import Process, redirect_output
from grpo_megatron.config.weight_sync import PauseMode
from grpo_megatron.errors import UserError
from grpo_megatron.sglang.memory import EngineMemory, Part, engine_bytes
from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.release import Accepted, EngineControl, weight_spans
from grpo_megatron.sglang.start import meeting_file, start_engine
from grpo_megatron.sglang.weight_door import DOOR, answer_key, by_value
from grpo_megatron.weights.buckets import Bucket
from grpo_megatron.weights.sync.order import Answer, Order


@dataclass(frozen=True)
class Request:
    """One response to be sampled. key: how the caller recognises it. routed: of how many of its first tokens the caller has the
    experts already. top: how many of the likeliest tokens to name at each place."""

    key: tuple[int, int]
    prompt_ids: list[int]
    sampling: dict[str, Any]
    routed: int = 0
    top: int = 0


@dataclass(frozen=True)
class Completion:
    """A finished request. response_ids int32 [R], logprobs float32 [R] (after temperature).

    routing: int16 [P + R - 1 - routed, L, k], the experts of each token that was computed in each of the L layers
    with experts, but the first ones, see Request; None unless asked for.
    top_ids int32, top_logprobs float32 [R, Request.top]: the likeliest tokens at each place, the likeliest first, and their log-probs
    (after temperature).
    """

    key: tuple[int, int]
    response_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    weight_spans: tuple[WeightSpan, ...]
    routing: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


class _Scheduling:
    """SGLang's processes as the engine's heart sees them; see cluster.heart.View.

    The threads of the actor tell nothing: its event loop goes round whatever the scheduler does.
    """

    def __init__(self, control: EngineControl, children: Children):
        self._control, self._children = control, children

    def progress(self) -> float:
        return self._control.last_heard

    def place(self) -> str:
        return ", ".join(self._children.states())

    def stacks(self) -> str:
        return ""


def _phase(method: Callable) -> Callable:
    """While the method runs, the engine is in the phase of its name."""

    @wraps(method)
    async def within(engine, *arguments):
        with engine._heart.phase(method.__name__):
            return await method(engine, *arguments)

    return within


@ray.remote
class SGLangEngine:
    """The engine's process; SGLang's scheduler and detokenizer are its children."""

    def __init__(
        self,
        process: Process,
        arguments: dict[str, Any],
        routed_layers: tuple[bool, ...] | None,
        others: dict[Process, ray.actor.ActorHandle],
    ):
        """routed_layers: for each layer of the model whether it has experts, if their routing is wanted. others: EngineNode of each
        of its nodes but this one."""
        redirect_output(process.log)
        self._process, self._routed_layers = process, routed_layers
        if "dist_init_addr" not in arguments:
            # SGLang's ranks would find each other through a port that is open on every interface.
            self._meeting, path = meeting_file()
            os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{path}"
        self._control = EngineControl(start_engine(arguments))
        self._children = Children()
        self._children.unlink_shared_files()
        self._ends = {other: node.end.remote().future() for other, node in others.items()}
        self._memory = EngineMemory(process.name, self._control, self._while_alive)
        self._tp_size = arguments["tp_size"]
        self._admitted, self._updating, self._paused = False, False, False
        self._aborted = -1  # the last batch that was
        self._finished: asyncio.Queue = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()
        self._heart = Heart(_Scheduling(self._control, self._children))
        self._heart.start()

    async def ready(self) -> int:
        """Returns the process id once the engine can serve."""
        # SGLang's own server does this after its start. Without it, garbage collections walk through everything that was
        # imported, which takes 0.1 to 0.3 s each in its three processes.
        await self._control.freeze_gc()
        return os.getpid()

    async def end_ids(self) -> frozenset[int]:
        """The tokens by which the model ends a response."""
        return self._control.end_ids

    async def beat(self) -> None:
        """Tell the driver's watch what was done until now."""
        self._heart.beat()

    def _dead(self) -> Process | None:
        """The node of this engine, if any, of which SGLang's processes are not all there any more."""
        if not self._children.alive:
            return self._process
        return next((process for process, end in self._ends.items() if end.done()), None)

    async def _while_alive(self, call: str, awaitable: Awaitable, timeout: float | None = None) -> Any:
        """The awaitable's result; raises ProcessDied if a child of SGLang's dies meanwhile, on any node.

        SGLang ends this process when a child of its dies, but not always: seen after a SIGKILL of the
        scheduler, when every call then waits forever. Raises asyncio.TimeoutError after `timeout`.
        """
        task = asyncio.ensure_future(awaitable)
        waited = 0.0
        while not task.done():
            step = 1.0 if timeout is None else min(1.0, timeout - waited)
            await asyncio.wait({task}, timeout=step)
            waited += step
            if not task.done():
                if dead := self._dead():
                    task.cancel()
                    raise dead.died(call)
                if timeout is not None and waited >= timeout:
                    task.cancel()
                    raise asyncio.TimeoutError
        return task.result()

    def admit(self) -> None:
        """From now on, and until the next update begins, this engine may serve."""
        self._admitted = True

    def _must_be_admitted(self) -> None:
        # A new process, such as one that took a dead engine's place, is not, and one whose update failed is no more.
        if not self._admitted:
            raise RuntimeError(
                f"{self._process.name} may not serve: nobody has compared its weights with the trainer's"
            )
        self._memory.must_have(*Part)

    async def submit(self, batch: int, requests: list[Request]) -> None:
        """Begin to answer them. They are of a batch, which `abort` ends."""
        # Ray may run the calls of an actor with an event loop in another order than they were made. Requests that came after their abort
        # were answered in the next step.
        for request in requests if batch > self._aborted else ():
            task = asyncio.create_task(self._generate(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate(self, request: Request) -> None:
        try:
            self._must_be_admitted()
            with self._heart.phase("generate", alone=True):
                routed = request.routed if self._routed_layers else None
                answer = await self._control.sample(request.prompt_ids, request.sampling, routed, request.top)
            self._finished.put_nowait(_completion(request, answer, self._routed_layers))
        except Exception as error:  # handed to the caller by poll
            self._finished.put_nowait(error)

    async def poll(self, batch: int, timeout: float) -> list[Completion]:
        """What finished since the last call; waits up to `timeout` seconds for the first one."""
        if batch <= self._aborted:
            return []
        try:
            done = [await self._while_alive("generate", self._finished.get(), timeout)]
        except asyncio.TimeoutError:
            return []
        # Requests of one decoding step end together: let the others arrive before answering.
        await asyncio.sleep(0.002)
        while not self._finished.empty():
            done.append(self._finished.get_nowait())
        for item in done:
            if isinstance(item, Exception):
                raise item
        return done

    @_phase
    async def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-prob of every token but the first under the engine's weights, at temperature 1; float32 [n - 1] each."""
        self._must_be_admitted()
        scored = await self._while_alive("score", self._control.score(sequences))
        for ids, entries in zip(sequences, scored, strict=True):
            # SGLang calls the last word of the vocabulary 0 here (it takes it for a placeholder of an image).
            if len(entries) != len(ids) or any(
                token not in (given, 0) for (_, token, _), given in zip(entries, ids, strict=True)
            ):
                raise RuntimeError("the engine scored other tokens than it was given")
        return [np.array([logprob for logprob, _, _ in entries[1:]], dtype=np.float32) for entries in scored]

    @_phase
    async def begin_update(self, pause: PauseMode) -> None:
        """Stop serving, as `pause` says, and open an update session."""
        self._memory.must_have(Part.weights)
        self._admitted, self._updating = False, True
        if self._tasks:
            if pause != PauseMode.abort and not self._control.knows_spans:
                raise UserError(
                    f"{self._process.name} has requests in flight, and this release of SGLang does not say which of their tokens "
                    "are of the old weights: set weight_sync.pause=abort, or install SGLang 0.5.20 or later"
                )
            await self._while_alive("pause_generation", self._control.pause(pause))
            self._paused = True
        await self._accepted("begin_weight_update", self._control.begin_weight_update())

    @_phase
    async def sync_order(self, order: Order) -> list[Answer]:
        """Have every tensor-parallel rank carry out an order within the session; their answers. Raises UserError if one failed."""
        asking = self._control.call_loader(by_value(order), self._tp_size, DOOR)
        await self._accepted("update_weights_from_tensor", asking)
        store = order.setup.connect()
        answers = [pickle.loads(store.get(answer_key(order, rank))) for rank in range(self._tp_size)]
        for rank, answer in enumerate(answers):
            store.delete_key(answer_key(order, rank))
            if answer.error:
                raise UserError(
                    f"rank {rank} of {self._process.name} failed in the weight sync:\n{answer.error}"
                )
        return answers

    @_phase
    async def load_bucket(self, bucket: Bucket) -> list[str]:
        """Load tensors by their HF names, which are returned. For an engine on one node: it opens files of this one."""
        loading = self._control.load_tensors(bucket.tensors(), self._tp_size)
        await self._accepted("update_weights_from_tensor", loading)
        return [item.name for item in bucket.contents]

    @_phase
    async def end_update(self, version: int, keep_cache: bool) -> None:
        """Close the session, drop cached prefixes of the old weights, tag what comes now, and go on serving.

        keep_cache: requests that were paused in place go on with keys and values of the old weights.
        """
        await self._accepted("end_weight_update", self._control.end_weight_update())
        if not (keep_cache and self._paused):
            await self._accepted("flush_cache", self._control.flush_cache())
        await self._while_alive("update_weight_version", self._control.tag(version))
        if self._paused:
            await self._while_alive("continue_generation", self._control.resume())
            self._paused = False
        self._updating = False
        self.admit()

    async def reset(self, batch: int) -> bool:
        """As `abort`; whether the engine can go on. It cannot in the middle of an update: some weights are new, some old."""
        if self._updating or self._dead():
            return False
        self._admitted = False
        await self.abort(batch)
        return True

    async def abort(self, batch: int) -> None:
        """End all requests of the batches up to this one, whose answers nobody gets. No other may have begun."""
        self._aborted = batch
        self._control.abort()
        if self._tasks:
            await self._while_alive("abort", asyncio.wait(self._tasks))
        # A poll of the caller, who waits no more, may still be at the old one.
        self._finished = asyncio.Queue()

    @_phase
    async def release_memory(self) -> None:
        """Give back the memory of weights and KV cache. Raises RuntimeError while requests run. What is served next, is synced first."""
        if self._tasks:
            raise RuntimeError(f"{self._process.name} still generates, and may not give back its memory")
        self._admitted = False
        await self._memory.release()

    @_phase
    async def resume_memory(self, part: Part) -> None:
        await self._memory.resume(part)

    async def occupied(self) -> int:
        """Bytes, see `engine_bytes`."""
        return engine_bytes(self._children)

    async def _accepted(self, call: str, awaitable: Awaitable[Accepted]) -> None:
        """Waits for SGLang's answer. Raises UserError if it refuses the call."""
        success, message = await self._while_alive(call, awaitable)
        if not success:
            raise UserError(f"the engine refused {call}: {message}")

    async def shutdown(self) -> None:
        self._control.shutdown()


def _routing(request: Request, answer: dict, has_experts: tuple[bool, ...]) -> np.ndarray:
    """As Completion has it; SGLang has a row for every layer, with experts or not."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    tokens = len(request.prompt_ids) + len(answer["output_ids"]) - 1 - request.routed
    return flat.reshape(tokens, len(has_experts), -1)[:, np.array(has_experts)].astype(np.int16)


def _completion(request: Request, answer: dict, routed_layers: tuple[bool, ...] | None) -> Completion:
    key, meta = request.key, answer["meta_info"]
    logprobs = meta["output_token_logprobs"]
    ids = np.array([token for _, token, _ in logprobs], dtype=np.int32)
    if not np.array_equal(ids, answer["output_ids"]):
        raise RuntimeError(f"engine answer {key}: log-probs are of other tokens than the output")
    return Completion(
        key=key,
        response_ids=ids,
        logprobs=np.array([logprob for logprob, _, _ in logprobs], dtype=np.float32),
        finish_reason=meta["finish_reason"]["type"],
        weight_spans=weight_spans(meta, len(ids)),
        routing=_routing(request, answer, routed_layers) if routed_layers else None,
        **(_top_tokens(meta["output_top_logprobs"]) if request.top else {}),
    )


def _top_tokens(places: list[list[tuple[float, int, str | None]]]) -> dict[str, np.ndarray]:
    """As Completion has them. places: the likeliest tokens at each, the likeliest first."""
    return {
        "top_ids": np.array([[token for _, token, _ in place] for place in places], dtype=np.int32),
        "top_logprobs": np.array(
            [[logprob for logprob, _, _ in place] for place in places], dtype=np.float32
        ),
    }
