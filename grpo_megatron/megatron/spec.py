"""What goes into an Actor and comes out of a step; light, because the driver imports it too."""

from dataclasses import dataclass, field, replace

import torch

from grpo_megatron.batch.layout import Layout, padded_to
from grpo_megatron.config.fp8 import FP8Config, FP8Recipe
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.reward import MODEL, functions_of
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
    """How a model is built from its Architecture.

    params_dtype: of parameters and activations. transformer_engine: its layers, else the local ones. fp8: how its matrix
    products are computed in FP8; None: in params_dtype.
    aux_loss_coeff, z_loss_coeff: of the routers' own losses, 0: off. constant_length: all packs are
    equally long, so that pipeline stages need not tell each other the shapes. without_memory: it is built on torch's meta device,
    to be asked for names and shapes. lora: beside local layers only.
    """

    sizes: ParallelSizes
    params_dtype: torch.dtype
    transformer_engine: bool = False
    fp8: FP8Config | None = None
    recompute: Recompute = Recompute.none
    recompute_modules: tuple[str, ...] = ("core_attn",)
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    constant_length: bool = False
    without_memory: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class ActorSpec:
    """What an actor is made of.

    temperature: of the distribution whose log-probs are trained. fp32_head: logits are not rounded to bf16.
    reference_offload: the reference's weights wait in the host's memory. reference_hidden_bytes: see config
    ref.hidden_gib. offload_folder: where what is parked goes, see memory.Parking.
    pack_tokens: if not 0, every micro-batch is padded to this many tokens, over all CP ranks.
    seed: of weights made here, which are the adapters' and those of a new scalar head. emulate_kernels: of TransformerEngine, on a
    CPU. scalar_head: it is a reward model that is trained; of a checkpoint with an output projection, the decoder alone is taken.
    reward_model: folder of one that is not trained and scores samples; None: there is none.
    """

    model_path: str
    sizes: ParallelSizes
    optimizer: OptimizerConfig
    precision: Precision = Precision.fp32
    fp8: FP8Config = field(default_factory=FP8Config)
    transformer_impl: TransformerImpl = TransformerImpl.local
    emulate_kernels: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: Recompute = Recompute.none
    recompute_modules: tuple[str, ...] = ("core_attn",)
    moe: MoEConfig = field(default_factory=MoEConfig)
    temperature: float = 1.0
    fp32_head: bool = False
    with_reference: bool = False
    reference_path: str | None = None
    reference_offload: bool = True
    reference_hidden_bytes: int = 4 << 30
    offload_folder: str | None = None
    pack_tokens: int = 0
    lora: LoraConfig = field(default_factory=LoraConfig)
    seed: int = 0
    scalar_head: bool = False
    reward_model: str | None = None

    def layout(self, cp_rank: int) -> Layout:
        """Of the packs on a rank."""
        alignment = fp8_alignment(self.fp8 if self.precision == Precision.fp8 else None)
        layout = Layout(self.sizes.tp, self.sizes.cp, cp_rank, self.sizes.sequence_parallel, alignment)
        return replace(layout, pack_tokens=padded_to(self.pack_tokens, layout.pack_multiple))

    def model_spec(self, transformer_engine: bool) -> ModelSpec:
        """transformer_engine: whether layers are TransformerEngine's, which depends on the machine."""
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
    """What one optimizer step did; metrics of this data-parallel replica, floats inside.

    beyond: one sentence for each of the loss's limits that was exceeded, over all replicas. occupied: bytes of the rank that reports
    for the replica, see cluster.memory.
    """

    grad_norm: float
    lr: float
    dropped: bool
    metrics: Metrics
    beyond: tuple[str, ...] = ()
    occupied: int = 0


def scores_on_ranks(config: Config) -> bool:
    """Whether the trainer's ranks have a reward model; recorded samples have been scored already."""
    return MODEL in functions_of(config.reward) and not config.rollout.replay


def lr_decay_steps(config: Config, command: str) -> int:
    """Optimizer steps of the learning-rate schedule with its warm-up: as set, else all of the run; command: see preflight.rule."""
    if config.optimizer.lr_decay_steps is not None:
        return config.optimizer.lr_decay_steps
    if command != "train":
        return config.run.total_steps
    mini_batches = config.data.train_batch_size // max(1, config.train.ppo_mini_batch_size)
    return config.run.total_steps * mini_batches * config.train.ppo_epochs


def fp8_alignment(fp8: FP8Config | None) -> int:
    """What a pack's tokens, and those of each rank's part of it, must be a multiple of for the matrix products."""
    if fp8 is None:
        return 1
    return {FP8Recipe.blockwise: 128, FP8Recipe.mxfp8: 32}.get(fp8.recipe, 16)


def pack_limit(config: Config) -> int:
    """Most tokens of a micro-batch, over all CP ranks."""
    return config.train.max_tokens_per_micro_batch * config.megatron.context_parallel


def actor_spec(config: Config, command: str = "train") -> ActorSpec:
    """command: as in preflight.rule, by which the length of the learning-rate schedule is known, and what is trained beside what."""
    megatron = config.megatron
    # Adapters are beside local layers only, which is what `auto` is with them.
    layers = TransformerImpl.local if megatron.lora.rank else megatron.transformer_impl
    return ActorSpec(
        model_path=config.model.path,
        sizes=ParallelSizes.from_config(megatron),
        optimizer=replace(config.optimizer, lr_decay_steps=lr_decay_steps(config, command)),
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
        with_reference=command == "train" and config.algorithm.needs_reference,
        reference_path=config.ref.path,
        reference_offload=config.ref.offload,
        reference_hidden_bytes=int(config.ref.hidden_gib * 2**30),
        offload_folder=megatron.offload_folder,
        pack_tokens=pack_limit(config) if config.train.constant_length_packs else 0,
        lora=megatron.lora,
        seed=config.run.seed,
        scalar_head=command == "reward-model",
        reward_model=config.reward.model.path if command == "train" and scores_on_ranks(config) else None,
    )
