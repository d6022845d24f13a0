"""Puts the processes of a run together from its configuration, and takes them down again; one way for every command."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.megatron.spec import actor_spec
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.run.checkpoints import Checkpoints, actor_folder, read_state
from grpo_megatron.run.folder import open_run_folder
from grpo_megatron.run.monitor import Monitor
from grpo_megatron.run.turns import Turns
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint

# How long a run that failed may still take to complete its last checkpoint.
_RESCUE_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """The parts of a run, up and ready. engines: None where the command or a replay needs none. turns: with engines on the
    trainer's devices. state: of the checkpoint that the run continues, which the trainer has loaded; None for a new run."""

    config: Config
    directory: str
    monitor: Monitor
    saver: Checkpoints
    trainer: PolicyTrainer
    engines: EnginePool | None
    turns: Turns | None
    state: dict | None
    started: float

    @property
    def resumed(self) -> int:
        """The step that the run continues after; 0 for a new run."""
        return self.state["step"] if self.state else 0

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Complete the last checkpoint, and export the model if so configured.

        Returns the result with where everything is and how long it took, as result.json has it.
        """
        self.saver.finish()
        if self.config.checkpoint.export_hf:
            result["model"] = f"{self.directory}/hf"
            if self.turns:
                self.turns.to_ranks()
            self.trainer.save_hf(result["model"])
        result["phases"] = self.monitor.phases.total
        result["run_dir"], result["tensorboard"] = self.directory, self.monitor.tensorboard_dir
        result["wall_seconds"] = time.perf_counter() - self.started
        Path(f"{self.directory}/result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        return result


@contextmanager
def assemble(config: Config, command: str) -> Iterator[Run]:
    """Within this context the trainer's ranks, and the engines if `command` (train or sft) generates, are up.

    The configuration has passed preflight.start.check_start. Raises UserError for a checkpoint or a folder that is not
    right, before any process starts.
    """
    started = time.perf_counter()
    state = read_state(config.run.resume, command)
    resumed = state["step"] if state else 0
    generates = command == "train" and not config.rollout.replay
    num_engines = config.rollout.engine.num_engines if generates else 0
    num_ranks = ParallelSizes.from_config(config.megatron).world_size
    with ExitStack() as cleanup:
        directory = open_run_folder(config, resumed)
        logs = f"{directory}/logs"
        monitor = Monitor(directory, config.run.total_steps, resumed)
        cleanup.callback(monitor.close)
        monitor.say(f"run folder {directory}; starting {num_ranks} trainer ranks and {num_engines} engines")
        if note := HFCheckpoint(config.model.path).note:
            monitor.say(note)
        cluster = allocate(config, num_ranks, num_engines)
        cleanup.callback(cluster.close)
        engines = turns = None
        if generates:
            shared = config.cluster.placement == Placement.colocated
            # A resumed run must not draw the random numbers of its first steps again.
            seed = config.run.seed + 1000 * resumed
            routing = config.moe.routing_replay == RoutingReplay.engine
            # Engines are slow to start: on devices of their own they do so while the ranks build the model.
            engines = EnginePool(cluster, config.rollout, config.model, seed, logs, routing, config.weight_sync.pause, shared)
            cleanup.callback(engines.close)
            if shared:
                # Their KV caches are as large as what they find free.
                engines.wait_until_ready()
                turns = Turns(engines, monitor)
                turns.release()
        spec = actor_spec(config, command)
        timeout, takes_turns = config.cluster.call_timeout, turns is not None
        trainer = PolicyTrainer(cluster, spec, config.megatron, config.run.seed, logs, timeout, takes_turns)
        cleanup.callback(trainer.close)
        if turns:
            turns.started(trainer)
        elif engines:
            engines.wait_until_ready()
        if state:
            trainer.load_checkpoint(actor_folder(config.run.resume))
        monitor.say(f"everything is up after {time.perf_counter() - started:.1f} s")
        saving = config.checkpoint
        saver = Checkpoints(f"{directory}/checkpoints", saving.every, trainer, monitor.say, saving.async_save)
        try:
            yield Run(config, directory, monitor, saver, trainer, engines, turns, state, started)
        except BaseException:
            # Whatever failed, the state that ranks are still writing was sound; those that cannot are not waited for.
            with suppress(Exception):
                saver.finish(_RESCUE_SECONDS)
            raise
