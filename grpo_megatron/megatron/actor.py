"""Actor: one rank of the trained model, divided into parts whose methods the driver and the tests call.

PolicyTrainer calls these methods, such as `mini_batches.train_step`, through a Ray actor. The tests in
tests/parallel call them directly. If a docstring says that all ranks must call a method, they must do so at
the same time. Arguments are the same on all ranks, except for the data of a training step, such as
micro-batches and coefficients: these are the same only on the ranks of one data-parallel replica.
"""

from collections.abc import Callable

from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.accumulation import AccumulatedGradients
from grpo_megatron.megatron.memory.rank import RankMemory
from grpo_megatron.megatron.mini_batches import MiniBatches
from grpo_megatron.megatron.passes import Passes
from grpo_megatron.megatron.reward_model import RewardModel
from grpo_megatron.megatron.state.checkpoint import RankCheckpoints
from grpo_megatron.megatron.state.weights import RankWeights
from grpo_megatron.megatron.trained_model import TrainedModel


class Actor:
    """One rank of the trained model. Its attributes are parts, whose methods do the work.

    Before an Actor is created, `process_groups.initialize` must create this process's process groups.

    model: the model with its optimizer and reference weights. The other parts use it.
    passes: runs forward passes and training steps.
    mini_batches: holds the mini-batches of the current step, and runs the passes over them.
    gradients: adds up gradients over several calls, for a user's own loop.
    checkpoints: saves and loads the training state.
    weights: sends weights to the rollout engines, exports an HF checkpoint, and changes or checks weights.
    memory: frees device memory while rollout engines use the device.
    """

    def __init__(
        self,
        config: Config,
        command: Command = Command.train,
        heartbeat: Heartbeat | None = None,
        build: Callable[[Config, Command, Heartbeat], TrainedModel] = TrainedModel,
    ):
        """Build this rank's part of the model, load its weights and set up the optimizer.

        command: kind of run. It decides whether a policy or a reward model is trained, whether this rank also
            holds a reference model and a frozen reward model, and how long the learning-rate schedule is.
        heartbeat: reports the progress of this process to the driver's hang detector. None: report no
            progress.
        build: function that builds the model and its optimizer. Benchmarks pass one that uses random weights.

        Raises UserError if a model cannot be loaded, or if this machine cannot run the model's layers.
        """
        heartbeat = heartbeat or Heartbeat()
        scores = command == Command.train and scores_on_ranks(config)
        reward_model = RewardModel(config, heartbeat.tick) if scores else None
        self.model = build(config, command, heartbeat)
        self.passes = Passes(self.model, reward_model)
        self.mini_batches = MiniBatches(self.passes, config, self.model.rank)
        self.gradients = AccumulatedGradients(self.model, self.passes)
        self.checkpoints = RankCheckpoints(self.model)
        self.weights = RankWeights(self.model)
        self.memory = RankMemory(self.model, self.passes.prepared)
        self.config, self.rank = config, self.model.rank
