"""GRPO runs that others have published with their layouts, as configurations of this program.

NeMo-RL: github.com/NVIDIA-NeMo/RL, examples/configs/recipes/llm/performance of release 0.4 (grpo-qwen3-30ba3b-4n8g, grpo-qwen3-235b-16n8g,
grpo-deepseek-v3-32n8g), with the measured steps of docs/about/performance-summary.md. MLPerf Training v6.1's benchmark of GRPO:
github.com/NVIDIA-NeMo/RL/pull/3364. What theirs do otherwise: gradients in bf16, and moments in float32 that wait on the host while weights
go to the engines, for which optimizer.offload stands here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """model: of configs/models. settings: key=value. sequence: mean tokens of a prompt and its response. step: measured seconds."""

    model: str
    settings: tuple[str, ...]
    sequence: float
    step: float


_COMMON = (
    "data.train=prompts.jsonl",
    "cluster.placement=colocated",
    "megatron.sleep=true",
    "megatron.distributed_optimizer=true",
    "megatron.overlap=true",
    "optimizer.offload=true",
    "algorithm.use_kl_loss=true",
    "rollout.engine.mem_fraction=0.6",
    "rollout.engine.max_running_requests=512",
    "rollout.max_concurrency=512",
    "cluster.gpu=h100-80g",
    "cluster.gpus_per_node=8",
)

RUNS = {
    "NeMo-RL, Qwen3-30B-A3B on 32 H100": Published(
        "qwen3-30b-a3b",
        (
            *_COMMON,
            "cluster.nodes=4",
            "data.train_batch_size=64",
            "rollout.n=32",
            "train.ppo_mini_batch_size=16",
            "data.max_prompt_length=512",
            "rollout.max_response_length=3584",
            "train.max_tokens_per_micro_batch=4096",
            "megatron.tensor_parallel=2",
            "megatron.sequence_parallel=true",
            "megatron.expert_parallel=8",
            "megatron.data_parallel=16",
            "rollout.engine.num_engines=8",
            "rollout.engine.tensor_parallel=4",
        ),
        3154,
        225,
    ),
    "NeMo-RL, Qwen3-235B-A22B on 128 H100": Published(
        "qwen3-235b-a22b",
        (
            *_COMMON,
            "cluster.nodes=16",
            "data.train_batch_size=16",
            "rollout.n=32",
            "train.ppo_mini_batch_size=16",
            "data.max_prompt_length=1024",
            "rollout.max_response_length=7168",
            "train.max_tokens_per_micro_batch=4096",
            "train.constant_length_packs=true",
            "megatron.tensor_parallel=2",
            "megatron.sequence_parallel=true",
            "megatron.context_parallel=2",
            "megatron.pipeline_parallel=8",
            "megatron.pipeline_layers=[11,12,12,12,12,12,12,11]",
            "megatron.expert_parallel=16",
            "megatron.data_parallel=4",
            "megatron.recompute=full",
            "rollout.engine.num_engines=8",
            "rollout.engine.tensor_parallel=16",
        ),
        5671,
        506,
    ),
    "NeMo-RL, DeepSeek-V3 on 256 H100": Published(
        "deepseek-v3",
        (
            *_COMMON,
            "cluster.nodes=32",
            "data.train_batch_size=32",
            "rollout.n=16",
            "train.ppo_mini_batch_size=32",
            "data.max_prompt_length=512",
            "rollout.max_response_length=1024",
            "train.max_tokens_per_micro_batch=1536",
            "train.constant_length_packs=true",
            "megatron.pipeline_parallel=16",
            "megatron.pipeline_layers=[3,4,4,4,4,4,4,4,4,4,4,4,4,4,4,2]",
            "megatron.expert_parallel=16",
            "megatron.data_parallel=16",
            "megatron.recompute=full",
            "rollout.engine.num_engines=8",
            "rollout.engine.tensor_parallel=32",
        ),
        745,
        154,
    ),
}
