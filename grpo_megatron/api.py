"""The parts of training as functions, for people who write their own loop.

    config = load("my_run.yaml", ["run.name=mine"])
    with open_session(config) as session:
        groups = session.sample(["1+1="], n=8)
        session.forward_backward([Datum.of(sample, advantage=1.0) for sample in groups[0]])
        session.optim_step()
        session.publish()

A session has the trainer ranks and the engines of a run, with the same configuration. Its methods call the
objects that the training loop of `grpo-megatron train` calls. docs/own-loop.md has an example.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.named_loss import AnyLoss, named_loss
from grpo_megatron.batch.datum import Datum, at_tokens, datum_batch
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.commands.assemble import Run, RunContext, assemble, open_run
from grpo_megatron.commands.train import handover, num_probes
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.results import AdamOptions, StepOutcome
from grpo_megatron.metrics import to_floats
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.check import check_start, load_config
from grpo_megatron.rollout.episodes import Unscored
from grpo_megatron.rollout.groups import GroupSampler
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.run.checkpoints import discard
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import open_checkpoint
from grpo_megatron.trainer.mini_batch import enough, partition

__all__ = ["AdamOptions", "Datum", "ForwardBackward", "Session", "StepOutcome", "load", "open_session"]

# A prompt: text, chat messages, or token ids.
AnyPrompt = str | Sequence[dict[str, Any]] | Sequence[int]
# Number of tokens of each sequence whose log-probs are compared after a weight sync.
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class ForwardBackward:
    """Result of Session.forward_backward."""

    logprobs: list[np.ndarray]
    """float32 [n] for each Datum of n tokens: log-prob of each token under the current weights. Tokens with
    weight 0 have 0."""
    metrics: dict[str, float]
    """Metrics of the loss, such as `actor/loss`, which is the weighted sum over all tokens."""


def load(path: str | None, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of a session from a file and arguments, and check it.

    The same file can be used for `grpo-megatron train`. Data, rewards and the number of prompts in a step
    have no effect on a session.

    path: YAML file. None: no file.
    overrides: arguments of the form key=value, which override the file.

    Raises UserError with all errors of the configuration.
    """
    return load_config(path, list(overrides), Command.serve)


@contextmanager
def open_session(config: Config, guard: Guard | None = None) -> Iterator["Session"]:
    """Start trainer ranks and engines, copy the weights to the engines, and yield the Session.

    If the run's folder has checkpoints that `save` wrote, the session continues from the newest one, as
    run.resume says. At the end of the `with` block, all processes are ended.

    config: configuration that `load` returned.
    guard: receives requests to stop; None: signals end the process at once.

    Raises UserError if model, packages or machines do not suit the configuration.
    """
    check_start(config, Command.serve)
    tokenizer = PromptTokenizer(config.model.path, config.data)
    with (
        open_run(config, Command.serve, guard) as context,
        context.hang_detector,
        assemble(context, context.checkpoint) as run,
    ):
        session = Session(context, run, tokenizer)
        try:
            yield session
        finally:
            session.close()


class Session:
    """Trainer ranks and engines of a run that a user's own loop controls.

    The methods must be called one after the other. Weights of the trainer reach the engines only by
    `publish`.

    config: the configuration
    tokenizer: the model's tokenizer and chat template
    directory: the run's folder
    longest: maximum number of tokens of a prompt and its response
    step: number of optimizer steps that have changed the weights
    """

    def __init__(self, context: RunContext, run: Run, tokenizer: PromptTokenizer):
        """Copy the trainer's weights to the engines. Use `open_session` in place of this constructor."""
        self.config, self.tokenizer, self.directory = run.config, tokenizer, run.directory
        self.step = run.resumed
        # The checkpoint that has the present weights, if there is one.
        self._saved = Path(context.checkpoint.folder).absolute() if context.checkpoint else None
        arch = read_architecture(run.config.model.path)
        self._run, self._vocab_size, self.longest = run, arch.vocab_size, arch.longest_within_windows
        self._handover = handover(run, self._probes())
        if run.state:
            self._handover.weight_sync.load_state_dict(run.state["weight_sync"])
        engines = context.engines
        connections = dict(enumerate(engines.connections()))
        self._sampler = GroupSampler(connections, Unscored(tokenizer), frozenset(tokenizer.turn_ends))
        self._samplers = [self._sampler] * len(connections)
        self._manager = RolloutManager(engines, self._samplers)
        engines.joined = self._joined
        self._has_new_weights = True
        self.publish()

    def _probes(self) -> list[np.ndarray]:
        """Return token sequences whose log-probs are compared after a weight sync: random token ids."""
        rng = np.random.default_rng(self.config.run.seed)
        shape = (num_probes(self._run), _PROBE_TOKENS)
        return list(rng.integers(self._vocab_size, size=shape, dtype=np.int32))

    def _joined(self, engine: int) -> None:
        """Send later requests for an engine over its new connection."""
        connections = self._run.engines.connections()
        self._samplers += [self._sampler] * (len(connections) - len(self._samplers))
        self._sampler.connect(engine, connections[engine])

    def sample(
        self,
        prompts: Sequence[AnyPrompt],
        n: int | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        **settings: Any,
    ) -> list[list[Sample]]:
        """Sample n responses to each prompt from the weights that were published last.

        The responses have tokens, log-probs, texts and weight versions, but no rewards.

        prompts: each is text, a list of chat messages, or a list of token ids.
        n: number of responses to each prompt. None: rollout.n.
        max_tokens: maximum number of tokens of a response. None: rollout.max_response_length.
        temperature: None: rollout.temperature. Train only on samples with rollout.temperature, because the
            trainer computes its log-probs with this one.
        settings: further keys of section `rollout`, such as top_p and stop.

        Raises UserError for a prompt that cannot be used, and the errors of RolloutManager.generate.
        """
        settings |= {"n": n, "max_response_length": max_tokens, "temperature": temperature}
        given = {key: value for key, value in settings.items() if value is not None}
        rollout = replace(self.config.rollout, **given)
        room = self.longest - rollout.max_response_length
        asked = [self._prompt(index, prompt, room) for index, prompt in enumerate(prompts)]
        if self._run.sharing or self.config.megatron.sleep:
            self._must_have_no_gradients("sample")
        if self._run.sharing and self._has_new_weights:
            raise UserError(
                "sample: engines that share devices with the trainer do not keep the weights that were "
                "published last; call publish before"
            )
        self._handover.to_engines()
        with self._run.monitor.phases("generate"):
            return [list(group.samples) for group in self._manager.generate(asked, rollout)]

    def _prompt(self, index: int, prompt: AnyPrompt, room: int) -> Prompt:
        where, given = f"prompt {index}", prompt
        if not isinstance(prompt, str):  # token ids may be numbers of NumPy
            given = [item.item() if isinstance(item, np.integer) else item for item in prompt]
        text, ids = self.tokenizer.prompt(given, where)
        self._must_be_tokens(ids, where)
        if len(ids) > room:
            limit = f"{self.longest} positions, which leave {room} beside the response"
            raise UserError(f"{where} has {len(ids)} tokens, but the model has {limit}; lower max_tokens")
        return Prompt(uid=index, ids=ids, text=text, answer="")

    def log_probs(self, sequences: Sequence[Sequence[int]], reference: bool = False) -> list[np.ndarray]:
        """Return the log-prob of every token of each sequence, under the trainer's weights.

        The result has an array float32 [n] for each sequence of n tokens. Entry i is of token i. The first
        one is 0, because nothing predicts the first token. The temperature is rollout.temperature.

        sequences: token ids of each sequence, n > 1.
        reference: if True, compute the log-probs of the reference model (ref.path, or the weights at the
            start). It exists only if the algorithm has a KL term.

        Raises UserError for tokens that the model does not have, and if there is no reference model.
        """
        if not sequences:
            return []
        if reference and not self.config.algorithm.needs_reference:
            raise UserError(
                "the session has no reference model; set algorithm.use_kl_loss=true, or another key that "
                "needs one"
            )
        given = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        for index, ids in enumerate(given):
            self._must_be_tokens(ids, f"sequence {index}", least=2)
        self._handover.to_ranks()
        asked = enough(given, self.config)
        with self._run.monitor.phases("logprobs"):
            found = self._run.trainer.probe(
                self._plan([len(ids) for ids in asked]),
                lambda part: TokenStream.of([asked[i] for i in part]),
                self.config.rollout.temperature,
                reference=reference,
            )
        return [at_tokens(values[:, 0]) for values in found[: len(given)]]

    def forward_backward(self, data: Sequence[Datum], loss: AnyLoss = "policy") -> ForwardBackward:
        """Add the gradient of a loss to those of earlier calls since the last `optim_step`.

        The gradient is that of the sum of weight times loss over all tokens of all sequences. Normalisation,
        such as a mean over tokens, is up to the weights.

        data: the sequences, with weights, advantages and log-probs.
        loss: `policy`, the policy loss that section `algorithm` describes; `cross_entropy`, the negative
            log-likelihood; the name of a surrogate (`clip`, `cispo`, `reinforce`, `importance_sampling` or a
            plugin), which is then used with the clip limits of section `algorithm` and without KL and entropy
            terms; or a function
            (logp, entropy, inputs) -> loss, with float32 [t] tensors and LossInputs, which is sent to the
            ranks.

        Raises UserError for data that the loss cannot use, and for tokens that the model does not have.
        """
        if not data:
            raise UserError("forward_backward needs at least one Datum")
        known = {one.logprobs is not None for one in data}
        if len(known) > 1:
            raise UserError(
                "a call needs logprobs for all of its data, or for none; split the data into two calls"
            )
        for index, one in enumerate(data):
            self._must_be_tokens(one.tokens, f"data[{index}].tokens", least=2)
        used = named_loss(loss, self.config.algorithm)
        has_kl = isinstance(used, PolicyLoss) and used.algorithm.use_kl_loss
        if has_kl and any(one.reference is None for one in data):
            raise UserError(
                "the loss has a KL term (algorithm.use_kl_loss), which needs Datum.reference; "
                "log_probs(.., reference=True) computes it"
            )
        self._handover.to_ranks()
        # Every replica needs a sequence. Repeated ones have no weight.
        more = enough(data, self.config)[len(data) :]
        every = [*data, *(one.without_weight() for one in more)]
        with self._run.monitor.phases("train"):
            logprobs, metrics = self._run.trainer.gradients.add(
                self._plan([len(one.tokens) for one in every]),
                lambda part: datum_batch([every[i] for i in part]),
                used,
                current_is_old=known == {False},
            )
        return ForwardBackward([at_tokens(one) for one in logprobs[: len(data)]], to_floats(metrics))

    def optim_step(self, adam: AdamOptions | None = None) -> StepOutcome:
        """Take one optimizer step on the sum of the gradients of all calls of `forward_backward` before.

        The outcome has gradient norm and learning rate. The step is dropped, so that no weight changes, if
        the gradient norm is not finite or too large, or if no token had a weight.

        adam: learning rate and other options of this step. None: those of section `optimizer`.

        Raises UserError if there are no gradients, if a weight is not finite, or if too many steps in a row
        were dropped.
        """
        with self._run.monitor.phases("train"):
            outcome = self._run.trainer.gradients.step(adam or AdamOptions(), self.step + 1)
        if not outcome.dropped:
            self.step, self._saved = self.step + 1, None
            self._has_new_weights = True
        return outcome

    def discard_gradients(self) -> None:
        """Discard the gradients of all calls of `forward_backward` since the last `optim_step`."""
        self._run.trainer.gradients.discard()

    def publish(self) -> int:
        """Copy the trainer's weights to the engines, and return their version.

        Samples have the version of the weights that wrote them (Sample.weight_spans). The version goes up
        only if the weights have changed.
        """
        if self._run.sharing:
            self._must_have_no_gradients("publish")
        self._handover.publish(self._has_new_weights)
        self._has_new_weights = False
        return self.version

    @property
    def version(self) -> int:
        """Version of the weights that the engines have."""
        return self._handover.weight_sync.version

    def log(self, scalars: dict[str, float]) -> None:
        """Write scalars to metrics.jsonl, TensorBoard and status.json, under the number of optimizer steps.

        The seconds that the verbs took since the last call are added as time/generate, time/train and so on.
        """
        self._run.monitor.logged(self.step, scalars)

    def save(self, replace: bool = False) -> str:
        """Save weights, optimizer and learning-rate state, and return the folder of the checkpoint.

        The folder is in the run's folder, and its name has the number of optimizer steps. A later session
        with the same run.name continues from the checkpoint with the most steps. Only the checkpoints of the
        most steps are kept (checkpoint.keep), and the newest one.

        replace: what happens if the folder has other weights, which were saved before `load` has gone back to
            an earlier step. True: they are replaced. False: UserError is raised.

        Also raises UserError if there are gradients without an optimizer step, or if the disk is full.
        """
        self._must_have_no_gradients("save")
        self._handover.to_ranks()
        saver = self._run.saver
        folder = saver.folder / f"step_{self.step:08d}"
        if folder.exists() and self._saved != folder:
            if not replace:
                raise UserError(
                    f"save: {folder} has other weights, from before `load`; use save(replace=True), or move "
                    "the folder"
                )
            discard(folder)
        weight_sync = self._handover.weight_sync.state_dict()
        saver.save(self.step, lambda: {"step": self.step, "weight_sync": weight_sync})
        saver.finish()
        self._saved = folder
        return str(folder)

    def load(self, folder: str, moments: bool = True) -> None:
        """Load weights, optimizer and learning-rate state from a checkpoint, and publish the weights.

        folder: folder that `save` returned, of this session or another one with the same model.
        moments: if False, Adam begins anew: its moments are 0.

        Raises UserError if the checkpoint is damaged or of another model.
        """
        self._must_have_no_gradients("load")
        checkpoint = open_checkpoint(folder, Command.serve)
        self._handover.to_ranks()
        self._run.trainer.checkpoints.load_checkpoint(checkpoint.actor, checkpoint.files, moments)
        self.step, self._saved = checkpoint.step, Path(folder).absolute() if moments else None
        # The engines' version goes up, because it names weights that no sample has come from.
        self._has_new_weights = True
        self.publish()

    def save_hf(self, folder: str) -> None:
        """Write the trainer's weights to `folder` as a Hugging Face checkpoint, which replaces an older one.

        Raises UserError if the folder is that of the model, or if it cannot be written.
        """
        self._handover.to_ranks()
        self._run.trainer.weights.save_hf(folder)

    def close(self) -> None:
        """End the weight sync. `open_session` then ends all processes."""
        self._sampler.close()
        self._handover.weight_sync.close()

    def _plan(self, lengths: Sequence[int]) -> Schedule:
        return partition(self.config, np.array(lengths), self._run.trainer.cost_model)

    def _must_be_tokens(self, ids: np.ndarray, where: str, least: int = 1) -> None:
        """Raise UserError if there are too few tokens, or tokens that the model does not have."""
        if len(ids) < least:
            raise UserError(f"{where} has {len(ids)} tokens; at least {least} are needed")
        if np.min(ids) < 0 or np.max(ids) >= self._vocab_size:
            raise UserError(
                f"{where} has a token id outside of 0..{self._vocab_size - 1}; use the model's tokenizer"
            )

    def _must_have_no_gradients(self, action: str) -> None:
        if self._run.trainer.gradients.calls:
            raise UserError(
                f"{action}: there are gradients without an optimizer step, which would be lost; call "
                "optim_step before"
            )
