"""GRPO runs that others have published with their layouts, as configurations of this program.

NeMo-RL: github.com/NVIDIA-NeMo/RL, examples/configs/recipes/llm/performance of release 0.4
(grpo-qwen3-30ba3b-4n8g, grpo-qwen3-235b-16n8g, grpo-deepseek-v3-32n8g), with the measured steps of
docs/about/performance-summary.md. MLPerf Training v6.1's benchmark of GRPO:
github.com/NVIDIA-NeMo/RL/pull/3364 (its base recipe recomputes layers), with the times in
github.com/mlcommons/training, llm_post_training/rcp_logs: means of six runs without their first steps.

They differ from our configurations in two ways. Their gradients are in bf16. And their gradients and moments
are kept on the host while weights go to the engines, for which optimizer.offload stands here.
"""

from dataclasses import dataclass

QWEN35_397B = "configs/models/qwen3.5-397b-a17b"
# 64 nodes of four GB300: 16 train with TP4 PP2 EP32 and packs of 65,536 tokens in bf16, 48 generate with
# engines of TP8 EP8, one step ahead; groups of 16 samples.
MLPERF = (
    "data.train=prompts.jsonl",
    "cluster.placement=separate",
    "cluster.gpu=gb300",
    "cluster.nodes=64",
    "cluster.gpus_per_node=4",
    "rollout.n=16",
    "rollout.staleness=1",
    "data.max_prompt_length=4096",
    "rollout.max_response_length=61440",
    "train.max_tokens_per_micro_batch=65536",
    "train.constant_length_packs=true",
    "megatron.tensor_parallel=4",
    "megatron.sequence_parallel=true",
    "megatron.pipeline_parallel=2",
    "megatron.expert_parallel=32",
    "megatron.data_parallel=8",
    "megatron.distributed_optimizer=true",
    "megatron.overlap=true",
    "megatron.recompute=full",
    "rollout.engine.num_engines=24",
    "rollout.engine.tensor_parallel=8",
    "rollout.engine.expert_parallel=8",
)
# Samples of a step: seconds of a step, seconds of its training, mean tokens of a sample that have a loss.
MLPERF_STEPS = {256: (421, 69, 5852), 512: (617, 128, 5694), 1024: (975, 243, 5697)}


@dataclass(frozen=True)
class Published:
    """A published run.

    model: its model in configs/models.
    settings: key=value arguments.
    sequence: mean tokens of a prompt and its response.
    step: measured seconds.
    """

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
