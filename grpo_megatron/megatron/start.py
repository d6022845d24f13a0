"""What a process does to become a rank of the trainer."""

import gc

from grpo_megatron.cluster.heart import Heart
from grpo_megatron.cluster.store import StoreAddress
from grpo_megatron.megatron.spec import ActorSpec


def start_actor(spec: ActorSpec, seed: int, timeout: float, rank: int, store: StoreAddress, heart: Heart):
    """Join the process groups and build the model; return (Actor, RankInfo). Collective over all ranks.

    timeout: seconds that a collective may take. store: where the ranks find each other. heart: of this process.
    """
    # Here and not above: whoever sends this function to another process need not load Megatron. What is imported stays:
    # garbage collections meanwhile find nothing, and take a fifth of the time.
    gc.disable()
    if spec.emulate_kernels:
        from grpo_megatron.megatron import emulation

        emulation.install()
    from grpo_megatron.megatron import process_groups
    from grpo_megatron.megatron.actor import Actor

    gc.enable()
    info = process_groups.initialize(spec.sizes, rank, store.connect(timeout), seed, timeout)
    return Actor(spec, heart), info
