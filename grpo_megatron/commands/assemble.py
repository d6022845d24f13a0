"""Puts the processes of a run together from its configuration, and takes them down again; one way for every command."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.capabilities import peak_flops
from grpo_megatron.cluster.placement import Cluster, allocate
from grpo_megatron.cluster.watch import Watch
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.errors import ProcessLost
from grpo_megatron.json_files import json_text
from grpo_megatron.megatron.spec import actor_spec
from grpo_megatron.model.families import read_architecture
from grpo_megatron.monitoring.listener import Listener
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.optional import listening
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.terminal import say
from grpo_megatron.monitoring.throughput import Throughput
from grpo_megatron.paths import replace_text
from grpo_megatron.preflight.cluster_rules import num_processes
from grpo_megatron.run.checkpoints import CHECKPOINTS, Checkpoints, NotWritten
from grpo_megatron.run.folder import open_run_folder, set_aside, take_back
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.manifest import DamagedCheckpoint
from grpo_megatron.run.resume import ANEW, AUTO, RESULT, Checkpoint, as_saved, differences, newest_checkpoint
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
    command: str

    @property
    def resumed(self) -> int:
        """The step that the run continues after; 0 for a new run."""
        return self.state["step"] if self.state else 0

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Complete the last checkpoint, and export the model if so configured.

        Returns the result with where everything is and how long it took, as result.json has it. Raises NotWritten if the last
        checkpoint could not be written; the export is there all the same.
        """
        failure = None
        try:
            self.saver.finish()
        except NotWritten as error:
            # The model takes a seventh of a checkpoint's room, which a disk that is too full for one may have.
            failure = error
        if self.config.checkpoint.export_hf:
            result["model"] = f"{self.directory}/hf"
            if self.turns:
                self.turns.to_ranks()
            with self.monitor.phases("export"):
                self.trainer.save_hf(result["model"])
        if failure:
            exported = f"; the trained model is in {result['model']}" if "model" in result else ""
            raise NotWritten(f"{failure}{exported}") from failure
        result["command"] = self.command  # another one of the same run.name has not done its work
        result["phases"] = self.monitor.phases.total
        result["run_dir"], result["tensorboard"] = self.directory, self.monitor.tensorboard_dir
        result["wall_seconds"] = time.perf_counter() - self.started
        replace_text(Path(self.directory, RESULT), json_text(result, indent=2))
        return result


@dataclass
class Site:
    """What of a run outlives the loss of its trainer. directory: the run's folder. status: of the run until its end. checkpoint: to
    begin from, None for a new run. watch: of all processes. engines: None where the command or a replay needs none. started: by
    time.perf_counter. damaged: folders of checkpoints that ranks found to be so. listeners: of monitor.listeners. begun: an attempt has
    loaded what it begins from, and set aside what is of another course."""

    config: Config
    command: str
    directory: str
    status: StatusFile
    checkpoint: Checkpoint | None
    cluster: Cluster
    watch: Watch
    engines: EnginePool | None
    guard: Guard
    started: float
    damaged: set[str] = field(default_factory=set)
    listeners: Sequence[Listener] = ()
    begun: bool = False

    @property
    def logs(self) -> str:
        return f"{self.directory}/logs"

    @property
    def takes_turns(self) -> bool:
        """Whether the engines are on the ranks' devices."""
        return self.engines is not None and self.config.cluster.placement == Placement.colocated

    def last_checkpoint(self) -> Checkpoint | None:
        """To continue from after a failure: the newest sound one of the run's own, else that which it began from."""
        # Of the run's own folder, earlier ones than that which run.resume names are of another course, and so are later ones
        # until they have been set aside.
        named = self.checkpoint if self.config.run.resume not in (AUTO, *ANEW) else None
        if named and not self.begun:
            return named
        above = named.step if named else 0
        return newest_checkpoint(
            Path(self.directory, CHECKPOINTS), self.command, say, above, self.damaged, named
        )

    def recover(self) -> None:
        """After the loss of a process, and of all ranks with it: free the slots of what is left, and have engines that can go on.

        Raises ProcessLost where a node is gone: no other one can take its place in this Ray cluster's placement.
        """
        self.cluster.must_be_whole()
        if self.engines:
            self.engines.recover(anew=self.takes_turns)


@contextmanager
def open_site(
    config: Config,
    command: str,
    guard: Guard | None = None,
    must_fit: Callable[[dict], str] = lambda state: "",
) -> Iterator[Site]:
    """Within this context Ray is up, and engines start, if `command` (see preflight.rule) generates.

    The configuration has passed preflight.start.check_start. must_fit: see open_run_folder. Raises UserError for a checkpoint or
    a folder that is not right, before any process starts.
    """
    started, guard = time.perf_counter(), guard or Guard()
    num_ranks, num_engines = num_processes(config, command)
    with ExitStack() as cleanup:
        directory, checkpoint = cleanup.enter_context(open_run_folder(config, command, say, must_fit))
        guard.entered(directory, config.run.grace, config.run.grace_usr1)
        guard.status = status = cleanup.enter_context(
            StatusFile(directory, config.run.name, config.run.total_steps)
        )
        for line in [f"continues from {checkpoint}", *differences(checkpoint, config)] if checkpoint else []:
            say(line)
        say(f"run folder {directory}; starting {num_ranks} trainer ranks and {num_engines} engines")
        for note in HFCheckpoint(config.model.path).notes:
            say(note)
        listeners = cleanup.enter_context(listening(config, directory, resumed=checkpoint is not None))
        cluster = cleanup.enter_context(allocate(config, num_ranks, num_engines, guard=guard))
        watch = Watch(
            f"{directory}/logs", config.cluster.hang_timeout, lambda work: status.note(processes=work)
        )
        engines = None
        if num_engines:
            # Engines are slow to start: on devices of their own they do so while the ranks build the model.
            engines = EnginePool(
                cluster,
                config.rollout,
                config.model,
                # A resumed run must not draw the random numbers of its first steps again.
                seed=config.run.seed + 1000 * (checkpoint.step if checkpoint else 0),
                log_dir=f"{directory}/logs",
                watch=watch,
                routing=config.moe.routing_replay == RoutingReplay.engine,
                pause=config.weight_sync.pause,
                shared=config.cluster.placement == Placement.colocated,
            )
            cleanup.callback(engines.close)
        yield Site(
            config,
            command,
            directory,
            status,
            checkpoint,
            cluster,
            watch,
            engines,
            guard,
            started,
            listeners=listeners,
        )


def _throughput(site: Site) -> Throughput:
    """By which the monitor knows what the run's tokens cost, and on how many devices."""
    cluster = site.cluster
    return Throughput(
        cost=read_architecture(
            site.config.model.path, reward_model=site.command == "reward-model"
        ).cost_model,
        ranks=len(cluster.rank_slots),
        engine_devices=sum(map(len, cluster.engine_slots)),
        shared=site.takes_turns,
        peak=peak_flops(site.config.cluster.gpu),
    )


@contextmanager
def assemble(site: Site, checkpoint: Checkpoint | None) -> Iterator[Run]:
    """Within this context the trainer's ranks are up, and the engines of the site ready. checkpoint: what they continue from.

    Raises DamagedCheckpoint where the ranks find it to be so.
    """
    config, engines = site.config, site.engines
    resumed = checkpoint.step if checkpoint else 0
    with ExitStack() as cleanup:
        monitor = Monitor(site.directory, config, site.status, resumed, _throughput(site), site.listeners)
        cleanup.callback(monitor.close)
        site.watch.tell_spans(monitor.timeline.add)
        turns = None
        if site.takes_turns:
            # Their KV caches are as large as what they find free.
            engines.wait_until_ready()
            turns = Turns(engines, monitor)
            turns.release()
        spec = actor_spec(config, site.command)
        timeout = config.cluster.call_timeout
        trainer = PolicyTrainer(
            site.cluster,
            spec,
            config.megatron,
            config.run.seed,
            site.logs,
            timeout,
            site.watch,
            site.takes_turns,
        )
        cleanup.callback(trainer.close)
        if turns:
            turns.started(trainer)
        elif engines:
            engines.wait_until_ready()
        if checkpoint:
            trainer.load_checkpoint(checkpoint.actor, checkpoint.files)
        set_aside(site.directory, checkpoint, say)
        take_back(site.directory, checkpoint, say)
        site.begun = True
        monitor.say(f"everything is up after {time.perf_counter() - site.started:.1f} s")
        about, folder = {"config": as_saved(config)}, f"{site.directory}/{CHECKPOINTS}"
        saver = Checkpoints(folder, config.checkpoint, trainer, monitor.say, resumed, about)
        state = checkpoint.state if checkpoint else None
        try:
            yield Run(
                config,
                site.directory,
                monitor,
                saver,
                trainer,
                engines,
                turns,
                state,
                site.started,
                site.command,
            )
            site.watch.flush()
        except BaseException:
            # Whatever failed, the state that ranks are still writing was sound; those that cannot are not waited for.
            with suppress(Exception):
                saver.finish(_RESCUE_SECONDS)
            raise


def persist(site: Site, attempt: Callable[[Site, Checkpoint | None], Result]) -> Result:
    """attempt(site, checkpoint), and after the loss of a process once more, from the newest checkpoint; run.max_restarts times at most.

    A checkpoint of the run's own that ranks find to be damaged is passed over. Any other failure would happen again, so it ends
    the run.
    """
    checkpoint, restarts = site.checkpoint, 0
    while True:
        try:
            with site.watch:
                return attempt(site, checkpoint)
        except DamagedCheckpoint as error:
            if checkpoint is site.checkpoint and site.config.run.resume != AUTO:
                raise
            site.damaged.add(checkpoint.folder)
            say(f"passed over: {error}")
            checkpoint = site.last_checkpoint()
            say(f"continues from {checkpoint}")
            site.recover()
        except ProcessLost as error:
            site.guard.stop.must_not_be_made(site.directory)
            if restarts == site.config.run.max_restarts:
                raise
            restarts += 1
            site.status.note(restarts=restarts)
            site.status.phase("restart")
            checkpoint = site.last_checkpoint()
            say(
                f"{error}\nrestart {restarts} of at most {site.config.run.max_restarts}, from {checkpoint or 'the beginning'}"
            )
            site.recover()
