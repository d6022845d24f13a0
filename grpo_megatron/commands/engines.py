"""The start of the engines of a run."""

from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import syncs_adapters
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.sglang.pool import EnginePool


def start_engines(
    config: Config, command: Command, cluster: Cluster, hang_detector: HangDetector, log_dir: str, step: int
) -> EnginePool:
    """Start the engines of a run, and return their pool without waiting until they are ready.

    log_dir: folder for the engines' logs.
    step: step that the run resumes from, or 0. Its engines must not draw the random numbers of step 0 again.
    """
    return EnginePool(
        cluster,
        config.rollout,
        config.model,
        seed=config.run.seed + 1000 * step,
        log_dir=log_dir,
        hang_detector=hang_detector,
        routing=config.moe.routing_replay == RoutingReplay.engine,
        shared=config.cluster.placement == Placement.colocated,
        stops=command == Command.serve,  # a user's own loop chooses them with each call
        lora=config.megatron.lora if command.syncs and syncs_adapters(config) else None,
    )
