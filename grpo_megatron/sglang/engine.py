"""SGLangEngine runs one SGLang engine as a Ray actor: token ids in, token ids and log-probs out.

`submit` takes requests and `poll` returns the finished ones, so that one Ray call carries many samples. A
round (cluster.rounds) is a batch of requests of one caller, such as the training loop. `end` ends a round.
All calls to SGLang go through release.py, which hides the differences between SGLang's releases.
"""

import asyncio
import itertools
import os
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import ray

from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.cluster.processes import Process, redirect_output
from grpo_megatron.cluster.rounds import RoundId, RoundTasks, TaskReport
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import MoE
from grpo_megatron.sglang.memory import EngineMemory, MemoryPart, engine_bytes
from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.release import Accepted, EngineControl
from grpo_megatron.sglang.request import Completion, NewTokens, Request, completion_of
from grpo_megatron.sglang.start import meeting_file, start_engine
from grpo_megatron.sglang.weight_receiver import RECEIVE_WEIGHTS, as_named_tensors, report_key
from grpo_megatron.weights.sync.messages import SyncCommand, SyncReport

# Seconds between two answers of `poll` with new tokens. If the actor dies, the tokens of this time are lost.
_LOG_SECONDS = 0.005


class StartReport(NamedTuple):
    """Report of an engine that has loaded the model.

    pid: id of the engine's process.
    end_ids: ids of the tokens that end a response.
    """

    pid: int
    end_ids: frozenset[int]


class _SchedulerProgress:
    """Tells the engine's heartbeat whether SGLang's scheduler makes progress (a heartbeat.ProgressSource).

    The engine's Ray actor has an event loop that keeps running even if the scheduler hangs, so the state of
    the actor's own threads would not show a hang.
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
    """Decorate a method of an engine so that heartbeats name the method as the phase while it runs.

    If the engine hangs, the hang detector's message names this phase.
    """

    @wraps(method)
    async def within(engine, *arguments):
        with engine._heartbeat.phase(method.__name__):
            return await method(engine, *arguments)

    return within


@ray.remote
class SGLangEngine:
    """The Ray actor of one engine. SGLang's scheduler and detokenizer are its child processes."""

    def __init__(
        self,
        process: Process,
        arguments: dict[str, Any],
        experts: MoE | None,
        others: dict[Process, ray.actor.ActorHandle],
        log_every: int = 0,
        lora: LoraConfig | None = None,
    ):
        """Start the engine.

        process: name and log of this process.
        arguments: {name: value} of the arguments of sglang.Engine.
        experts: the model's experts (MoE). None: completions do not report which experts each token used.
        others: {process: its EngineNode actor} for the engine's nodes after the first.
        log_every: `poll` reports the new tokens of an unfinished response every `log_every` tokens; 0: never.
        lora: settings of the adapter that the engine serves. None: it serves merged weights.
        """
        redirect_output(process.log)
        self._process, self._experts = process, experts
        if "dist_init_addr" not in arguments:
            # By default SGLang's ranks rendezvous through a port that is open on all network interfaces.
            self._meeting, path = meeting_file()
            os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{path}"
        self._control = EngineControl(start_engine(arguments))
        self._children = Children()
        self._control.load()  # opens the file of the reports, whose name is removed now
        self._children.unlink_shared_files()
        self._ends = {other: node.end.remote().future() for other, node in others.items()}
        self._memory = EngineMemory(process.name, self._control, self._while_alive)
        self._tp_size, self._lora = arguments["tp_size"], lora
        self._admitted, self._updating, self._paused = False, False, False
        self._updated, self._version, self._log_every = asyncio.Condition(), 0, log_every
        self._rounds, self._request_numbers = RoundTasks(), itertools.count()
        self._heartbeat = Heartbeat(_SchedulerProgress(self._control, self._children))
        self._heartbeat.start()

    async def ready(self) -> StartReport:
        """Return the engine's process id and end tokens. The call returns only after the model is loaded."""
        await self._accepted("prepare", self._control.prepare(self._lora, self._tp_size))
        self._lora = None  # the adapter exists, if `ready` is called again
        return StartReport(os.getpid(), self._control.end_ids)

    async def beat(self) -> None:
        """Send a heartbeat to the driver's hang detector now, ahead of the regular interval."""
        self._heartbeat.beat()

    def _dead_process(self) -> Process | None:
        """Return a process of this engine whose SGLang child processes have died, or None if all are alive.

        An engine has one process with SGLang child processes on each of its nodes. This object runs in the
        one on the first node.
        """
        if not self._children.alive:
            return self._process
        return next((process for process, end in self._ends.items() if end.done()), None)

    async def _while_alive(self, call: str, awaitable: Awaitable) -> Any:
        """Wait for a call to SGLang and return its result. Raises ProcessDied if SGLang dies on any node.

        Without this check, a call to SGLang would wait forever after SGLang's scheduler process has been
        killed.

        call: name of the call, for error messages.
        awaitable: the call.
        """
        task = asyncio.ensure_future(awaitable)
        while not task.done():
            await asyncio.wait({task}, timeout=1.0)
            if not task.done() and (dead := self._dead_process()):
                task.cancel()
                raise dead.died(call)
        return task.result()

    def admit(self) -> None:
        """Let the engine answer requests until the next weight update, release of memory or `reset`.

        A new engine refuses requests. `end_update` also admits the engine.
        """
        self._admitted = True

    def _must_be_admitted(self) -> None:
        # A new process, such as the replacement of a dead engine, has not been admitted yet. An engine whose
        # update failed is no longer admitted.
        if not self._admitted:
            raise RuntimeError(
                f"{self._process.name} cannot serve, because its weights have not been compared with the "
                "trainer's; sync the weights first"
            )
        self._memory.must_have(*MemoryPart)

    async def submit(self, round: RoundId, requests: list[Request]) -> None:
        """Start to answer requests of a round, and return immediately. `poll` returns completions and errors.

        A round is a batch of requests of one caller. A caller has one round at a time, so its new round ends
        its earlier one. Requests of a round that has ended are ignored.
        """
        self._rounds.start(round, partial(self._generate, round), requests)

    async def _generate(self, round: RoundId, request: Request) -> Completion:
        # A turn of an episode may begin while the weights are updated.
        async with self._updated:
            await self._updated.wait_for(lambda: not self._updating)
        self._must_be_admitted()
        routed = request.routed if self._experts else None
        version = self._version

        def report(ids: list[int], logprobs: list[float]) -> None:
            nonlocal version
            self._rounds.report(round, TaskReport(request.key, NewTokens(ids, logprobs, version)))
            version = self._version

        with self._heartbeat.phase("generate", alone=True):
            answer = await self._control.sample(
                next(self._request_numbers),
                request.prompt_ids,
                request.sampling,
                routed,
                request.top,
                request.cache,
                report if self._log_every else None,
                self._log_every,
            )
        return replace(completion_of(request, answer, self._experts), load=self._control.load())

    async def poll(self, round: RoundId, seconds: float) -> list[Completion | TaskReport] | None:
        """Return a round's new completions and reports of new tokens. Return None if the round has ended.

        Each report is a TaskReport with NewTokens of an unfinished response. The list is empty if nothing
        arrives within `seconds`. Raises the error of a request that failed, or ProcessDied if SGLang has
        died.

        seconds: maximum time to wait for the first completion or report.
        """
        # Requests that end in the same decoding step arrive together: wait for the others before answering.
        linger = _LOG_SECONDS if self._log_every else 0.002
        return await self._while_alive("generate", self._rounds.poll(round, seconds, linger))

    @_phase
    async def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Return the log-probs of given token sequences at temperature 1, to compare engine and trainer.

        The result for a sequence of n tokens is float32 [n - 1], because its first token has no log-prob.
        Raises RuntimeError if the engine has not been admitted, or has released its memory.
        """
        self._must_be_admitted()
        scored = await self._while_alive("score", self._control.score(sequences))
        for ids, entries in zip(sequences, scored, strict=True):
            # SGLang reports the last token of the vocabulary as 0 here (it takes it for an image
            # placeholder).
            if len(entries) != len(ids) or any(
                token not in (given, 0) for (_, token, _), given in zip(entries, ids, strict=True)
            ):
                raise RuntimeError(
                    f"{self._process.name} returned log-probs of tokens that it was not asked to score"
                )
        return [np.array([logprob for logprob, _, _ in entries[1:]], dtype=np.float32) for entries in scored]

    @_phase
    async def begin_update(self, keep_cache: bool) -> None:
        """Stop serving requests, and prepare SGLang for new weights. `end_update` resumes serving.

        Running requests are paused. New requests wait until the update has ended.

        keep_cache: True if paused requests continue with the keys and values that were computed with the old
            weights. False: all keys and values are computed anew.

        Raises UserError if requests run and SGLang is older than 0.5.20, or if SGLang refuses the update.
        Raises RuntimeError if the memory of the weights is released.
        """
        self._memory.must_have(MemoryPart.weights)
        self._admitted, self._updating = False, True
        if self._rounds.running:
            if not self._control.knows_spans:
                raise UserError(
                    f"{self._process.name} has requests in flight, and this SGLang release does not report "
                    "which tokens were generated with the old weights; set rollout.on_update=wait"
                )
            await self._while_alive("pause_generation", self._control.pause(keep_cache))
            self._paused = True
        await self._accepted("begin_weight_update", self._control.begin_weight_update())

    @_phase
    async def receive_weights(self, command: SyncCommand) -> list[SyncReport]:
        """Make every tensor-parallel rank carry out a weight-sync command. `begin_update` must come before.

        Return one report per rank, in rank order. Raises UserError if a rank failed, or if SGLang refuses the
        call.
        """
        calling = self._control.call_loader(as_named_tensors(command), self._tp_size, RECEIVE_WEIGHTS)
        await self._accepted("update_weights_from_tensor", calling)
        store = command.setup.connect()
        reports = [pickle.loads(store.get(report_key(command, rank))) for rank in range(self._tp_size)]
        for rank, report in enumerate(reports):
            store.delete_key(report_key(command, rank))
            if report.error:
                raise UserError(
                    f"rank {rank} of {self._process.name} failed in the weight sync:\n{report.error}"
                )
        return reports

    @_phase
    async def end_update(self, version: int, keep_cache: bool) -> None:
        """Resume serving with the new weights. The prefix cache is dropped, unless paused requests need it.

        version: version of the new weights. Samples report it from now on.
        keep_cache: the value given to `begin_update`. If it is True and requests are paused, the prefix cache
            is kept.
        """
        await self._accepted("end_weight_update", self._control.end_weight_update())
        if not (keep_cache and self._paused):
            await self._accepted("flush_cache", self._control.flush_cache())
        await self._while_alive("update_weight_version", self._control.tag(version))
        self._version = version
        if self._paused:
            await self._while_alive("continue_generation", self._control.resume())
            self._paused = False
        self.admit()
        async with self._updated:
            self._updating = False
            self._updated.notify_all()

    async def reset(self) -> bool:
        """End all rounds of requests after a failure elsewhere in the run, and return True.

        Return False, and end no round, if this engine must be replaced. This is the case if SGLang has died,
        or if a weight update has begun but not ended, because some weights may then be new and others old.

        An engine that is kept refuses requests until it is admitted again.
        """
        if self._updating or self._dead_process():
            return False
        self._admitted = False
        await self._while_alive("reset", self._rounds.end_all())
        return True

    async def end(self, round: RoundId) -> None:
        """End a round: abort its requests in SGLang, and discard its completions. Other rounds go on.

        Raises ProcessDied if SGLang has died.
        """
        if dead := self._dead_process():
            raise dead.died("end")
        await self._while_alive("end", self._rounds.end(round))

    @_phase
    async def release_memory(self) -> None:
        """Release the memory of the weights and the KV cache, so that the trainer can use it.

        Before the next request, `resume_memory` must allocate both parts again, and a weight sync must fill
        in the weights. Raises RuntimeError while requests run.
        """
        if self._rounds.running:
            raise RuntimeError(f"{self._process.name} is still generating, so its memory cannot be released")
        self._admitted = False
        await self._memory.release()

    @_phase
    async def resume_memory(self, part: MemoryPart) -> None:
        await self._memory.resume(part)

    async def occupied(self) -> int:
        """Return the bytes in use on the engine's fullest GPU, or by SGLang's processes if it has no GPU.

        Only the engine's first node is measured.
        """
        return engine_bytes(self._children)

    async def _accepted(self, call: str, awaitable: Awaitable[Accepted]) -> None:
        """Wait for a call to SGLang that SGLang can refuse. Raises UserError if SGLang refuses it.

        call: name of the call, for error messages.
        awaitable: the call.
        """
        success, message = await self._while_alive(call, awaitable)
        if not success:
            raise UserError(
                f"{self._process.name} rejected {call}: {message}; its log is {self._process.log}"
            )

    async def shutdown(self) -> None:
        self._control.shutdown()
