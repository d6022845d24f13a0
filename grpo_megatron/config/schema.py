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
    path: PathText = option(
        MISSING, "Folder of the HF checkpoint to start from: config.json, safetensors and tokenizer."
    )
    fp32_head: bool = option(
        False, "true: the trainer and the engines compute the output projection in float32."
    )


@dataclass
class RefConfig:
    path: PathText | None = option(
        None, "Folder of the HF checkpoint of the reference model. null: that of model.path."
    )
    offload: bool = option(
        True,
        "true: the weights of the reference model wait in host memory between uses. false: they stay on the "
        "device.",
    )
    hidden_gib: float = option(
        4.0,
        "Device memory for the last hidden states of the reference with kl_loss_type=full; the rest of them "
        "waits in host memory. A replica has (tokens of its samples in the step) * (hidden size) values of "
        "the training precision. They are divided among the ranks of the last pipeline stage by "
        "context_parallel, and with sequence_parallel also by tensor_parallel.",
        "GiB",
        ge=0,
    )
    reset_every: int = option(
        0, "Number of steps after which the current weights become the reference. 0: never.", "steps", ge=0
    )


@dataclass
class TrainConfig:
    ppo_epochs: int = option(1, "Number of passes over the samples of a step.", gt=0)
    ppo_mini_batch_size: int = option(
        32, "Number of prompts per optimizer step. It must divide data.train_batch_size.", "prompts", gt=0
    )
    max_tokens_per_micro_batch: int = option(
        16384,
        "Maximum number of tokens of a packed micro-batch, on each context-parallel rank.",
        "tokens",
        gt=0,
    )
    packing: bool = option(True, "true: a micro-batch has several sequences. false: it has one.")
    constant_length_packs: bool = option(
        False,
        "true: every micro-batch is padded to max_tokens_per_micro_batch, so that pipeline stages need not "
        "exchange shapes.",
    )
    old_logprobs: OldLogprobs = option(
        OldLogprobs.recompute,
        "Where the log-probs of the old policy come from. recompute: from a pass of the trainer. rollout: "
        "from the engine. current: from the forward pass of training itself, detached; it needs one "
        "optimizer step per batch.",
    )


@dataclass
class MegatronConfig:
    tensor_parallel: int = option(1, "Number of tensor-parallel ranks (TP).", gt=0)
    pipeline_parallel: int = option(1, "Number of pipeline stages (PP).", gt=0)
    data_parallel: int = option(1, "Number of data-parallel replicas (DP).", gt=0)
    context_parallel: int = option(
        1, "Number of context-parallel ranks (CP), over which every sequence is split.", gt=0
    )
    sequence_parallel: bool = option(
        False,
        "true: activations between the matrix products are divided among the tensor-parallel ranks (SP).",
    )
    virtual_pipeline: int = option(
        1, "Number of model chunks per pipeline stage, for the interleaved schedule (VPP).", gt=0
    )
    pipeline_layers: list[PositiveInt] = option(
        [],
        "Number of layers of each of the pipeline_parallel * virtual_pipeline model chunks, in forward "
        "order. []: the layers are divided evenly.",
    )
    expert_parallel: int = option(
        1, "Number of ranks among which the experts of a layer are divided (EP).", gt=0
    )
    expert_tensor_parallel: int = option(1, "Number of ranks over which each expert is split.", gt=0)
    recompute: Recompute = option(
        Recompute.none,
        "Activations that the backward pass computes again, to save memory: none, selective (those of "
        "recompute_modules), or full (whole layers).",
    )
    recompute_modules: list[Literal["core_attn", "mlp", "layernorm", "moe", "moe_act"]] = option(
        ["core_attn"],
        "Modules that recompute=selective computes again: core_attn, mlp, layernorm, moe, moe_act.",
    )
    sleep: bool = option(
        False, "true: the memory of weights, gradients and optimizer is freed while engines generate."
    )
    offload_folder: PathText | None = option(
        None,
        "Folder for weights and optimizer states while sleep and offload keep them off the device. null: "
        "pinned host memory, or temporary files on a machine without a GPU.",
    )
    distributed_optimizer: bool = option(
        False, "true: optimizer states and fp32 master weights are divided among the data-parallel replicas."
    )
    overlap: bool = option(
        False,
        "true: the reduction of gradients, and the distributed optimizer's gathering of weights, overlap "
        "with computation.",
    )
    precision: Precision = option(
        Precision.bf16,
        "Precision of training: bf16 (with fp32 master weights), fp8 (with TransformerEngine), or fp32.",
    )
    transformer_impl: TransformerImpl = option(
        TransformerImpl.auto,
        "Implementation of the layers. transformer_engine: TransformerEngine's. local: Megatron's, in "
        "torch. auto: transformer_engine where it can run, but local in fp32 and with lora.",
    )
    fp8: FP8Config = section(FP8Config, "Matrix products in FP8, with megatron.precision=fp8.")
    emulate_kernels: bool = option(
        False,
        "true: TransformerEngine's kernels are emulated on a machine without a GPU. This is slow. Use it "
        "for trials and tests only.",
        is_internal=True,
    )
    lora: LoraConfig = section(
        LoraConfig, "Adapters (LoRA, arXiv:2106.09685), which are trained in place of the model."
    )
    cpu_threads: Threads = option(
        "auto",
        "Number of intra-op threads of a trainer rank, on a machine without a GPU. auto: OMP_NUM_THREADS; "
        "if it is not set, the node's cores divided among the ranks there, because engines wait while ranks "
        "train.",
    )
    collective_timeout: float = option(
        1800.0, "Maximum time that a collective waits for a missing rank.", "seconds", gt=0, le=LONGEST_WAIT
    )


@dataclass
class MoEConfig:
    aux_loss_coeff: float = option(0.0, "Coefficient of the routers' load-balancing loss. 0: off.", ge=0)
    z_loss_coeff: float = option(0.0, "Coefficient of the routers' z-loss. 0: off.", ge=0)
    routing_replay: RoutingReplay = option(
        RoutingReplay.off,
        "Experts that each token uses in training. off: those that the router chooses. old_policy: those of "
        "the pass for the old log-probs (R2). engine: those of generation (R3).",
    )


@dataclass
class OptimizerConfig:
    lr: float = option(1e-6, "Maximum learning rate, which the warm-up reaches.", gt=0)
    lr_schedule: LrSchedule = option(
        LrSchedule.constant,
        "Learning rate after the warm-up. constant: it stays lr. cosine (arXiv:1608.03983), linear: it falls "
        "to lr_min. wsd (arXiv:2404.06395): it stays lr, and falls to lr_min within the last "
        "wsd_decay_steps.",
    )
    lr_warmup_steps: int = option(
        0, "Length of the linear warm-up from 0. Step k of n runs at k/n of lr.", "optimizer steps", ge=0
    )
    lr_min: float = option(
        0.0,
        "Learning rate of the last step of the schedule, and of all steps beyond it. The schedule constant "
        "ignores it.",
        ge=0,
    )
    lr_decay_steps: int | None = option(
        None,
        "Length of the whole schedule, including the warm-up. null: all optimizer steps of the run.",
        "optimizer steps",
        gt=0,
    )
    wsd_decay_steps: int | None = option(
        None, "Length of the decay at the end of the schedule wsd.", "optimizer steps", gt=0
    )
    wsd_decay_style: WsdDecayStyle = option(
        WsdDecayStyle.linear,
        "Form of the decay of wsd: the share of lr - lr_min that is left when the fraction r of the decay is "
        "over. linear: 1 - r. cosine: (1 + cos(pi r)) / 2. exponential: 2 * 0.5^r - 1. minus_sqrt: 1 - "
        "sqrt(r) (arXiv:2405.18392).",
    )
    weight_decay: float = option(
        0.0, "Decoupled weight decay (AdamW) of matrices. Norms and biases never decay.", ge=0
    )
    decay_embeddings: bool = option(
        True,
        "true: token embeddings, and an output layer tied to them, decay like the other matrices. false: "
        "they do not decay.",
    )
    beta1: float = option(0.9, "Adam's beta1.", ge=0, lt=1)
    beta2: float = option(0.95, "Adam's beta2.", ge=0, lt=1)
    eps: float = option(1e-8, "Adam's epsilon.", gt=0)
    offload: bool = option(
        False, "true: moments and fp32 master weights are off the device between optimizer steps."
    )
    clip_grad: float = option(
        1.0, "Maximum global gradient norm. Larger gradients are scaled down to it. 0: off.", ge=0
    )
    max_grad_norm_to_step: float | None = option(
        None,
        "Maximum gradient norm before clipping. A step with a larger norm is dropped. null: only steps with "
        "a norm that is not finite are dropped.",
        gt=0,
    )
    max_dropped_steps: int = option(
        5, "Number of dropped steps in a row after which the run stops.", "optimizer steps", gt=0
    )


@dataclass
class ClusterConfig:
    ray_address: FilledText | None = option(
        None, "Address of the Ray cluster to join. null: the run starts one on this machine."
    )
    placement: Placement = option(
        Placement.separate,
        "Devices of engines and ranks. colocated: they take turns on the same devices. separate: each has "
        "its own.",
    )
    call_timeout: float = option(
        7200.0,
        "Maximum time that one call to the trainer's ranks may take, such as a training step.",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
    hang_timeout: float = option(
        600.0,
        "Maximum time without progress in a rank or an engine that has work to do. After that the process "
        "is reported and ended.",
        "seconds",
        ge=10,
        le=LONGEST_WAIT,
    )
    gpu: Literal[("none", *GPUS)] | None = option(
        None,
        "GPUs of the cluster, for checks on another machine: the name of a GPU, or none for CPUs. null: "
        "those of this machine or of the Ray cluster.",
    )
    nodes: int | None = option(
        None, "Number of nodes of the cluster, for checks on another machine. null: unknown.", gt=0
    )
    gpus_per_node: int | None = option(
        None, "Number of GPUs on each node, for checks on another machine. null: unknown.", gt=0
    )


@dataclass
class EvalConfig:
    every: int = option(
        0,
        "Number of steps between evaluations. 0: the model is evaluated only before and after the training.",
        "steps",
        ge=0,
    )
    beside: bool = option(
        False,
        "true: evaluations between the first and the last step do not interrupt training. eval.engines "
        "engines keep the evaluated weights, and generate no training samples, until the evaluation ends. "
        "The others keep sampling for training.",
    )
    engines: int = option(1, "Number of engines that evaluate during training (eval.beside).", gt=0)
    n: int = option(4, "Number of samples per held-out prompt. Their mean is reported as mean@n.", gt=0)
    temperature: float = option(1.0, "Temperature of sampling in the evaluation.", ge=0)
    top_p: float = option(1.0, "Probability mass of nucleus sampling in the evaluation.", gt=0, le=1)
    max_response_length: int | None = option(
        None, "Length of the longest response in the evaluation. null: as in training.", "tokens", gt=0
    )
    pass_reward: float = option(1.0, "Minimum reward with which a sample passes, for pass@k.")
    greedy: bool = option(True, "true: greedy decoding is evaluated too.")
    save_samples: bool = option(
        True, "true: the samples of every evaluation are written to eval/ in the run's folder."
    )


@dataclass
class Config:
    """The whole configuration of a run. Each field is a section of the YAML file."""

    run: RunConfig = section(RunConfig, "The run itself.")
    model: ModelConfig = section(ModelConfig, "The model that is trained.")
    ref: RefConfig = section(RefConfig, "The reference model, for the KL in the loss or in the reward.")
    data: DataConfig = section(DataConfig, "Prompts for training and for evaluation.")
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
