"""Actor: one rank of the trained model, as the parts that the driver and the tests call.

PolicyTrainer calls methods of the parts, such as `mini_batches.train_step`, through a Ray actor. The tests in
tests/parallel call them directly. If a docstring says that all ranks must call a method, they must do so at
the same time. Arguments are the same on all ranks, except micro-batches, which are those of the rank's
data-parallel replica.
"""

from collections.abc import Callable

from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.memory.rank import RankMemory
from grpo_megatron.megatron.mini_batches import MiniBatches
from grpo_megatron.megatron.passes import Passes
from grpo_megatron.megatron.reward_model import RewardModel
from grpo_megatron.megatron.state.checkpoint import RankCheckpoints
from grpo_megatron.megatron.state.weights import RankWeights
from grpo_megatron.megatron.trained_model import TrainedModel


class Actor:
    """One rank of the trained model. `process_groups.initialize` must have run in this process.

    model: the model with its optimizer and reference weights, which all parts use
    passes: forward and training passes
    mini_batches: the mini-batches of the current step, on which the passes run
    checkpoints: saving and loading of the training state
    weights: weight sync, export, and changes and checks of the weights
    memory: frees device memory while rollout engines use the device
    """

    def __init__(
        self,
        config: Config,
        command: Command = Command.train,
        heartbeat: Heartbeat | None = None,
        build: Callable[[Config, Command, Heartbeat], TrainedModel] = TrainedModel,
    ):
        """Build the model, load its weights and set up the optimizer.

        command: decides whether a policy or a reward model is trained, whether a reference and a frozen
            reward model are held beside it, and how long the learning-rate schedule is.
        heartbeat: reports this process's progress to the driver's hang detector. None: report no progress.
        build: builds the model. Benchmarks build a model with random weights.
        """
        heartbeat = heartbeat or Heartbeat()
        scores = command == Command.train and scores_on_ranks(config)
        reward_model = RewardModel(config, heartbeat.tick) if scores else None
        self.model = build(config, command, heartbeat)
        self.passes = Passes(self.model, reward_model)
        rank = self.model.rank
        self.mini_batches = MiniBatches(self.passes, config, rank.last_stage, rank.reports)
        self.checkpoints = RankCheckpoints(self.model)
        self.weights = RankWeights(self.model)
        self.memory = RankMemory(self.model, self.passes.prepared)
        self.config, self.rank = config, rank
