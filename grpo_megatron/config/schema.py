"""The schema of the configuration: OmegaConf dataclasses, one field per key. Any other key is an error."""

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
        MISSING, "HF checkpoint folder (config.json, safetensors, tokenizer) to start from"
    )
    fp32_head: bool = option(False, "the output projection is computed in float32, in trainer and engine")


@dataclass
class RefConfig:
    path: PathText | None = option(None, "HF checkpoint of the reference model; null: the same as model.path")
    offload: bool = option(
        True, "keep the reference's weights in the host's memory between uses, else in the device's"
    )
    hidden_gib: float = option(
        4.0,
        "with kl_loss_type=full: the most that the reference's last hidden states of a step may take of a "
        "device; the rest waits in the host's memory. A replica has (tokens of its samples) * (hidden size) "
        "values of the precision's size, over the last stage's ranks divided by context_parallel, and with "
        "sequence_parallel by tensor_parallel",
        "GiB",
        ge=0,
    )
    reset_every: int = option(
        0, "the current weights become the reference every this many steps; 0: never", "steps", ge=0
    )


@dataclass
class TrainConfig:
    ppo_epochs: int = option(1, "passes over a step's samples", gt=0)
    ppo_mini_batch_size: int = option(
        32, "prompts per optimizer step; divides data.train_batch_size", "prompts", gt=0
    )
    max_tokens_per_micro_batch: int = option(
        16384, "limit of a packed micro-batch (per CP rank)", "tokens", gt=0
    )
    packing: bool = option(True, "several sequences per micro-batch; false: one each")
    constant_length_packs: bool = option(
        False,
        "pad every micro-batch to max_tokens_per_micro_batch: pipeline stages then need not exchange shapes",
    )
    old_logprobs: OldLogprobs = option(
        OldLogprobs.recompute,
        "old policy's log-probs: recompute (a pass of the trainer), rollout (the engine's), "
        "current (detached from the training forward; one optimizer step per batch only)",
    )


@dataclass
class MegatronConfig:
    tensor_parallel: int = option(1, "tensor-parallel ranks (TP)", gt=0)
    pipeline_parallel: int = option(1, "pipeline stages (PP)", gt=0)
    data_parallel: int = option(1, "data-parallel replicas (DP)", gt=0)
    context_parallel: int = option(1, "context-parallel ranks (CP): every sequence is split over them", gt=0)
    sequence_parallel: bool = option(False, "split activations over TP between the matrix products (SP)")
    virtual_pipeline: int = option(
        1, "model chunks per pipeline stage, for the interleaved schedule (VPP)", gt=0
    )
    pipeline_layers: list[PositiveInt] = option(
        [],
        "layers of each of pipeline_parallel * virtual_pipeline chunks, in forward order; none: equally many",
    )
    expert_parallel: int = option(1, "ranks the experts of a layer are divided over (EP)", gt=0)
    expert_tensor_parallel: int = option(1, "ranks each expert is split over", gt=0)
    recompute: Recompute = option(
        Recompute.none,
        "activations computed again in the backward pass: none, selective (recompute_modules), full (whole "
        "layers)",
    )
    recompute_modules: list[Literal["core_attn", "mlp", "layernorm", "moe", "moe_act"]] = option(
        ["core_attn"],
        "what selective recomputes: core_attn, mlp, layernorm, moe, moe_act",
    )
    sleep: bool = option(
        False, "give back the memory of weights, gradients and optimizer while engines generate"
    )
    offload_folder: PathText | None = option(
        None,
        "where sleeping and offloaded tensors go; null: pinned host memory, or temporary files on a machine "
        "without a GPU",
    )
    distributed_optimizer: bool = option(False, "split optimizer states (and fp32 master weights) over DP")
    overlap: bool = option(
        False, "overlap gradient reduction, and the distributed optimizer's gathering, with compute"
    )
    precision: Precision = option(
        Precision.bf16, "training precision: bf16 (fp32 master weights), fp8 (TransformerEngine), or fp32"
    )
    transformer_impl: TransformerImpl = option(
        TransformerImpl.auto,
        "layers: transformer_engine, local (torch), or auto (the former where it can run; local in fp32 and "
        "with lora)",
    )
    fp8: FP8Config = section(FP8Config, "matrix products in FP8, with megatron.precision=fp8")
    emulate_kernels: bool = option(
        False,
        "TransformerEngine's layers on a machine without a GPU, their kernels emulated (slow: for trials and "
        "tests)",
    )
    lora: LoraConfig = section(LoraConfig, "adapters, trained in place of the model")
    cpu_threads: Threads = option(
        "auto",
        "intra-op threads of a rank on a machine without a GPU; auto: OMP_NUM_THREADS, or without it the "
        "node's cores divided among the ranks there, because engines wait while ranks train",
    )
    collective_timeout: float = option(
        1800.0, "how long a collective may wait for a missing rank", "seconds", gt=0, le=LONGEST_WAIT
    )


@dataclass
class MoEConfig:
    aux_loss_coeff: float = option(0.0, "coefficient of the routers' load-balancing loss; 0: off", ge=0)
    z_loss_coeff: float = option(0.0, "coefficient of the routers' z-loss; 0: off", ge=0)
    routing_replay: RoutingReplay = option(
        RoutingReplay.off,
        "experts of each token in training: off (the router's choice), old_policy (as in the pass for the "
        "old log-probs; R2), engine (as in generation; R3)",
    )


@dataclass
class OptimizerConfig:
    lr: float = option(1e-6, "peak learning rate", gt=0)
    lr_schedule: LrSchedule = option(
        LrSchedule.constant,
        "after the warm-up: constant; cosine (arXiv:1608.03983) or linear, down to lr_min; "
        "wsd (constant, then lr_min within the last wsd_decay_steps; arXiv:2404.06395)",
    )
    lr_warmup_steps: int = option(
        0, "linear warm-up from 0; step k of n runs at k/n of lr", "optimizer steps", ge=0
    )
    lr_min: float = option(
        0.0, "rate of the last step of the schedule, and of all beyond it; not for constant", ge=0
    )
    lr_decay_steps: int | None = option(
        None,
        "length of the whole schedule, with its warm-up; null: all optimizer steps of the run",
        "optimizer steps",
        gt=0,
    )
    wsd_decay_steps: int | None = option(
        None, "wsd only: length of the decay at the schedule's end", "optimizer steps", gt=0
    )
    wsd_decay_style: WsdDecayStyle = option(
        WsdDecayStyle.linear,
        "share of lr - lr_min left after the part r of wsd's decay: linear 1 - r, cosine (1 + cos(pi r)) / "
        "2, exponential 2 * 0.5^r - 1, minus_sqrt 1 - sqrt(r) (arXiv:2405.18392)",
    )
    weight_decay: float = option(
        0.0, "decoupled weight decay (AdamW) of matrices; norms and biases never decay", ge=0
    )
    decay_embeddings: bool = option(
        True,
        "token embeddings (and an output layer tied to them) decay like the other matrices; false: not at "
        "all",
    )
    beta1: float = option(0.9, "Adam's beta1", ge=0, lt=1)
    beta2: float = option(0.95, "Adam's beta2", ge=0, lt=1)
    eps: float = option(1e-8, "Adam's epsilon", gt=0)
    offload: bool = option(
        False, "keep moments and fp32 master weights off the device between optimizer steps"
    )
    clip_grad: float = option(1.0, "global gradient norm limit; 0: off", ge=0)
    max_grad_norm_to_step: float | None = option(
        None,
        "drop a step whose gradient norm, before clipping, is more than this; null: only one that is not "
        "finite",
        gt=0,
    )
    max_dropped_steps: int = option(
        5, "stop the run after this many dropped steps in a row", "optimizer steps", gt=0
    )


@dataclass
class ClusterConfig:
    ray_address: FilledText | None = option(None, "Ray cluster to join; null: start one on this machine")
    placement: Placement = option(
        Placement.separate,
        "colocated: engines and ranks take turns on the same devices; separate: own devices",
    )
    call_timeout: float = option(
        7200.0,
        "longest time one call to the trainer's ranks, such as a training step, may take",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
    hang_timeout: float = option(
        600.0,
        "how long nothing may move in a rank or an engine that was asked for something; it is then reported, "
        "and ended",
        "seconds",
        ge=10,
        le=LONGEST_WAIT,
    )
    gpu: Literal[("none", *GPUS)] | None = option(
        None,
        "GPU of the cluster, for checks on another machine: none (the run is on CPUs) or a name; null: what "
        "the machine or the Ray cluster has",
    )
    nodes: int | None = option(
        None, "nodes of the cluster, for checks on another machine; null: unknown", gt=0
    )
    gpus_per_node: int | None = option(
        None, "GPUs of each node, for checks on another machine; null: unknown", gt=0
    )


@dataclass
class EvalConfig:
    every: int = option(0, "evaluate every this many steps; 0: only before and after", "steps", ge=0)
    n: int = option(4, "samples per held-out prompt; mean@n is reported", gt=0)
    temperature: float = option(1.0, "sampling temperature of the evaluation", ge=0)
    top_p: float = option(1.0, "nucleus sampling in the evaluation", gt=0, le=1)
    max_response_length: int | None = option(
        None, "longest response in the evaluation; null: as in training", "tokens", gt=0
    )
    pass_reward: float = option(1.0, "a sample passes, for pass@k, if its reward is at least this")
    greedy: bool = option(True, "also evaluate greedy decoding")
    save_samples: bool = option(True, "write the samples of every evaluation to eval/ in the run's folder")


@dataclass
class Config:
    """The whole configuration of a run. Each field is a section of the YAML file."""

    run: RunConfig = section(RunConfig, "the run itself")
    model: ModelConfig = section(ModelConfig, "the model")
    ref: RefConfig = section(RefConfig, "the reference model, for the KL in the loss or the reward")
    data: DataConfig = section(DataConfig, "prompts and held-out prompts")
    rollout: RolloutConfig = section(RolloutConfig, "generation")
    reward: RewardConfig = section(RewardConfig, "scoring")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "advantages and loss")
    mismatch: MismatchConfig = section(MismatchConfig, "log-probs of engine and trainer that differ")
    train: TrainConfig = section(TrainConfig, "from samples to optimizer steps")
    megatron: MegatronConfig = section(MegatronConfig, "parallel layout of the trainer")
    moe: MoEConfig = section(MoEConfig, "routers of models with experts")
    optimizer: OptimizerConfig = section(OptimizerConfig, "the optimizer")
    cluster: ClusterConfig = section(ClusterConfig, "where processes run")
    weight_sync: WeightSyncConfig = section(WeightSyncConfig, "from the trainer's weights to the engines'")
    eval: EvalConfig = section(EvalConfig, "evaluation on held-out prompts")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving")
    monitor: MonitorConfig = section(MonitorConfig, "what is shown of a run, and where")
