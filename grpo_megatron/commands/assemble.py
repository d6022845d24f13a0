"""Puts the processes of a run together from its configuration, and takes them down again; one way for every command."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.cluster.placement import Cluster, allocate
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.errors import ProcessLost
from grpo_megatron.megatron.spec import actor_spec
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.run.checkpoints import Checkpoints, actor_folder, newest_checkpoint, read_state
from grpo_megatron.run.folder import open_run_folder, take_back
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.monitor import Monitor, say
from grpo_megatron.run.turns import Turns
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint

# How long a run that failed may still take to complete its last checkpoint.
_RESCUE_SECONDS = 60.0

Result = TypeVar("Result")


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


@dataclass(frozen=True)
class Site:
    """What of a run outlives the loss of its trainer. directory: the run's folder. engines: None where the command or a replay needs
    none. checkpoint: the folder to begin from, None for a new run. started: by time.perf_counter."""

    config: Config
    command: str
    directory: str
    checkpoint: str | None
    cluster: Cluster
    engines: EnginePool | None
    guard: Guard
    started: float

    @property
    def logs(self) -> str:
        return f"{self.directory}/logs"

    @property
    def takes_turns(self) -> bool:
        """Whether the engines are on the ranks' devices."""
        return self.engines is not None and self.config.cluster.placement == Placement.colocated

    def last_checkpoint(self) -> str | None:
        """The folder to continue from after a failure: the newest of the run's own, else that which it began from."""
        return newest_checkpoint(f"{self.directory}/checkpoints") or self.checkpoint

    def recover(self) -> None:
        """After the loss of a process, and of all ranks with it: free the slots of what is left, and have engines that can go on.

        Raises UserError where a node is gone: no other one can take its place in this Ray cluster's placement.
        """
        self.cluster.must_be_whole()
        if self.engines:
            self.engines.recover(anew=self.takes_turns)


@contextmanager
def open_site(config: Config, command: str, guard: Guard | None = None) -> Iterator[Site]:
    """Within this context Ray is up, and engines start, if `command` (train or sft) generates.

    The configuration has passed preflight.start.check_start. Raises UserError for a checkpoint or a folder that is not
    right, before any process starts.
    """
    started, guard = time.perf_counter(), guard or Guard()
    state = read_state(config.run.resume, command)
    generates = command == "train" and not config.rollout.replay
    num_engines = config.rollout.engine.num_engines if generates else 0
    num_ranks = ParallelSizes.from_config(config.megatron).world_size
    with ExitStack() as cleanup:
        directory = open_run_folder(config, state["step"] if state else 0)
        guard.entered(directory, config.run.grace, config.run.grace_usr1)
        say(f"run folder {directory}; starting {num_ranks} trainer ranks and {num_engines} engines")
        if note := HFCheckpoint(config.model.path).note:
            say(note)
        cluster = allocate(config, num_ranks, num_engines, guard=guard)
        cleanup.callback(cluster.close)
        engines = None
        if generates:
            # Engines are slow to start: on devices of their own they do so while the ranks build the model.
            engines = EnginePool(
                cluster,
                config.rollout,
                config.model,
                # A resumed run must not draw the random numbers of its first steps again.
                seed=config.run.seed + 1000 * (state["step"] if state else 0),
                log_dir=f"{directory}/logs",
                routing=config.moe.routing_replay == RoutingReplay.engine,
                pause=config.weight_sync.pause,
                shared=config.cluster.placement == Placement.colocated,
            )
            cleanup.callback(engines.close)
        yield Site(config, command, directory, config.run.resume, cluster, engines, guard, started)


@contextmanager
def assemble(site: Site, checkpoint: str | None) -> Iterator[Run]:
    """Within this context the trainer's ranks are up, and the engines of the site ready. checkpoint: what they continue from."""
    config, engines = site.config, site.engines
    state = read_state(checkpoint, site.command)
    resumed = state["step"] if state else 0
    take_back(config, resumed)
    with ExitStack() as cleanup:
        monitor = Monitor(site.directory, config.run.total_steps, resumed)
        cleanup.callback(monitor.close)
        turns = None
        if site.takes_turns:
            # Their KV caches are as large as what they find free.
            engines.wait_until_ready()
            turns = Turns(engines, monitor)
            turns.release()
        spec = actor_spec(config, site.command)
        timeout = config.cluster.call_timeout
        trainer = PolicyTrainer(site.cluster, spec, config.megatron, config.run.seed, site.logs, timeout, site.takes_turns)
        cleanup.callback(trainer.close)
        if turns:
            turns.started(trainer)
        elif engines:
            engines.wait_until_ready()
        if state:
            trainer.load_checkpoint(actor_folder(checkpoint))
        monitor.say(f"everything is up after {time.perf_counter() - site.started:.1f} s")
        saving = config.checkpoint
        saver = Checkpoints(f"{site.directory}/checkpoints", saving.every, trainer, monitor.say, saving.async_save)
        try:
            yield Run(config, site.directory, monitor, saver, trainer, engines, turns, state, site.started)
        except BaseException:
            # Whatever failed, the state that ranks are still writing was sound; those that cannot are not waited for.
            with suppress(Exception):
                saver.finish(_RESCUE_SECONDS)
            raise


def persist(site: Site, attempt: Callable[[Site, str | None], Result]) -> Result:
    """attempt(site, checkpoint), and after the loss of a process once more, from the newest checkpoint; run.max_restarts times at most.

    A failure that is not the loss of a process would happen again, so it ends the run.
    """
    checkpoint, restarts = site.checkpoint, 0
    while True:
        try:
            return attempt(site, checkpoint)
        except ProcessLost as error:
            site.guard.stop.must_not_be_made(site.directory)
            if restarts == site.config.run.max_restarts:
                raise
            restarts += 1
            checkpoint = site.last_checkpoint()
            say(f"{error}\nrestart {restarts} of at most {site.config.run.max_restarts}, from {checkpoint or 'the beginning'}")
            site.recover()
