"""Specification of an Actor, and the result of a training step.

The driver process imports this module too, so it must not import Megatron.
"""

from copy import copy
from dataclasses import dataclass, field, replace

import torch

from grpo_megatron.batch.layout import Layout, padded_to
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import lr_decay_steps, pack_limit, scores_on_ranks
from grpo_megatron.config.fp8 import FP8Config, FP8Recipe
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.schema import (
    Config,
    MoEConfig,
    OptimizerConfig,
    Precision,
    Recompute,
    TransformerImpl,
)
from grpo_megatron.metrics import Metrics
from grpo_megatron.model.parallel_sizes import ParallelSizes


@dataclass(frozen=True)
class ModelSpec:
    """Options for building Megatron's model of an Architecture on one rank."""

    sizes: ParallelSizes
    """Sizes of the parallel layout."""
    params_dtype: torch.dtype
    """Dtype of parameters and activations."""
    transformer_engine: bool = False
    """True: TransformerEngine's layers. False: Megatron's local layers."""
    fp8: FP8Config | None = None
    """FP8 settings of the matrix products. None: they are computed in params_dtype."""
    recompute: Recompute = Recompute.none
    """Activations that the backward pass recomputes."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules that recompute=selective recomputes."""
    aux_loss_coeff: float = 0.0
    """Coefficient of the routers' load-balancing loss. 0: off."""
    z_loss_coeff: float = 0.0
    """Coefficient of the routers' z-loss. 0: off."""
    constant_length: bool = False
    """True: all packs have the same length, so pipeline stages need not exchange shapes."""
    without_memory: bool = False
    """True: build on torch's meta device, to read names and shapes only."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters; only local layers can have them."""


@dataclass(frozen=True)
class ActorSpec:
    """Everything an Actor is built from. The driver makes it from the configuration, and all ranks get it."""

    model_path: str
    """Folder of the HF checkpoint to train."""
    sizes: ParallelSizes
    """Sizes of the parallel layout."""
    optimizer: OptimizerConfig
    """Optimizer and learning-rate schedule."""
    precision: Precision = Precision.fp32
    """Precision of training."""
    fp8: FP8Config = field(default_factory=FP8Config)
    """FP8 settings, used with precision=fp8 only."""
    transformer_impl: TransformerImpl = TransformerImpl.local
    """Kind of layers: local, transformer_engine, or auto."""
    emulate_kernels: bool = False
    """True: emulate TransformerEngine's kernels on a CPU."""
    distributed_optimizer: bool = False
    """True: divide the optimizer's states among the data-parallel ranks."""
    overlap: bool = False
    """True: overlap gradient reduction and parameter gathering with computation."""
    recompute: Recompute = Recompute.none
    """Activations that the backward pass recomputes."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules that recompute=selective recomputes."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Routing replay and coefficients of the routers' losses."""
    temperature: float = 1.0
    """Temperature of the distribution whose log-probs are trained."""
    fp32_head: bool = False
    """True: do not round logits to bf16."""
    with_reference: bool = False
    """True: hold reference weights."""
    reference_path: str | None = None
    """Folder of the reference's HF checkpoint. None: model_path."""
    reference_offload: bool = True
    """True: the reference's weights wait in host memory."""
    reference_hidden_bytes: int = 4 << 30
    """Most device memory in bytes for the reference's hidden states of a step. The rest waits on the host."""
    offload_folder: str | None = None
    """Folder for the contents of memory that `sleep` or an offloaded optimizer frees. None: host memory."""
    pack_tokens: int = 0
    """If not 0, every micro-batch is padded to this many tokens, over all CP ranks."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters to train instead of the weights. Rank 0: none."""
    seed: int = 0
    """Seed of weights that are made here: those of adapters and of a new scalar head."""
    scalar_head: bool = False
    """True: train a reward model. If the checkpoint has an output projection, only its decoder is loaded."""
    reward_model: str | None = None
    """Folder of a frozen reward model that scores samples. None: there is none."""

    def layout(self, cp_rank: int) -> Layout:
        """Return how packs of sequences are padded and split on a rank with this CP rank."""
        alignment = fp8_alignment(self.fp8 if self.precision == Precision.fp8 else None)
        layout = Layout(self.sizes.tp, self.sizes.cp, cp_rank, self.sizes.sequence_parallel, alignment)
        return replace(layout, pack_tokens=padded_to(self.pack_tokens, layout.pack_multiple))

    def model_spec(self, transformer_engine: bool) -> ModelSpec:
        """Return the options for building the trained model.

        transformer_engine: result of `uses_transformer_engine`, which depends on the rank's machine.
        """
        return ModelSpec(
            sizes=self.sizes,
            params_dtype=torch.float32 if self.precision == Precision.fp32 else torch.bfloat16,
            transformer_engine=transformer_engine,
            fp8=self.fp8 if self.precision == Precision.fp8 else None,
            recompute=self.recompute,
            recompute_modules=tuple(self.recompute_modules),
            aux_loss_coeff=self.moe.aux_loss_coeff,
            z_loss_coeff=self.moe.z_loss_coeff,
            constant_length=self.pack_tokens > 0,
            lora=self.lora,
        )


@dataclass(frozen=True)
class TrainResult:
    """Result of one optimizer step, as one rank of each data-parallel replica returns it."""

    grad_norm: float
    """Gradient norm before clipping, over all ranks."""
    lr: float
    """Learning rate of the step."""
    dropped: bool
    """True: the step was dropped and changed nothing."""
    metrics: Metrics
    """Metrics of this data-parallel replica, as Python numbers instead of tensors."""
    beyond: tuple[str, ...] = ()
    """One sentence for each limit of the loss that was exceeded, over all replicas."""
    occupied: int = 0
    """Bytes of GPU memory (without a GPU: host memory) of the rank that returns this result."""


def fp8_alignment(fp8: FP8Config | None) -> int:
    """Return the multiple to which the tokens of a pack, and each rank's part of it, must be padded for FP8.

    fp8: None: no FP8, so the multiple is 1.
    """
    if fp8 is None:
        return 1
    return {FP8Recipe.blockwise: 128, FP8Recipe.mxfp8: 32}.get(fp8.recipe, 16)


def actor_spec(config: Config, command: Command = Command.train) -> ActorSpec:
    """Return the ActorSpec of a configuration.

    command: decides whether a policy or a reward model is trained, how long the learning-rate schedule is,
        and whether a reference and a frozen reward model are held beside the trained model.
    """
    megatron = config.megatron
    # Adapters need local layers, so with them `auto` means local.
    layers = TransformerImpl.local if megatron.lora.rank else megatron.transformer_impl
    # A copy, because `replace` would check bounds again, and the self-test trains with learning rate 0.
    optimizer = copy(config.optimizer)
    optimizer.lr_decay_steps = lr_decay_steps(config, command)
    return ActorSpec(
        model_path=config.model.path,
        sizes=ParallelSizes.from_config(megatron),
        optimizer=optimizer,
        precision=megatron.precision,
        fp8=megatron.fp8,
        transformer_impl=layers,
        emulate_kernels=megatron.emulate_kernels,
        distributed_optimizer=megatron.distributed_optimizer,
        overlap=megatron.overlap,
        recompute=megatron.recompute,
        recompute_modules=tuple(megatron.recompute_modules),
        moe=config.moe,
        temperature=config.rollout.temperature,
        fp32_head=config.model.fp32_head,
        with_reference=command == Command.train and config.algorithm.needs_reference,
        reference_path=config.ref.path,
        reference_offload=config.ref.offload,
        reference_hidden_bytes=int(config.ref.hidden_gib * 2**30),
        offload_folder=megatron.offload_folder,
        pack_tokens=pack_limit(config) if config.train.constant_length_packs else 0,
        lora=megatron.lora,
        seed=config.run.seed,
        scalar_head=command == Command.reward_model,
        reward_model=config.reward.model.path
        if command == Command.train and scores_on_ranks(config)
        else None,
    )
