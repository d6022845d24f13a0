"""Entry point of a trainer rank's process: joins the process groups and builds the Actor."""

import gc

from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.cluster.store import StoreAddress
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.model.parallel_sizes import ParallelSizes


def start_actor(config: Config, command: Command, rank: int, store: StoreAddress, heartbeat: Heartbeat):
    """Join the process groups and build this rank's Actor. All ranks must call this.

    The driver sends this function to the process of every rank. With megatron.emulate_kernels, the function
    first installs the emulation of TransformerEngine's kernels, which replaces the GPU kernels on a CPU.

    command: kind of run, which decides what models the Actor holds.
    rank: global rank of this process.
    store: address of the key-value store through which the ranks find each other.
    heartbeat: reports the progress of this process to the driver's hang detector.

    Returns (Actor, RankInfo): this rank of the trained model, and this process's rank in each process group.
    """
    # Megatron is imported here, not at the top of the file, so that the driver can send this function to a
    # rank without loading Megatron itself. Garbage collection is off during the import. It would take a
    # fifth of the import's time and free nothing, because imported modules stay in memory.
    gc.disable()
    if config.megatron.emulate_kernels:
        from grpo_megatron.megatron.without_gpu import emulation

        emulation.install()
    from grpo_megatron.megatron import process_groups
    from grpo_megatron.megatron.actor import Actor

    gc.enable()
    sizes, timeout = ParallelSizes.from_config(config.megatron), config.megatron.collective_timeout
    info = process_groups.initialize(sizes, rank, store.connect(timeout), config.run.seed, timeout)
    return Actor(config, command, heartbeat), info
