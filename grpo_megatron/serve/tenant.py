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
from grpo_megatron.serve.answers import Answer, Failed
from grpo_megatron.serve.data import TrainingData
from grpo_megatron.serve.protobuf import LENGTH, STOP, SampleResponse
from grpo_megatron.serve.requests import AdamParams, SampleRequest

# Subfolder of the run's folder for the checkpoints that clients save, and for the state at the start.
FOLDER, INITIAL = "tinker", "initial"
# Time in which further requests to sample join the first one, so that the engines sample them together.
_GATHER_SECONDS = 0.03
_REASONS = {"stop": STOP, "length": LENGTH}
_NAME = re.compile(r"\w[\w.:-]*")
_LATEST = None


@dataclass(frozen=True)
class Job:
    """A request whose turn has come.

    answer: receives the result
    run: executes the request, and returns the result. Unused if `sample` is set
    sample: the request, if it is one to sample. Several of these are executed together
    """

    answer: Answer
    run: Callable[[], bytes | dict[str, Any]] | None = None
    sample: SampleRequest | None = None


class Tenant:
    """Executes requests on a Session, in the thread that calls `work`. Other threads call `submit`.

    samplers: {sampling session: version of its weights}. None in place of a version: always the newest
    published: {tinker path of weights for sampling: their version}
    base_version: version of the weights that are those of the base model
    longest: maximum number of tokens of a prompt and its response
    """

    def __init__(self, session: Session, longest: int):
        """Save the state at the start, or load it, if an earlier start of the run has saved it.

        longest: maximum number of tokens of a prompt and its response.
        """
        self._session, self.longest = session, longest
        self._root = Path(session.directory, FOLDER)
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._next: Job | None = None
        self.samplers: dict[str, int | None] = {}
        self.published: dict[str, int] = {}
        # Steps since the last saved or loaded state, steps since the last publication, and a failed request
        # to forward_backward since the last optimizer step.
        self._unsaved = self._unpublished = self._incomplete = False
        initial = self._root / INITIAL
        if initial.exists():
            self._load(initial)
        else:
            self._save(initial)
        self.base_version = session.version

    @property
    def version(self) -> int:
        """Version of the weights that the engines have."""
        return self._session.version

    def submit(self, job: Job) -> None:
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
        while (another := self._get(_GATHER_SECONDS)) and _go_together(job, another):
            jobs.append(another)
        self._next = another
        self._sample([one for one in jobs if self._is_current(one)])

    def _get(self, seconds: float) -> Job | None:
        try:
            return self._jobs.get(timeout=seconds)
        except Empty:
            return None

    def _execute(self, jobs: list[Job], run: Callable[[], list[bytes | dict[str, Any]]]) -> bool:
        """Execute jobs and set their answers. Return False, and set no answer, if several jobs fail together
        because one of them is wrong.
        """
        try:
            results = run()
        except Exception as error:
            by_user = isinstance(error, UserError) and not isinstance(error, ProcessLost)
            if by_user and len(jobs) > 1:
                return False
            for job in jobs:
                job.answer.finish(Failed(str(error) if by_user else described(error), by_user))
            if not by_user:
                raise
        else:
            for job, result in zip(jobs, results, strict=True):
                job.answer.finish(result)
        return True

    # --- states

    def _folder(self, path: str) -> Path:
        """Return the folder of a tinker path. Raises UserError if the path has another form."""
        scheme, _, rest = path.partition("tinker://")
        parts = rest.split("/")
        if scheme or len(parts) != 3 or parts[1] != "weights" or not all(map(_NAME.fullmatch, parts)):
            raise UserError(
                f"{path} is not the path of a saved state, which has the form tinker://MODEL/weights/NAME"
            )
        return self._root.joinpath(*parts)

    def _save(self, folder: Path) -> None:
        """Save the state as a folder, which replaces an older one of this name."""
        written = self._session.save()
        if folder.exists():
            discard(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Moved away, it is not deleted for newer checkpoints, and no later one has its name.
        os.rename(written, folder)
        self._saved, self._unsaved = folder, False

    def _load(self, folder: Path) -> None:
        self._session.discard_gradients()
        self._session.load(str(folder))
        self._saved = folder
        self._unsaved = self._unpublished = self._incomplete = False

    def create(self, model_id: str) -> dict[str, Any]:
        """Begin with the weights of the base model and a new optimizer."""
        if self._unsaved or self._saved != self._root / INITIAL:
            self._load(self._root / INITIAL)
            self.base_version = self.version
        return {"type": "create_model", "model_id": model_id}

    def load(self, model_id: str, path: str, optimizer: bool) -> dict[str, Any]:
        """Load a saved state.

        optimizer: False asks for a new optimizer, which is not supported.
        """
        if not optimizer:
            raise UserError(
                "weights are loaded together with the state of the optimizer; call "
                "create_training_client_from_state_with_optimizer"
            )
        folder = self._folder(path)
        if not folder.exists():
            raise UserError(f"there is no saved state {path}")
        self._load(folder)
        return {"type": "load_weights", "path": path, "model_id": model_id}

    def save(self, model_id: str, name: str, overwrite: bool) -> dict[str, Any]:
        path = f"tinker://{model_id}/weights/{name}"
        folder = self._folder(path)
        if folder.exists() and not overwrite:
            raise UserError(f"{path} exists already; choose another name, or set overwrite")
        self._save(folder)
        return {"type": "save_weights", "path": path}

    def delete(self, path: str) -> None:
        """Delete a saved state. Raises UserError if there is none, or if a lost client would leave it."""
        folder = self._folder(path)
        if not folder.exists():
            raise UserError(f"there is no saved state {path}")
        if folder == self._saved:
            raise UserError(f"{path} is the newest saved state, which is needed if the client is lost")
        discard(folder)

    def restore(self) -> dict[str, Any]:
        """Return to the state that was saved or loaded last, after the loss of the client."""
        if self._unsaved:
            self._load(self._saved)
        self._session.discard_gradients()
        self._incomplete = False
        return {}

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

    def optim_step(self, params: AdamParams | None) -> dict[str, Any]:
        if self._incomplete:
            self._session.discard_gradients()
            self._incomplete = False
            raise UserError(
                "no step was taken, and all gradients were discarded, because a request to forward_backward "
                "since the last step has failed"
            )
        if params is None:
            raise UserError("the optimizer is AdamW: call optim_step with AdamParams")
        outcome = self._session.optim_step(
            AdamOptions(
                params.learning_rate,
                params.beta1,
                params.beta2,
                params.eps,
                params.weight_decay,
                params.grad_clip_norm,
            )
        )
        self._unsaved |= not outcome.dropped
        self._unpublished |= not outcome.dropped
        metrics = {"grad_norm": outcome.grad_norm, "dropped": float(outcome.dropped)}
        return {"metrics": metrics | {"step": float(self._session.step)}}

    # --- sampling

    def publish(self, model_id: str, name: str | None, sampler: str, follows: bool) -> dict[str, Any]:
        """Copy the weights to the engines, and open a sampling session or name the weights.

        name: name for the weights. None: open a sampling session.
        sampler: id of the sampling session.
        follows: if True, the sampling session uses the newest weights even after later publications.
        """
        version = self._session.publish()
        self._unpublished = False
        if name is None:
            self.samplers[sampler] = _LATEST if follows else version
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
        path = f"tinker://{model_id}/sampler_weights/{name}"
        self.published[path] = version
        return {"type": "save_weights_for_sampler", "path": path}

    def _is_current(self, job: Job) -> bool:
        """Return True if the engines have the weights that a job needs. Otherwise, the job fails."""
        wanted = self.samplers[job.sample.sampling_session_id]
        if wanted in (_LATEST, self.version):
            return True
        job.answer.finish(
            Failed(
                f"this sampling client is of the weights of version {wanted}, but newer ones (version "
                f"{self.version}) have been published; the server keeps one version: create the sampling "
                "client anew"
            )
        )
        return False

    def _sample(self, jobs: list[Job]) -> None:
        if jobs and not self._execute(jobs, lambda: self._sampled([job.sample for job in jobs])):
            for job in jobs:
                self._execute([job], lambda job=job: self._sampled([job.sample]))

    def _sampled(self, requests: list[SampleRequest]) -> list[bytes]:
        """Sample responses for requests that differ in their prompts only. Return SampleResponse messages."""
        first, prompts = requests[0], [request.ids for request in requests]
        settings = first.sampling_params.settings()
        length = settings["max_tokens"] or self._session.config.rollout.max_response_length
        for ids in prompts:
            if len(ids) + length > self.longest:
                raise UserError(
                    f"the prompt has {len(ids)} tokens and the response up to {length}, but the model has "
                    f"room for {self.longest}; set a smaller max_tokens"
                )
        groups = self._session.sample(prompts, first.num_samples, **settings)
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


def _go_together(one: Job, other: Job) -> bool:
    """Return True if the engines can sample for two requests in one call."""
    first, second = one.sample, other.sample
    return second is not None and (
        (first.sampling_params, first.num_samples, first.prompt_logprobs)
        == (second.sampling_params, second.num_samples, second.prompt_logprobs)
    )


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
