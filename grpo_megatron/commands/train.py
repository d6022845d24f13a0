"""`grpo-megatron train`: GRPO training of a policy."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import numpy as np

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.commands.assemble import Run, RunContext, assemble, open_run, run_with_restarts
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks, syncs_adapters
from grpo_megatron.config.engine import LoadFormat, Quantization
from grpo_megatron.config.schema import Config
from grpo_megatron.controller import Controller
from grpo_megatron.data import PromptSource, PromptTokenizer
from grpo_megatron.data.sources import held_out_prompts, training_prompts
from grpo_megatron.model.adapters import Content
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.check import check_start
from grpo_megatron.rollout.environments import offered_tools
from grpo_megatron.rollout.episodes import record_check
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.evaluation_beside import EvaluationBeside
from grpo_megatron.rollout.handover import Handover
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.recording.record import must_be_free
from grpo_megatron.rollout.reward_model_input import RewardModelInput
from grpo_megatron.rollout.source import EngineRollouts, ReplayedRollouts
from grpo_megatron.rollout.worker import RolloutWorkers
from grpo_megatron.run.folder import open_ledger
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import Checkpoint, finished_result
from grpo_megatron.run.stop import StopRequest
from grpo_megatron.sglang.held import HeldEngines
from grpo_megatron.trainer.scoring import ModelRewards
from grpo_megatron.trainer.weight_probe import WeightProbe
from grpo_megatron.weights.sync.plan import Layouts
from grpo_megatron.weights.sync.resharding import Resharding
from grpo_megatron.weights.sync.sync import WeightSync

# Number of prompts whose log-probs are compared after a weight sync.
_PROBES = 4


def handover(run: Run, probes: list[np.ndarray]) -> Handover:
    """Create the object that copies the trainer's weights to the engines, and passes shared devices on.

    probes: token ids of sequences whose log-probs are compared after a weight sync, int [n] with n > 1.
    """
    config, trainer, engines = run.config, run.trainer, run.engines
    probe = WeightProbe(trainer, engines, probes, config)
    weight_sync = WeightSync(
        trainer.weights, engines, _resharding(run), probe, config.weight_sync.probe_every
    )
    return Handover(weight_sync, trainer.ranks, run.monitor, run.sharing, config.megatron.sleep)


def _resharding(run: Run) -> Resharding:
    config = run.config
    layouts = Layouts(
        arch=read_architecture(config.model.path),
        sizes=run.trainer.sizes,
        engine=EngineLayout.from_config(config.rollout.engine),
        num_engines=len(run.engines.members),
        rank_nodes=run.trainer.nodes,
        engine_nodes=run.engines.nodes,
        **({"content": Content.adapter, "lora": config.megatron.lora} if syncs_adapters(config) else {}),
    )
    # The folder belongs to this run only, even if its parent has folders of other runs. A resumed run gets
    # the same folder, and removes what it left there before.
    which = hashlib.blake2b(run.directory.encode(), digest_size=4).hexdigest()
    folder = f"{config.weight_sync.folder}/{config.run.name}-{which}.weight_sync"
    engine = config.rollout.engine
    # Only the trainer quantises weights, and random ones are no base.
    loads_base = engine.quantization == Quantization.none and engine.load_format == LoadFormat.auto
    return Resharding(layouts, config.weight_sync, folder, config.cluster.call_timeout, loads_base)


def num_probes(run: Run) -> int:
    """Return the number of sequences whose log-probs are compared after a weight sync."""
    return max(_PROBES, run.trainer.sizes.dp)


def _probes(run: Run, prompts: PromptSource) -> list[np.ndarray]:
    """Return token sequences whose log-probs are compared after a weight sync: the first training prompts.

    If there are too few prompts, they are repeated. A prompt of one token is doubled, because a first token
    has no log-prob.
    """
    count = num_probes(run)
    found = [np.resize(prompt.ids, max(len(prompt.ids), 2)) for prompt in prompts.first(count)]
    return [found[index % len(found)] for index in range(count)]


class _Data:
    """Tokenizer, training prompts and held-out prompts of a training run.

    All are loaded before Ray, ranks and engines start, so that an error in the data raises UserError early.
    If recorded rollouts are replayed, there are no training prompts.
    """

    def __init__(self, config: Config):
        if config.rollout.record:
            must_be_free(config.rollout.record)
        self.tokenizer = PromptTokenizer(
            config.model.path, config.data, offered_tools(config.rollout, config.reward)
        )
        check = None if config.rollout.replay else record_check(config)
        self.held_out = held_out_prompts(config, self.tokenizer, check)
        if scores_on_ranks(config):
            RewardModelInput(config)  # the rollout workers load it too
        self._prompts = None if config.rollout.replay else training_prompts(config, self.tokenizer, check)
        self._beginning = deepcopy(self._prompts.state_dict()) if self._prompts else None

    def must_fit(self, state: dict[str, Any]) -> str:
        """Raise UserError if a checkpoint belongs to other training data than that of this run.

        state: the driver's state, read from the checkpoint's state.json.

        Returns a note for the user about data that could not be compared, or "".
        """
        # A replayed run has no prompts.
        return self._prompts.must_fit(state["prompts"]) if self._prompts and state["prompts"] else ""

    def prompts(self) -> PromptSource | None:
        """Return the training prompts, set back to the first prompt; None if recorded rollouts are replayed.

        Each attempt at the run calls this method. If the attempt has a checkpoint, Controller.load_state_dict
        then moves the prompts to the position in the checkpoint.
        """
        if self._prompts:
            self._prompts.load_state_dict(self._beginning)
        return self._prompts


def _rollouts(run: Run, data: _Data, workers: RolloutWorkers, prompts: PromptSource) -> RolloutPipeline:
    """Create the object that samples the groups of each step, syncs weights to the engines, and evaluates.

    A group is several responses of an engine to one prompt.

    data: the data of the run; its held-out prompts are used for evaluations.
    workers: processes that sample the groups and score them.
    prompts: the training prompts.
    """
    config, trainer, engines = run.config, run.trainer, run.engines
    manager = RolloutManager(engines, workers.samplers)
    source = EngineRollouts(manager, config, prompts, run.resumed)
    score = evaluation = beside = None
    if scores_on_ranks(config):
        score = ModelRewards(config, trainer, run.to_ranks)
    if data.held_out:
        evaluation = Evaluation(manager, data.held_out, config, run.directory, run.monitor.text, score)
        if config.eval.beside:
            held = HeldEngines(engines, config.eval.engines)
            steps = config.run.total_steps
            beside = EvaluationBeside(evaluation, held, workers.samplers, run.monitor, steps)
    # A checkpoint that is complete when generation ends gets its final name now. Otherwise it would have none
    # if the run is stopped within the step, without time to finish it.
    sampled = run.saver.complete_written
    weights = handover(run, _probes(run, prompts))
    return RolloutPipeline(source, weights, run.monitor, evaluation, beside, score, sampled)


@contextmanager
def _loop(
    context: RunContext, data: _Data, checkpoint: Checkpoint | None, stop: StopRequest | None = None
) -> Iterator[tuple[Controller, Run]]:
    """Start the trainer's ranks for one attempt, and yield the GRPO training loop, as (controller, run).

    checkpoint: checkpoint from which the attempt begins; None: it begins at step 0.
    stop: request to stop; None: the loop never stops early.
    """
    config, prompts = context.config, data.prompts()
    with ExitStack() as cleanup:
        if context.engines:
            # The workers start while the ranks build the model.
            workers = RolloutWorkers(
                config, context.cluster, context.engines, context.logs, context.hang_detector
            )
            cleanup.callback(workers.close)
        run = cleanup.enter_context(assemble(context, checkpoint))
        if run.engines is None:
            rollouts = ReplayedRollouts(config.rollout.replay, run.monitor.phases)
        else:
            workers.wait_until_ready()
            rollouts = _rollouts(run, data, workers, prompts)
        cleanup.callback(rollouts.close)
        controller = Controller(
            config,
            rollouts,
            run.trainer,
            Algorithm(config, data.tokenizer.decode_all),
            run.monitor,
            run.loop(stop),
            open_ledger(context.directory, checkpoint, run.engines is None),
        )
        if run.state:
            controller.load_state_dict(run.state)
        yield controller, run


@contextmanager
def assembled_loop(config: Config, guard: Guard | None = None) -> Iterator[tuple[Controller, Run]]:
    """Start all processes of a training run, and yield its GRPO training loop, as (controller, run).

    The self-test, tests and benchmarks use this function. The caller makes the steps, with controller.run()
    or one by one. In contrast to `train`, there is no second attempt after the loss of a process, and a
    request to stop does not make the loop save a checkpoint.
    """
    check_start(config, Command.train)
    data = _Data(config)
    with (
        open_run(config, Command.train, guard, data.must_fit) as context,
        context.hang_detector,
        _loop(context, data, context.checkpoint) as loop,
    ):
        yield loop


def train(config: Config, guard: Guard | None = None) -> dict[str, Any]:
    """Train with GRPO, and return the result, which is also written to result.json in the run's folder.

    The result is what Controller.run returns, with the paths of all outputs added (see `Run.finish`). If an
    earlier start of this command has finished the run, its result is returned. Raises Stopped if the run was
    asked to stop.

    guard: receives requests to stop; None: the run is never asked to stop.
    """
    if result := finished_result(config, Command.train):
        return result
    check_start(config, Command.train)
    data = _Data(config)

    def attempt(context: RunContext, checkpoint: Checkpoint | None) -> dict[str, Any]:
        with _loop(context, data, checkpoint, stop=context.guard.stop) as (controller, run):
            return run.finish(controller.run())

    with open_run(config, Command.train, guard, data.must_fit) as context:
        return run_with_restarts(context, attempt)
