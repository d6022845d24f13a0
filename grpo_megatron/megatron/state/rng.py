"""States of a rank's random number generators in a checkpoint, for resuming in the same parallel layout.

Training draws no random numbers as long as there is no dropout, but a plugin's loss may.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def name() -> str:
    """Return the name under which a checkpoint stores the states of this rank's random number generators.

    The name contains the parallel layout. A run with another layout does not find this name in the
    checkpoint, so it keeps the states with which it began.
    """
    tp, pp = mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    return f"random_states.tp{tp}.pp{pp}.{dist.get_rank()}_{dist.get_world_size()}"


def take() -> dict:
    """Return the states of this rank's random number generators."""
    states = {"torch": torch.get_rng_state(), "megatron": dict(get_cuda_rng_tracker().get_states())}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore(states: dict) -> None:
    """Set the random number generators to states that `take` returned."""
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
