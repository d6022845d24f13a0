"""TrainedModel: model, optimizer and reference weights of one rank, which all parts of an Actor use."""

from contextlib import contextmanager

import torch.distributed as dist

from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import lr_decay_steps
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.head.score import load_reward_model
from grpo_megatron.megatron.layers import lora
from grpo_megatron.megatron.layers.build import build_model, uses_transformer_engine
from grpo_megatron.megatron.memory.parking import return_to_system
from grpo_megatron.megatron.memory.training import TrainingMemory
from grpo_megatron.megatron.optimizer import wrap_for_training
from grpo_megatron.megatron.process_groups import local_device, rank_info
from grpo_megatron.megatron.state.checkpoint_files import Writer
from grpo_megatron.megatron.state.hf_weights import load_hf, mark_parallel
from grpo_megatron.megatron.state.reference import ReferenceWeights
from grpo_megatron.model.adapters import adapter_entries
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint


class TrainedModel:
    """Model, optimizer and reference weights of one rank.

    Code that reads or replaces weights must do so within `settled_weights`, which waits until all weights
    have their newest values. Code that changes a tensor must call `until_saved` before, which waits until the
    thread that writes a checkpoint has read the tensor.
    """

    def __init__(self, config: Config, command: Command, heartbeat: Heartbeat):
        """Build the model, load its weights and set up the optimizer.

        command: kind of run. It decides whether a policy or a reward model is trained, whether reference
            weights are kept, and how long the learning-rate schedule is.
        heartbeat: reports the progress of this process to the driver's hang detector.

        Raises UserError if a model cannot be loaded, or if this machine cannot run the model's layers.
        """
        self.config, self.command, self.heartbeat = config, command, heartbeat
        self.rank = rank_info()
        self.device = local_device()
        path = config.model.path
        self.arch = read_architecture(path, reward_model=command == Command.reward_model)
        self.transformer_engine = _same_on_all_ranks(uses_transformer_engine(config.megatron, self.arch))
        self.entries = weight_map(self.arch, self.transformer_engine)
        self.chunks = build_model(self.arch, config, self.transformer_engine)
        self.params_dtype = self.chunks[0].config.params_dtype
        for chunk in self.chunks:
            chunk.register_forward_pre_hook(lambda *_: heartbeat.tick())
        mark_parallel(self.chunks, self.entries)
        self.adapters = adapter_entries(self.entries.values(), config.megatron.lora)
        if self.adapters:
            lora.attach(self.chunks, self.adapters, config.run.seed)
        # Load the weights before DDP and the optimizer move the parameters into their buffers.
        self.reference, same_model = None, config.ref.path in (None, path)
        if command.syncs and config.algorithm.needs_reference:
            self._load(config.ref.path or path)
            self.reference = ReferenceWeights(self.chunks, on_host=config.ref.offload, same_model=same_model)
        if self.reference is None or not same_model:
            self._load(path)
        self._set_up_training()
        self.has_reference = False  # True while the reference's weights are in the policy's place
        self.writer: Writer | None = None  # writes the checkpoint that is in progress

    def _load(self, folder: str) -> None:
        """Fill the parameters from the HF checkpoint in `folder`. Benchmarks override this method."""
        if self.arch.scalar_head:
            load_reward_model(self.chunks, folder, self.entries, self.config.run.seed)
        else:
            load_hf(self.chunks, HFCheckpoint(folder), self.entries)

    def _set_up_training(self) -> None:
        """Wrap each model chunk in Megatron's DDP, and build the optimizer over all chunks.

        Also create the TrainingMemory, which frees the device memory of model and optimizer for a while.
        """
        config, megatron = self.config, self.config.megatron
        self._gathers_in_forward = megatron.overlap and megatron.distributed_optimizer
        decay_steps = lr_decay_steps(config, self.command)
        self.ddp, self.optimizer = wrap_for_training(self.chunks, config, decay_steps)
        self.memory = TrainingMemory(
            self.ddp, self.optimizer, config.optimizer.offload, megatron.offload_folder
        )
        # The weights have moved into DDP's buffers. If torch kept their old memory, small workspaces would be
        # placed in it, and it could never be returned: 2.5 GB of a sleeping rank were memory of this kind.
        return_to_system()

    @contextmanager
    def settled_weights(self):
        """Enter a context in which all parameters have their newest values, to read or replace weights.

        All ranks must enter the context together. With megatron.overlap and the distributed optimizer, each
        rank updates only a part of the parameters. It receives the other parts from other ranks during the
        next training forward pass. Outside of the context, code would read old values, and values that it
        writes would be overwritten. Entering the context waits for the other parts, and none arrive inside
        it.

        The model is then in eval mode until the next training pass.

        Raises RuntimeError if the model has the reference's weights at present.
        """
        self.require_policy()
        overlapping = self.ddp if self._gathers_in_forward else []
        for ddp in overlapping:
            ddp.disable_forward_pre_hook(param_sync=True)
        for ddp in self.ddp:
            ddp.eval()
        try:
            yield
        finally:
            for ddp in overlapping:
                ddp.enable_forward_pre_hook()

    def until_saved(self, weights_only: bool = False) -> None:
        """Wait until the thread that writes a checkpoint has read the tensors that the caller will change.

        The thread reads weights and optimizer states in place, without copying them first. If no checkpoint
        is being written, this method returns at once.

        weights_only: True if the caller will change only weights, not the optimizer's states.
        """
        if self.writer:
            self.writer.wait_until_read(weights_only)

    def require_policy(self) -> None:
        """Raise RuntimeError if the model has the reference's weights instead of the policy's."""
        if self.has_reference:
            raise RuntimeError("the model has the reference's weights: leave Passes.reference() first")

    def require_reference(self) -> ReferenceWeights:
        """Return the reference weights. Raises RuntimeError if the run has no reference model."""
        if self.reference is None:
            raise RuntimeError(
                "this actor has no reference weights: the command or the algorithm of this run needs none"
            )
        return self.reference


def _same_on_all_ranks(transformer_engine: bool) -> bool:
    """Return whether this rank's layers are TransformerEngine's. All ranks must call this.

    Raises UserError if the ranks differ, which megatron.transformer_impl=auto allows if their machines do.
    """
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, transformer_engine)
    if len(set(answers)) > 1:
        without = ", ".join(str(rank) for rank, answer in enumerate(answers) if not answer)
        raise UserError(
            f"the machines of ranks {without} cannot run TransformerEngine, those of the other ranks can, so "
            "megatron.transformer_impl=auto would give them different layers; set "
            "megatron.transformer_impl=local, or install TransformerEngine on all machines (grpo-megatron "
            "doctor says what is missing)"
        )
    return transformer_engine
