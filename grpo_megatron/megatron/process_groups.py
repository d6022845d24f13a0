"""Process groups of the parallel layout, and this process's rank in each of them."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_megatron.cluster.gloo import share_device
from grpo_megatron.model.parallel_sizes import ParallelSizes


@dataclass(frozen=True)
class RankInfo:
    """Global rank of this process, and its rank in each process group of the parallel layout."""

    rank: int
    """Global rank."""
    pid: int
    """Process id."""
    tp_rank: int
    """Rank in the tensor-parallel group."""
    pp_rank: int
    """Pipeline stage, from 0."""
    dp_rank: int
    """Index of this process's data-parallel replica, from 0."""
    cp_rank: int
    """Rank in the context-parallel group."""
    ep_rank: int
    """Rank in the expert-parallel group."""
    etp_rank: int
    """Rank in the tensor-parallel group of the experts."""
    expert_dp_rank: int
    """Rank in the expert-data-parallel group, whose ranks hold the same experts."""
    last_stage: bool
    """True on the last pipeline stage."""

    @property
    def reports(self) -> bool:
        """True if this rank returns its data-parallel replica's results. One rank of each replica does so."""
        return self.last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def in_first_replica(self) -> bool:
        """True if this rank is in the replica that exports the dense weights. Other replicas hold copies."""
        return self.dp_rank == 0 and self.cp_rank == 0

    @property
    def in_first_expert_replica(self) -> bool:
        """True if this rank is in the expert replica that exports experts. Other replicas hold copies."""
        return self.expert_dp_rank == 0

    def __str__(self):
        return (
            f"rank {self.rank} (tp{self.tp_rank} pp{self.pp_rank} cp{self.cp_rank} dp{self.dp_rank} "
            f"ep{self.ep_rank})"
        )


def initialize(
    sizes: ParallelSizes, rank: int, rendezvous: dist.Store | str, seed: int, timeout_seconds: float = 600.0
) -> RankInfo:
    """Create the process groups of torch.distributed and Megatron, and seed Megatron.

    The backend is NCCL with CUDA, otherwise gloo. The call blocks until every rank has joined.

    sizes: sizes of the parallel layout.
    rank: global rank of this process.
    rendezvous: means by which the ranks find each other: a key-value store, or a torch init_method such as
        file://PATH.
    seed: seed of Megatron's random number generators.
    timeout_seconds: maximum number of seconds that a collective operation may take.

    Returns the rank of this process in each group.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    cuda = torch.cuda.is_available()
    if not cuda:
        share_device()
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        **({"init_method": rendezvous} if isinstance(rendezvous, str) else {"store": rendezvous}),
        rank=rank,
        world_size=sizes.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        # CPU groups beside NCCL's are needed only for the distributed optimizer's legacy checkpoints.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
    )
    # Ranks that hold different parts of tensor-parallel layers or of experts get different seeds for them.
    model_parallel_cuda_manual_seed(seed)
    return rank_info()


def local_device() -> torch.device:
    """Return this process's GPU, or the CPU if there is no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_info() -> RankInfo:
    from megatron.core import parallel_state as mpu

    return RankInfo(
        rank=dist.get_rank(),
        pid=os.getpid(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        expert_dp_rank=mpu.get_expert_data_parallel_rank(),
        last_stage=mpu.is_pipeline_last_stage(),
    )


def destroy() -> None:
    """Destroy all process groups, so that this process can call `initialize` again with another layout."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
