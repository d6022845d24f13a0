"""Sizes of the parallel groups, and the process groups themselves."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelSizes:
    """How the trainer's ranks are divided; everything else is derived from these."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    @classmethod
    def from_config(cls, megatron) -> "ParallelSizes":
        """megatron: config.schema.MegatronConfig."""
        return cls(
            tp=megatron.tensor_parallel,
            pp=megatron.pipeline_parallel,
            dp=megatron.data_parallel,
            cp=megatron.context_parallel,
            sequence_parallel=megatron.sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def violations(self, arch=None) -> list[str]:
        """Every rule this layout breaks, each as one sentence; `arch`: the model's Architecture."""
        found = []
        for name in ("tp", "pp", "dp", "cp"):
            if getattr(self, name) < 1:
                found.append(f"megatron: {name} must be at least 1, is {getattr(self, name)}")
        if found:
            return found
        if self.cp > 1:
            found.append(f"megatron.context_parallel={self.cp}: context parallelism is not supported yet, use 1")
        if self.sequence_parallel and self.tp == 1:
            found.append("megatron.sequence_parallel=true needs megatron.tensor_parallel > 1")
        if arch is None:
            return found
        if arch.num_heads % self.tp:
            found.append(f"megatron.tensor_parallel={self.tp} does not divide the model's {arch.num_heads} attention heads")
        if arch.num_kv_heads % self.tp and self.tp % arch.num_kv_heads:
            found.append(
                f"megatron.tensor_parallel={self.tp} and the model's {arch.num_kv_heads} KV heads: one must divide the other"
            )
        qkv_rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        if qkv_rows % self.tp:
            found.append(f"megatron.tensor_parallel={self.tp} does not divide the model's {qkv_rows} rows of Q, K and V")
        if arch.ffn_hidden_size % self.tp:
            found.append(
                f"megatron.tensor_parallel={self.tp} does not divide the model's intermediate size {arch.ffn_hidden_size}"
            )
        if self.sequence_parallel and arch.hidden_size % self.tp:
            found.append(f"megatron.tensor_parallel={self.tp} does not divide the model's hidden size {arch.hidden_size}")
        if arch.num_layers % self.pp:
            found.append(f"megatron.pipeline_parallel={self.pp} does not divide the model's {arch.num_layers} layers")
        return found


@dataclass(frozen=True)
class RankInfo:
    """This process's place in the layout."""

    rank: int
    pid: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    first_stage: bool
    last_stage: bool

    @property
    def reports(self) -> bool:
        """True on the one rank per data-parallel replica whose results are handed out."""
        return self.last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def in_first_replica(self) -> bool:
        """True on the ranks that weights are taken from; the other replicas hold the same."""
        return self.dp_rank == 0 and self.cp_rank == 0

    def __str__(self):
        return f"rank {self.rank} (tp{self.tp_rank} pp{self.pp_rank} dp{self.dp_rank})"


def initialize(sizes: ParallelSizes, rank: int, init_method: str, seed: int, timeout_seconds: float = 600.0) -> RankInfo:
    """Create all process groups; NCCL with CUDA, gloo without. Blocks until every rank is here."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    cuda = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=sizes.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        # Only the distributed optimizer's legacy checkpoints need CPU groups beside NCCL's.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
    )
    model_parallel_cuda_manual_seed(seed)
    return rank_info()


def rank_info() -> RankInfo:
    from megatron.core import parallel_state as mpu

    return RankInfo(
        rank=dist.get_rank(),
        pid=os.getpid(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        first_stage=mpu.is_pipeline_first_stage(),
        last_stage=mpu.is_pipeline_last_stage(),
    )


def destroy() -> None:
    """Undo `initialize`, so that the same process can join another layout (the tests do)."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
