"""Sizes of the parallel groups, and the process groups themselves."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelSizes:
    """How the trainer's ranks are divided; everything else is derived from these.

    tp, pp, dp, cp: tensor, pipeline, data and context parallel; their product is the world. vpp:
    model chunks per pipeline stage, which the interleaved schedule alternates between. ep, etp:
    expert and expert-tensor parallel; experts are laid over the same ranks in their own way.
    pipeline_layers: layers of each of the pp * vpp chunks in forward order; None: equally many.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    pipeline_layers: tuple[int, ...] | None = None

    @classmethod
    def from_config(cls, megatron) -> "ParallelSizes":
        """megatron: config.schema.MegatronConfig."""
        return cls(
            tp=megatron.tensor_parallel,
            pp=megatron.pipeline_parallel,
            dp=megatron.data_parallel,
            cp=megatron.context_parallel,
            sequence_parallel=megatron.sequence_parallel,
            vpp=megatron.virtual_pipeline,
            ep=megatron.expert_parallel,
            etp=megatron.expert_tensor_parallel,
            pipeline_layers=tuple(megatron.pipeline_layers) if megatron.pipeline_layers else None,
        )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def num_chunks(self) -> int:
        """Model chunks over all stages."""
        return self.pp * self.vpp

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of a replica must be a multiple of this."""
        return self.pp if self.vpp > 1 else 1

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each model chunk in forward order; chunk i is on stage i % pp."""
        return self.pipeline_layers or (num_layers // self.num_chunks,) * self.num_chunks

    def violations(self, arch=None) -> list[str]:
        """Every rule this layout breaks, each as one sentence; `arch`: the model's Architecture."""
        found = []
        for name in ("tp", "pp", "dp", "cp", "vpp", "ep", "etp"):
            if getattr(self, name) < 1:
                found.append(f"megatron: {name} must be at least 1, is {getattr(self, name)}")
        if found:
            return found
        if self.sequence_parallel and self.tp == 1:
            found.append("megatron.sequence_parallel=true needs megatron.tensor_parallel > 1")
        if self.vpp > 1 and self.pp == 1:
            found.append(f"megatron.virtual_pipeline={self.vpp} needs megatron.pipeline_parallel > 1")
        if self.pipeline_layers and (len(self.pipeline_layers) != self.num_chunks or min(self.pipeline_layers) < 1):
            found.append(
                f"megatron.pipeline_layers={list(self.pipeline_layers)} must be {self.num_chunks} positive numbers: the layers of "
                "each of pipeline_parallel * virtual_pipeline model chunks, in forward order"
            )
        stage = self.tp * self.cp * self.dp
        if stage % (self.ep * self.etp):
            found.append(
                f"megatron.expert_parallel * expert_tensor_parallel = {self.ep * self.etp} does not divide the {stage} ranks of a "
                "pipeline stage (tensor_parallel * context_parallel * data_parallel)"
            )
        return found if arch is None else found + self._dense_violations(arch) + self._expert_violations(arch)

    def _dense_violations(self, arch) -> list[str]:
        found = []
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
        if self.pipeline_layers:
            if sum(self.pipeline_layers) != arch.num_layers:
                found.append(
                    f"megatron.pipeline_layers={list(self.pipeline_layers)} are {sum(self.pipeline_layers)} layers, "
                    f"the model has {arch.num_layers}"
                )
        elif arch.num_layers % self.num_chunks:
            chunks = f"megatron.pipeline_parallel={self.pp}"
            if self.vpp > 1:
                chunks += f" times megatron.virtual_pipeline={self.vpp}"
            found.append(
                f"{chunks} does not divide the model's {arch.num_layers} layers; megatron.pipeline_layers can name an uneven split"
            )
        return found

    def _expert_violations(self, arch) -> list[str]:
        if arch.moe is None:
            asked = {"expert_parallel": self.ep, "expert_tensor_parallel": self.etp}
            return [f"megatron.{key}={n} needs a model with experts, this one is dense" for key, n in asked.items() if n > 1]
        found = []
        if arch.moe.num_experts % self.ep:
            found.append(f"megatron.expert_parallel={self.ep} does not divide the model's {arch.moe.num_experts} experts")
        if arch.moe.ffn_hidden_size % self.etp:
            found.append(
                f"megatron.expert_tensor_parallel={self.etp} does not divide the experts' intermediate size "
                f"{arch.moe.ffn_hidden_size}"
            )
        if self.tp > 1 and not self.sequence_parallel:
            found.append("a model with experts and megatron.tensor_parallel > 1 needs megatron.sequence_parallel=true")
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
    ep_rank: int
    etp_rank: int
    expert_dp_rank: int
    last_stage: bool

    @property
    def reports(self) -> bool:
        """True on the one rank per data-parallel replica whose results are handed out."""
        return self.last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def in_first_replica(self) -> bool:
        """True on the ranks that dense weights are taken from; the other replicas hold the same."""
        return self.dp_rank == 0 and self.cp_rank == 0

    @property
    def in_first_expert_replica(self) -> bool:
        """The same for the experts' weights."""
        return self.expert_dp_rank == 0

    def __str__(self):
        return f"rank {self.rank} (tp{self.tp_rank} pp{self.pp_rank} cp{self.cp_rank} dp{self.dp_rank} ep{self.ep_rank})"


def initialize(sizes: ParallelSizes, rank: int, init_method: str, seed: int, timeout_seconds: float = 600.0) -> RankInfo:
    """Create all process groups; NCCL with CUDA, gloo without. Blocks until every rank is here."""
    from megatron.core import parallel_state as mpu

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
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        # Only the distributed optimizer's legacy checkpoints need CPU groups beside NCCL's.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
    )
    set_seed(seed)
    return rank_info()


def set_seed(seed: int) -> None:
    """Seed Megatron's random number states, which differ between ranks as the layout demands."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)


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
    """Undo `initialize`, so that the same process can join another layout (the tests do)."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
