"""The schema of the configuration: pydantic dataclasses, one field per key. Unknown keys are errors."""

from enum import Enum
from typing import Literal

from omegaconf import MISSING
from pydantic import PositiveInt

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.algorithm import AlgorithmConfig, MismatchConfig
from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.fp8 import FP8Config
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.monitor import MonitorConfig
from grpo_megatron.config.options import (
    LONGEST_WAIT,
    FilledText,
    PathText,
    Threads,
    dataclass,
    option,
    section,
)
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.run import CheckpointConfig, RunConfig
from grpo_megatron.config.weight_sync import WeightSyncConfig


class OldLogprobs(str, Enum):
    recompute = "recompute"
    rollout = "rollout"
    current = "current"


class Precision(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"


class TransformerImpl(str, Enum):
    auto = "auto"
    local = "local"
    transformer_engine = "transformer_engine"


class Recompute(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"


class RoutingReplay(str, Enum):
    off = "off"
    old_policy = "old_policy"
    engine = "engine"


class LrSchedule(str, Enum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"


class WsdDecayStyle(str, Enum):
    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


class Placement(str, Enum):
    colocated = "colocated"
    separate = "separate"


@dataclass
class ModelConfig:
    path: PathText = option(MISSING, "Folder of the HF checkpoint to start from.")
    fp32_head: bool = option(False, "Compute the output projection in float32, in trainer and engines.")


@dataclass
class RefConfig:
    path: PathText | None = option(None, "Folder of the reference model's HF checkpoint. null: model.path.")
    offload: bool = option(
        True,
        "Keep the reference model's weights in host memory between uses.",
    )
    hidden_gib: float = option(
        4.0,
        "Device memory for the reference's last hidden states with kl_loss_type=full; the rest is in host "
        "memory.",
        "GiB",
        ge=0,
    )
    reset_every: int = option(
        0, "Interval at which the current weights become the reference. 0: never.", "steps", ge=0
    )


@dataclass
class TrainConfig:
    ppo_epochs: int = option(1, "Passes over the samples of a step.", gt=0)
    ppo_mini_batch_size: int = option(
        32, "Number of prompts per optimizer step. It must divide data.train_batch_size.", "prompts", gt=0
    )
    max_tokens_per_micro_batch: int = option(
        16384,
        "Maximum size of a packed micro-batch, on each context-parallel rank.",
        "tokens",
        gt=0,
    )
    packing: bool = option(True, "Pack several sequences into a micro-batch.")
    constant_length_packs: bool = option(
        False,
        "Pad micro-batches to max_tokens_per_micro_batch, so that pipeline stages need not exchange shapes.",
    )
    old_logprobs: OldLogprobs = option(
        OldLogprobs.recompute,
        "Source of the old policy's log-probs. recompute: a pass of the trainer. rollout: the engine. "
        "current: training's own forward pass, with one optimizer step per batch.",
    )


@dataclass
class MegatronConfig:
    tensor_parallel: int = option(1, "Tensor-parallel ranks (TP).", gt=0)
    pipeline_parallel: int = option(1, "Pipeline stages (PP).", gt=0)
    data_parallel: int = option(1, "Data-parallel replicas (DP).", gt=0)
    context_parallel: int = option(1, "Context-parallel ranks (CP), which split every sequence.", gt=0)
    sequence_parallel: bool = option(
        False,
        "Divide activations between the matrix products among the tensor-parallel ranks (SP).",
    )
    virtual_pipeline: int = option(1, "Interleaved model chunks per pipeline stage (VPP).", gt=0)
    pipeline_layers: list[PositiveInt] = option(
        [],
        "Layers of each of the pipeline_parallel * virtual_pipeline chunks, in forward order. []: equal "
        "numbers.",
    )
    expert_parallel: int = option(1, "Ranks among which a layer's experts are divided (EP).", gt=0)
    expert_tensor_parallel: int = option(1, "Ranks over which each expert is split.", gt=0)
    recompute: Recompute = option(
        Recompute.none,
        "Activations that the backward pass computes again. selective: those of recompute_modules. full: "
        "those of whole layers.",
    )
    recompute_modules: list[Literal["core_attn", "mlp", "layernorm", "moe", "moe_act"]] = option(
        ["core_attn"],
        "Modules of recompute=selective.",
    )
    sleep: bool = option(False, "Free the memory of weights, gradients and optimizer while engines generate.")
    offload_folder: PathText | None = option(
        None,
        "Folder for what sleep and offload move off the device. null: pinned host memory; without a GPU, "
        "temporary files.",
    )
    distributed_optimizer: bool = option(
        False, "Divide optimizer states and fp32 master weights among the data-parallel replicas."
    )
    overlap: bool = option(
        False,
        "Overlap gradient reduction, and the distributed optimizer's gathering of weights, with computation.",
    )
    precision: Precision = option(
        Precision.bf16,
        "Precision of training: bf16 (with fp32 master weights), fp8 (with TransformerEngine), or fp32.",
    )
    transformer_impl: TransformerImpl = option(
        TransformerImpl.auto,
        "Implementation of layers. transformer_engine: TransformerEngine's. local: Megatron's, in torch. "
        "auto: the first where it can run, but local in fp32 and with lora.",
    )
    fp8: FP8Config = section(FP8Config, "Matrix products in FP8, with megatron.precision=fp8.")
    emulate_kernels: bool = option(
        False,
        "Emulate TransformerEngine's kernels on a machine without a GPU. This is slow. Use it for trials and "
        "tests only.",
        is_internal=True,
    )
    lora: LoraConfig = section(
        LoraConfig, "Adapters (LoRA, arXiv:2106.09685), which are trained in place of the model."
    )
    cpu_threads: Threads = option(
        "auto",
        "Intra-op threads per rank, without a GPU. auto: OMP_NUM_THREADS, or else the node's cores divided "
        "among its ranks.",
    )
    collective_timeout: float = option(
        1800.0, "Maximum time that a collective waits for a rank.", "seconds", gt=0, le=LONGEST_WAIT
    )


@dataclass
class MoEConfig:
    aux_loss_coeff: float = option(0.0, "Coefficient of the routers' load-balancing loss.", ge=0)
    z_loss_coeff: float = option(0.0, "Coefficient of the routers' z-loss.", ge=0)
    routing_replay: RoutingReplay = option(
        RoutingReplay.off,
        "Experts of a token in training. off: the router's choice. old_policy: those of the pass for the old "
        "log-probs (R2). engine: those of generation (R3).",
    )


@dataclass
class OptimizerConfig:
    lr: float = option(1e-6, "Maximum learning rate, after the warm-up.", gt=0)
    lr_schedule: LrSchedule = option(
        LrSchedule.constant,
        "Learning rate after the warm-up. constant: lr. cosine (arXiv:1608.03983), linear: it falls to "
        "lr_min. wsd (arXiv:2404.06395): it falls to lr_min in the last wsd_decay_steps.",
    )
    lr_warmup_steps: int = option(
        0, "Length of the linear warm-up. Step k of n runs at k/n of lr.", "optimizer steps", ge=0
    )
    lr_min: float = option(
        0.0,
        "Learning rate at the end of the schedule and beyond; constant ignores it.",
        ge=0,
    )
    lr_decay_steps: int | None = option(
        None,
        "Length of the schedule, including the warm-up. null: all optimizer steps of the run.",
        "optimizer steps",
        gt=0,
    )
    wsd_decay_steps: int | None = option(None, "Length of the decay of wsd.", "optimizer steps", gt=0)
    wsd_decay_style: WsdDecayStyle = option(
        WsdDecayStyle.linear,
        "Share of lr - lr_min that is left after the fraction r of wsd's decay. linear: 1-r. cosine: "
        "(1+cos(pi r))/2. exponential: 2^(1-r)-1. minus_sqrt: 1-sqrt(r) (arXiv:2405.18392).",
    )
    weight_decay: float = option(
        0.0, "Decoupled weight decay (AdamW) of matrices. Norms and biases never decay.", ge=0
    )
    decay_embeddings: bool = option(
        True,
        "Decay token embeddings, and an output layer tied to them, too.",
    )
    beta1: float = option(0.9, "Adam's beta1.", ge=0, lt=1)
    beta2: float = option(0.95, "Adam's beta2.", ge=0, lt=1)
    eps: float = option(1e-8, "Adam's epsilon.", gt=0)
    offload: bool = option(
        False, "Keep moments and fp32 master weights off the device between optimizer steps."
    )
    clip_grad: float = option(
        1.0, "Maximum global gradient norm. Larger gradients are scaled down. 0: off.", ge=0
    )
    max_grad_norm_to_step: float | None = option(
        None,
        "Maximum gradient norm before clipping. A step above it is dropped. null: any finite norm is "
        "applied.",
        gt=0,
    )
    max_dropped_steps: int = option(5, "Dropped steps in a row that stop the run.", "optimizer steps", gt=0)


@dataclass
class ClusterConfig:
    ray_address: FilledText | None = option(
        None, "Address of the Ray cluster to join. null: a new one on this machine."
    )
    placement: Placement = option(
        Placement.separate,
        "Devices of engines and ranks. colocated: the same, in turns. separate: devices of their own.",
    )
    call_timeout: float = option(
        7200.0,
        "Maximum time of a call to the trainer's ranks, such as a training step.",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
    hang_timeout: float = option(
        600.0,
        "Maximum time without progress in a busy rank or engine. Then it is reported and ended.",
        "seconds",
        ge=10,
        le=LONGEST_WAIT,
    )
    gpu: Literal[("none", *GPUS)] | None = option(
        None,
        "GPUs of the cluster, for checks on another machine. none: CPUs. null: those of this machine or of "
        "the Ray cluster.",
    )
    nodes: int | None = option(None, "Number of nodes, for checks on another machine.", gt=0)
    gpus_per_node: int | None = option(None, "GPUs per node, for checks on another machine.", gt=0)


@dataclass
class EvalConfig:
    every: int = option(
        0,
        "Interval of evaluations during training. 0: only before and after it.",
        "steps",
        ge=0,
    )
    beside: bool = option(
        False,
        "Evaluate without interrupting training: eval.engines engines evaluate, the others keep sampling.",
    )
    engines: int = option(1, "Engines that evaluate during training (eval.beside).", gt=0)
    n: int = option(4, "Samples per prompt, for mean@n.", gt=0)
    temperature: float = option(1.0, "Sampling temperature.", ge=0)
    top_p: float = option(1.0, "Probability mass of nucleus sampling.", gt=0, le=1)
    max_response_length: int | None = option(
        None, "Maximum length of a response. null: as in training.", "tokens", gt=0
    )
    pass_reward: float = option(1.0, "Minimum reward of a sample that passes, for pass@k.")
    greedy: bool = option(True, "Evaluate greedy decoding too.")
    save_samples: bool = option(True, "Write the samples to eval/ in the run's folder.")


@dataclass
class Config:
    """The whole configuration of a run. Each field is a section of the YAML file."""

    run: RunConfig = section(RunConfig, "The run itself.")
    model: ModelConfig = section(ModelConfig, "The model that is trained.")
    ref: RefConfig = section(RefConfig, "The reference model, for the KL in the loss or in the reward.")
    data: DataConfig = section(
        DataConfig,
        "Prompts for training and evaluation. Field a.b of a record is field b within field a.",
    )
    rollout: RolloutConfig = section(RolloutConfig, "Generation of samples.")
    reward: RewardConfig = section(RewardConfig, "Scoring of samples.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages and loss.")
    mismatch: MismatchConfig = section(
        MismatchConfig, "Correction of differences between the log-probs of engine and trainer."
    )
    train: TrainConfig = section(TrainConfig, "From samples to optimizer steps.")
    megatron: MegatronConfig = section(
        MegatronConfig, "Parallel layout, precision and memory of the trainer."
    )
    moe: MoEConfig = section(MoEConfig, "Routers of models with experts.")
    optimizer: OptimizerConfig = section(OptimizerConfig, "The optimizer and its learning rate.")
    cluster: ClusterConfig = section(ClusterConfig, "Machines of the run, and time limits of its processes.")
    weight_sync: WeightSyncConfig = section(
        WeightSyncConfig, "Transfer of the trainer's weights to the engines."
    )
    eval: EvalConfig = section(EvalConfig, "Evaluation on held-out prompts.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Checkpoints, and the trained model.")
    monitor: MonitorConfig = section(MonitorConfig, "What is shown of a run, and where.")
