"""What a process does to become a rank of the trainer."""

import gc

from grpo_megatron.megatron.spec import ActorSpec


def start_actor(spec: ActorSpec, seed: int, threads: int, timeout: float, rank: int, address: str):
    """Join the process groups and build the model; returns (Actor, RankInfo). Collective over all ranks.

    threads: intra-op threads on a machine without a GPU. timeout: of a collective, in seconds. address: host:port on
    which rank 0 listens.
    """
    # Here and not above: whoever sends this function to another process need not load Megatron. What is imported stays:
    # garbage collections meanwhile find nothing, and take a fifth of the time.
    gc.disable()
    import torch

    if spec.emulate_kernels:
        from grpo_megatron.megatron import emulation

        emulation.install()
    from grpo_megatron.megatron import process_groups
    from grpo_megatron.megatron.actor import Actor

    gc.enable()
    if not torch.cuda.is_available():
        torch.set_num_threads(threads)
    info = process_groups.initialize(spec.sizes, rank, f"tcp://{address}", seed, timeout)
    return Actor(spec), info
