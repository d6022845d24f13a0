"""Tenant: executes the requests of the server's client on the Session, one after the other."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from grpo_megatron.api import AdamOptions, Session
from grpo_megatron.batch.sample import Sample
from grpo_megatron.errors import ProcessLost, UserError, described
from grpo_megatron.run.checkpoints import discard
from grpo_megatron.serve.answers import FailedRequest, RequestAnswer, Unknown
from grpo_megatron.serve.data import TrainingData
from grpo_megatron.serve.protobuf import LENGTH, STOP, SampleResponse
from grpo_megatron.serve.requests import ModelRequest, SampleRequest

# Subfolder of the run's folder for the checkpoints that clients save, and for the state at the start.
FOLDER, INITIAL = "tinker", "initial"
# Time in which further requests to sample join the first one, so that the engines sample them together.
_GATHER_SECONDS = 0.03
_REASONS = {"stop": STOP, "length": LENGTH}
_NAME = re.compile(r"\w[\w.:-]*")


@dataclass(frozen=True)
class ServerJob:
    """A request to execute. A request to sample has `sample` and `version`, any other one has `run`."""

    answer: RequestAnswer
    """Receives the result."""
    run: Callable[[], bytes | dict[str, Any] | None] | None = None
    """Executes the request, and returns the result."""
    sample: SampleRequest | None = None
    """A request to sample. Several of these are executed together."""
    version: int | None = None
    """Version of the weights to sample from. None: the newest."""

    def finish(self, result: bytes | dict[str, Any] | FailedRequest | None) -> None:
        """Answer the client's request with a result. None: an empty JSON object."""
        self.answer.future.set_result({} if result is None else result)

    def goes_with(self, other: "ServerJob") -> bool:
        """Return True if the engines can sample for this request and another one in one call."""
        one, two = self.sample, other.sample
        return two is not None and (
            (one.sampling_params, one.num_samples, one.prompt_logprobs)
            == (two.sampling_params, two.num_samples, two.prompt_logprobs)
        )


class Tenant:
    """Executes requests on a Session, in the thread that calls `work`. Other threads call `submit`.

    samplers: {sampling session: version of its weights}; None: it always samples from the newest version
    published: {tinker path of weights for sampling: their version}
    base_version: version of the weights that are those of the base model
    """

    def __init__(self, session: Session):
        """Save the state at the start, or load it, if an earlier start of the run has saved it."""
        self._session, self._root = session, Path(session.directory, FOLDER)
        self._jobs: SimpleQueue[ServerJob] = SimpleQueue()
        self._next: ServerJob | None = None
        self.samplers: dict[str, int | None] = {}
        self.published: dict[str, int] = {}
        # Since the last saved or loaded state, since the last publication, and since the last optimizer step:
        # has there been a step, and a failed request to forward_backward?
        self._unsaved = self._unpublished = self._incomplete = False
        self._initial, self.base_version = self._root / INITIAL, session.version
        if self._initial.exists():
            self._load(self._initial)
        else:
            self._save(self._initial)

    def must_have(self, sampler: str) -> int | None:
        """Return the version of a sampling session. Raises Unknown if there is no such session."""
        if sampler not in self.samplers:
            raise Unknown(f"there is no sampling session {sampler}")
        return self.samplers[sampler]

    def submit(self, job: ServerJob) -> None:
        """Add a job to the queue. Any thread may call this."""
        self._jobs.put(job)

    def work(self, seconds: float) -> None:
        """Execute the next job. Return after some seconds if there is none.

        A UserError becomes the job's answer. Any other error does too, and is then raised, because the state
        of the ranks is unknown.
        """
        job, self._next = self._next or self._get(seconds), None
        if job is None:
            return
        if job.sample is None:
            self._execute([job], lambda: [job.run()])
            return
        jobs = [job]
        while (another := self._get(_GATHER_SECONDS)) and job.goes_with(another):
            jobs.append(another)
        self._next = another
        jobs = [one for one in jobs if self._has_weights_for(one)]
        if jobs and not self._execute(jobs, lambda: self._sampled([one.sample for one in jobs])):
            for one in jobs:
                self._execute([one], lambda one=one: self._sampled([one.sample]))

    def _get(self, seconds: float) -> ServerJob | None:
        try:
            return self._jobs.get(timeout=seconds)
        except Empty:
            return None

    def _execute(self, jobs: list[ServerJob], run: Callable[[], list[Any]]) -> bool:
        """Execute jobs, and set their answers. Return False, without answers, if one of several is wrong."""
        try:
            results = run()
        except Exception as error:
            by_user = isinstance(error, UserError) and not isinstance(error, ProcessLost)
            if by_user and len(jobs) > 1:
                return False
            for job in jobs:
                job.finish(FailedRequest(str(error) if by_user else described(error), by_user))
            if not by_user:
                raise
        else:
            for job, result in zip(jobs, results, strict=True):
                job.finish(result)
        return True

    # --- states

    def _folder(self, path: str, kind: str = "weights") -> Path:
        """Return the folder of a tinker path. Raises UserError if the path has another form."""
        scheme, _, rest = path.partition("tinker://")
        parts = rest.split("/")
        if scheme or len(parts) != 3 or parts[1] != kind or not all(map(_NAME.fullmatch, parts)):
            raise UserError(f"{path} is not of the form tinker://MODEL/{kind}/NAME")
        return self._root.joinpath(*parts)

    def _save(self, folder: Path) -> None:
        """Save the state as a folder, which replaces an older one of this name."""
        written = self._session.save()
        if folder.exists():
            discard(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Moved away, it is not deleted for newer checkpoints, and no later one has its name.
        os.rename(written, folder)
        self._saved, self._moments, self._unsaved = folder, True, False

    def _load(self, folder: Path, moments: bool = True) -> None:
        self._session.discard_gradients()
        self._session.load(str(folder), moments)
        self._saved, self._moments = folder, moments
        self._unsaved = self._unpublished = self._incomplete = False
        if folder == self._initial:
            self.base_version = self._session.version

    def create(self, model_id: str) -> dict[str, Any]:
        """Begin with the weights of the base model and a new optimizer."""
        if self._unsaved or self._saved != self._initial:
            self._load(self._initial)
        return {"type": "create_model", "model_id": model_id}

    def load(self, model_id: str, path: str, optimizer: bool) -> dict[str, Any]:
        """Load a saved state.

        optimizer: if True, load Adam's moments too; if False, Adam begins anew.
        """
        folder = self._folder(path)
        if not folder.exists():
            raise UserError(f"there is no saved state {path}; load another one")
        self._load(folder, optimizer)
        return {"type": "load_weights", "path": path, "model_id": model_id}

    def save(self, asked: ModelRequest) -> dict[str, Any]:
        """Save the state under a name."""
        path = f"tinker://{asked.model_id}/weights/{asked.path}"
        folder = self._folder(path)
        if folder.exists() and not asked.overwrite:
            raise UserError(f"{path} exists already; choose another name, or set overwrite")
        self._save(folder)
        return {"type": "save_weights", "path": path}

    def save_external(self, asked: ModelRequest) -> dict[str, Any]:
        """Write the weights as a Hugging Face checkpoint."""
        if asked.age_encryption_recipients:
            raise UserError("this server does not encrypt weights; call save_weights_external without it")
        path = f"tinker://{asked.model_id}/external_weights/{asked.path}"
        self._session.save_hf(str(self._folder(path, "external_weights")))
        return {"type": "save_weights_external", "path": path}

    def delete(self, path: str) -> None:
        """Delete a saved state.

        Raises UserError if there is none, or if `restore` would need it after the loss of the client.
        """
        folder = self._folder(path)
        if not folder.exists():
            raise UserError(f"there is no saved state {path}; it may have been deleted already")
        if folder == self._saved:
            raise UserError(f"{path} is the newest state, which a lost client needs; save another before")
        discard(folder)

    def restore(self) -> None:
        """Return to the state that was saved or loaded last, after the loss of the client."""
        if self._unsaved:
            self._load(self._saved, self._moments)
        self._session.discard_gradients()
        self._incomplete = False

    # --- training

    def forward_backward(self, request: Any) -> bytes:
        """Execute a ForwardBackwardRequest."""
        try:
            data = TrainingData.of(request)
            if request.forward_only:
                logprobs = self._session.log_probs([one.tokens for one in data.data])
                return data.output(logprobs, data.loss_of(logprobs))
            result = self._session.forward_backward(data.data, data.objective)
        except UserError:
            self._incomplete |= not request.forward_only
            raise
        return data.output(result.logprobs, result.metrics["actor/loss"])

    def optim_step(self, asked: ModelRequest) -> dict[str, Any]:
        """Take an optimizer step, if all requests to forward_backward before it have succeeded."""
        if self._incomplete:
            self._session.discard_gradients()
            self._incomplete = False
            raise UserError(
                "no step was taken, and all gradients were discarded, because a request to forward_backward "
                "since the last step has failed; send the data of this step again"
            )
        adam = asked.adam()
        options = (adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay)
        outcome = self._session.optim_step(AdamOptions(*options, adam.grad_clip_norm))
        self._unsaved |= not outcome.dropped
        self._unpublished |= not outcome.dropped
        metrics = {"optim/grad_norm": outcome.grad_norm, "optim/dropped": float(outcome.dropped)}
        return {"metrics": metrics}

    # --- sampling

    def publish(self, asked: ModelRequest) -> dict[str, Any]:
        """Copy the weights to the engines, and name them or, without a name, open a sampling session."""
        version = self._session.publish()
        self._unpublished = False
        if asked.path is not None:
            path = f"tinker://{asked.model_id}/sampler_weights/{asked.path}"
            self.published[path] = version
            return {"type": "save_weights_for_sampler", "path": path}
        sampler = f"{asked.model_id.partition(':')[0]}:sample:{asked.sampling_session_seq_id}"
        self.samplers[sampler] = None if asked.kind == "inflight" else version
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

    def _has_weights_for(self, job: ServerJob) -> bool:
        """Return True if the engines have the weights that a job needs. Otherwise, the job fails."""
        newest = self._session.version
        if job.version in (None, newest):
            return True
        job.finish(
            FailedRequest(
                f"this sampling client is of the weights of version {job.version}, but the server has only "
                f"those that were published last, of version {newest}: create a sampling client of them"
            )
        )
        return False

    def _sampled(self, requests: list[SampleRequest]) -> list[bytes]:
        """Sample responses to requests that differ only in their prompts. Return one SampleResponse each."""
        first, prompts = requests[0], [request.ids for request in requests]
        groups = self._session.sample(prompts, first.num_samples, **first.sampling_params.settings())
        known = self._prompt_logprobs(prompts) if first.prompt_logprobs else [None] * len(prompts)
        return [_response(group, logprobs) for group, logprobs in zip(groups, known, strict=True)]

    def _prompt_logprobs(self, prompts: list[list[int]]) -> list[np.ndarray]:
        """Return the log-probs of the tokens of prompts, with NaN for the first token of each."""
        if self._unpublished:
            raise UserError(
                "log-probs of a prompt are computed by the trainer, whose weights are newer than those of "
                "this sampling client; publish the weights before"
            )
        scored = iter(self._session.log_probs([ids for ids in prompts if len(ids) > 1]))
        found = [next(scored) if len(ids) > 1 else np.zeros(1, np.float32) for ids in prompts]
        return [np.append(np.float32(np.nan), one[1:]).astype(np.float32) for one in found]


def _response(samples: list[Sample], prompt_logprobs: np.ndarray | None) -> bytes:
    message = SampleResponse()
    for sample in samples:
        if sample.finish_reason not in _REASONS:
            raise UserError(f"a response ended early ({sample.finish_reason}); sample again")
        arrays = sample.arrays
        message.sequences.add(
            stop_reason=_REASONS[sample.finish_reason],
            tokens=arrays.response_ids.astype(np.int32).tobytes(),
            logprobs=arrays.rollout_logprobs.astype(np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.tobytes()
    return message.SerializeToString()
