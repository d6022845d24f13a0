"""Actor checkpoints: Megatron's distributed format, readable in any layout."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu

from grpo_megatron.megatron import lora


def _metadata() -> dict:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }


def _weights(chunks) -> dict:
    """Sharded state of each model chunk; the shards' names are global, whatever the chunk."""
    return {f"model{i}": chunk.sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(chunks)}


def _load_weights(chunks, state: dict) -> None:
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"])


def _state(chunks, optimizer, loading: bool) -> dict:
    weights = _weights(chunks)
    return {
        **weights,
        "optimizer": optimizer.inner.sharded_state_dict(weights, is_loading=loading, metadata=_metadata()),
        "scheduler": optimizer.scheduler.state_dict(),
        "lora": lora.description(chunks),
    }


def save(folder: str, chunks, optimizer) -> None:
    """Collective over all ranks. `folder` is written as is; rename it into place afterwards."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_state(chunks, optimizer, loading=False), folder)


def load(folder: str, chunks, optimizer) -> None:
    """Collective; the layout may be another than the one that saved."""
    lora.check_checkpoint(folder, chunks)
    _fill_optimizer_state(optimizer)
    state = dist_checkpointing.load(_state(chunks, optimizer, loading=True), folder)
    _load_weights(chunks, state)
    optimizer.inner.load_state_dict(state["optimizer"])
    optimizer.load_scheduler(state["scheduler"])


def save_weights(folder: str, chunks) -> None:
    """The model part of `save` alone."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_weights(chunks), folder)


def load_weights(folder: str, chunks) -> None:
    """The model's weights out of what `save` or `save_weights` wrote."""
    lora.check_checkpoint(folder, chunks)
    _load_weights(chunks, dist_checkpointing.load(_weights(chunks), folder))


def _fill_optimizer_state(optimizer) -> None:
    """Adam creates its moments at the first step; loading needs tensors to load into."""
    for chained in optimizer.parts():
        adam = chained.optimizer
        for group in adam.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter].update(
                        exp_avg=torch.zeros_like(parameter, dtype=torch.float32),
                        exp_avg_sq=torch.zeros_like(parameter, dtype=torch.float32),
                    )
