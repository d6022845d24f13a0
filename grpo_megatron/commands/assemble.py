"""Starts and ends the processes of a run. The commands train, sft, reward-model, eval and selftest use it.

`open_run` starts Ray and the engines, `assemble` starts the trainer's ranks, and `run_with_restarts` repeats
the attempt after the loss of a process.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.capabilities import peak_flops
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.invitation import invitation
from grpo_megatron.cluster.placement import Cluster, allocate
from grpo_megatron.commands.engines import start_engines
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.errors import ProcessLost
from grpo_megatron.files import json_text, replace_text
from grpo_megatron.model.families import read_architecture
from grpo_megatron.monitoring.listener import Listener
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.optional import listening
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.throughput import Throughput
from grpo_megatron.preflight.cluster_rules import num_processes
from grpo_megatron.rollout.sharing import DeviceSharing
from grpo_megatron.run.checkpoints import CHECKPOINTS, Checkpoints, NotWritten
from grpo_megatron.run.folder import open_run_folder, rewind_folder
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.run.manifest import DamagedCheckpoint
from grpo_megatron.run.resume import ANEW, AUTO, RESULT, Checkpoint, as_saved, differences, newest_checkpoint
from grpo_megatron.run.stop import StopRequest
from grpo_megatron.run.tokenizer_files import tokenizer_changes, tokenizer_digests
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint

logger = logging.getLogger(__name__)

# Time limit for a failed run to complete its last checkpoint.
_RESCUE_SECONDS = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Run:
    """The started processes of one attempt at a run, and the objects that its training loop works with.

    The function `assemble` yields it. After the loss of a process, the next attempt gets a new Run.
    """

    config: Config
    """Configuration of the run."""
    directory: str
    """The run's folder, as an absolute path."""
    monitor: Monitor
    """Receives metrics, timings and texts of the run, and passes them to files and the terminal."""
    saver: Checkpoints
    """Writes checkpoints."""
    trainer: PolicyTrainer
    """The trainer, with all its ranks started."""
    engines: EnginePool | None
    """The inference engines; None if the command needs none, or replays recorded rollouts."""
    sharing: DeviceSharing | None
    """Lets engines and ranks take turns on the same devices; None if engines have devices of their own."""
    state: dict | None
    """The driver process's state, from state.json of the loaded checkpoint; None for a new run."""
    started: float
    """Time at which the command started, by time.perf_counter."""
    command: Command
    """The command of this run, such as `train`."""

    @property
    def resumed(self) -> int:
        """Step of the checkpoint that the run continues from; 0 for a new run."""
        return self.state["step"] if self.state else 0

    def to_ranks(self) -> None:
        """Give the memory of shared devices to the trainer's ranks: the engines release it, the ranks wake.

        Does nothing if the engines have devices of their own, or if the ranks have the memory already.
        """
        if self.sharing:
            self.sharing.to_ranks()

    def loop(self, stop: StopRequest | None = None) -> StepLoop:
        """Return the step loop, which makes the steps, and evaluates and saves checkpoints between them.

        The loop continues from the run's checkpoint, if there is one.

        stop: request to stop, obeyed after the current step. None: the loop never stops early.
        """
        loop = StepLoop(self.config, self.saver, self.monitor, stop, self.to_ranks)
        if self.state:
            loop.load_state_dict(self.state)
        return loop

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write the final outputs of a run: the last checkpoint, the exported model, and result.json.

        The model is exported in Hugging Face format if checkpoint.export_hf is set.

        result: the command's own results. The paths of all outputs and the time taken are added to this dict.

        Returns `result`. Raises NotWritten if the last checkpoint could not be written. The model is exported
        even then, but result.json is not written.
        """
        failure = None
        try:
            self.saver.finish()
        except NotWritten as error:
            # The model takes a seventh of a checkpoint's size, so it may fit on a disk that is too full for a
            # checkpoint.
            failure = error
        if self.config.checkpoint.export_hf:
            result["model"] = f"{self.directory}/hf"
            self.to_ranks()
            with self.monitor.phases("export"):
                self.trainer.weights.save_hf(result["model"])
        if failure:
            exported = f"; the trained model is in {result['model']}" if "model" in result else ""
            raise NotWritten(f"{failure}{exported}") from failure
        result["command"] = self.command  # another command with the same run.name has its own work to do
        result["phases"] = self.monitor.phases.total
        result["run_dir"], result["tensorboard"] = self.directory, self.monitor.tensorboard_dir
        result["wall_seconds"] = time.perf_counter() - self.started
        replace_text(Path(self.directory, RESULT), json_text(result, indent=2))
        return result


@dataclass
class RunContext:
    """The part of a run that outlives a failed attempt: its folder, Ray connection, engines and guard.

    The function `open_run` yields it. After the loss of a process, the trainer's ranks start again, and the
    next attempt uses the same RunContext.
    """

    config: Config
    """Configuration of the run."""
    command: Command
    """The command of this run, such as `train`."""
    directory: str
    """The run's folder, as an absolute path."""
    status: StatusFile
    """The run's status.json, which is kept up to date until the run ends."""
    checkpoint: Checkpoint | None
    """The checkpoint to begin from; None for a new run."""
    cluster: Cluster
    """The connection to Ray, and the devices of all processes."""
    hang_detector: HangDetector
    """Reads the heartbeats of all processes, and ends processes that hang."""
    engines: EnginePool | None
    """The inference engines; None if the command needs none, or replays recorded rollouts."""
    guard: Guard
    """Receives requests to stop."""
    started: float
    """Time at which the command started, by time.perf_counter."""
    damaged: set[str] = field(default_factory=set)
    """Folders of checkpoints that the ranks found to be damaged."""
    listeners: Sequence[Listener] = ()
    """Further receivers of metrics, such as Weights & Biases, which monitor.listeners names."""
    begun: bool = False
    """True once an attempt has loaded its checkpoint. Checkpoints of later steps have then been renamed."""

    @property
    def logs(self) -> str:
        return f"{self.directory}/logs"

    @property
    def takes_turns(self) -> bool:
        """True if engines and trainer ranks share devices in this run, and therefore work in turns."""
        return self.engines is not None and self.config.cluster.placement == Placement.colocated

    def last_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint for the next attempt after a failure; None: start from the beginning.

        The result is the newest undamaged checkpoint in the run's folder. If run.resume names a checkpoint,
        only checkpoints of later steps count, and if there are none, the named checkpoint is the result.
        Raises DamagedCheckpoint if run.resume names no checkpoint, and all in the run's folder are damaged.
        """
        # If run.resume names a checkpoint, the earlier checkpoints in the run's own folder belong to another
        # training. So do the later checkpoints, until they have been set aside.
        named = self.checkpoint if self.config.run.resume not in (AUTO, *ANEW) else None
        if named and not self.begun:
            return named
        above = named.step if named else 0
        return newest_checkpoint(Path(self.directory, CHECKPOINTS), self.command, above, self.damaged, named)

    def recover(self) -> None:
        """Prepare the next attempt after the loss of a process: restart the engines that are not usable.

        If engines and ranks share devices, all engines are restarted. The next attempt waits for the engines.
        Raises ProcessLost if a node is gone, because Ray's placement group cannot use another node instead.
        """
        self.cluster.must_be_whole()
        if self.engines:
            self.engines.recover(anew=self.takes_turns)


@contextmanager
def open_run(
    config: Config,
    command: Command,
    guard: Guard | None = None,
    must_fit: Callable[[dict], str] = lambda state: "",
) -> Iterator[RunContext]:
    """Open the run's folder, start Ray, and start engines if `command` needs them. Yield the RunContext.

    At the end of the `with` block, the engines and Ray are ended. Raises UserError if the run's folder or the
    checkpoint cannot be used, if an external receiver of a new run's metrics (monitor.listeners) cannot
    start, or if the cluster has too few free devices.

    config: must have passed preflight.check.check_start.
    guard: receives requests to stop; None: the run is never asked to stop.
    must_fit: called with the driver's state from a checkpoint. It raises UserError if the state belongs to
        other data than the configured data, and otherwise returns a note for the user, or "".
    """
    started, guard = time.perf_counter(), guard or Guard()
    num_ranks, num_engines = num_processes(config, command)
    with ExitStack() as cleanup:
        directory, checkpoint = cleanup.enter_context(open_run_folder(config, command, must_fit))
        guard.entered(directory, config.run.grace, config.run.grace_usr1)
        guard.status = status = cleanup.enter_context(
            StatusFile(directory, config.run.name, config.run.total_steps)
        )
        for line in (
            [f"the run continues from {checkpoint}", *differences(checkpoint, config)] if checkpoint else []
        ):
            logger.info(line)
        if checkpoint and (changes := tokenizer_changes(checkpoint.state.get("tokenizer"), config)):
            logger.warning(changes)
        logger.info(f"run folder {directory}; starting {num_ranks} trainer ranks and {num_engines} engines")
        for note in HFCheckpoint(config.model.path).notes:
            logger.info(note)
        listeners = cleanup.enter_context(listening(config, directory, resumed=checkpoint is not None))
        cluster = cleanup.enter_context(allocate(config, num_ranks, num_engines, needs=guard.needs))
        cleanup.enter_context(invitation())
        hang_detector = HangDetector(
            f"{directory}/logs", config.cluster.hang_timeout, lambda work: status.note(processes=work)
        )
        engines = None
        if num_engines:
            # Engines are slow to start. On devices of their own, they start while the ranks build the model.
            step = checkpoint.step if checkpoint else 0
            engines = start_engines(config, command, cluster, hang_detector, f"{directory}/logs", step)
            cleanup.callback(engines.close)
        yield RunContext(
            config,
            command,
            directory,
            status,
            checkpoint,
            cluster,
            hang_detector,
            engines,
            guard,
            started,
            listeners=listeners,
        )


def _throughput(context: RunContext) -> Throughput:
    """Create the object that computes tokens/s, FLOPs utilisation and idle shares for the run's monitor."""
    cluster = context.cluster
    return Throughput(
        cost=read_architecture(
            context.config.model.path, reward_model=context.command == Command.reward_model
        ).cost_model,
        ranks=len(cluster.rank_slots),
        engine_devices=sum(map(len, cluster.engine_slots)),
        shared=context.takes_turns,
        peak=peak_flops(context.config.cluster.gpu),
    )


@contextmanager
def assemble(context: RunContext, checkpoint: Checkpoint | None) -> Iterator[Run]:
    """Start the trainer's ranks, wait for the engines, and yield the Run for one attempt.

    When the ranks have loaded the checkpoint, and not before, the run's folder is reset to its state at the
    checkpoint (`rewind_folder`). At the end of the `with` block, the ranks are ended, but not the engines. If
    the block raises an error while a checkpoint is being written, the checkpoint gets a minute to be
    completed. Raises DamagedCheckpoint if the ranks find the checkpoint damaged.

    checkpoint: checkpoint that the ranks load; None: they begin with the weights in model.path.
    """
    config, engines = context.config, context.engines
    resumed = checkpoint.step if checkpoint else 0
    with ExitStack() as cleanup:
        monitor = Monitor(
            context.directory, config, context.status, resumed, _throughput(context), context.listeners
        )
        cleanup.callback(monitor.close)
        context.hang_detector.tell_spans(monitor.timeline.add)
        sharing = None
        if context.takes_turns:
            # Start the engines before the ranks, because the size of a KV cache depends on free memory.
            engines.wait_until_ready()
            sharing = DeviceSharing(engines, monitor)
            sharing.release()
        trainer = PolicyTrainer(
            context.cluster, config, context.command, context.logs, context.hang_detector, context.takes_turns
        )
        cleanup.callback(trainer.close)
        if sharing:
            sharing.started(trainer.ranks)
        elif engines:
            engines.wait_until_ready()
        if checkpoint:
            trainer.checkpoints.load_checkpoint(checkpoint.actor, checkpoint.files)
        rewind_folder(config, context.directory, checkpoint)
        monitor.open()
        context.begun = True
        logger.info(f"startup took {time.perf_counter() - context.started:.1f} s")
        about = {"config": as_saved(config), "tokenizer": tokenizer_digests(config)}
        folder = f"{context.directory}/{CHECKPOINTS}"
        saver = Checkpoints(folder, config.checkpoint, trainer.checkpoints, resumed, about)
        try:
            yield Run(
                config,
                context.directory,
                monitor,
                saver,
                trainer,
                engines,
                sharing,
                checkpoint.state if checkpoint else None,
                context.started,
                context.command,
            )
            context.hang_detector.flush()
        except BaseException:
            # A checkpoint that ranks are still writing is valid whatever failed. Do not wait for stuck ranks.
            with suppress(Exception):
                saver.finish(_RESCUE_SECONDS)
            raise


def run_with_restarts(
    context: RunContext, attempt: Callable[[RunContext, Checkpoint | None], Result]
) -> Result:
    """Call attempt(context, checkpoint) and return its result. After the loss of a process, call it again.

    The first call gets context.checkpoint. Each further call gets the newest checkpoint. After
    run.max_restarts further calls, the next loss of a process raises ProcessLost. If the ranks find a
    checkpoint damaged, the newest undamaged one is used, unless run.resume names the damaged checkpoint.
    Raises Stopped if a process is lost after a request to stop. Any other error of `attempt` is passed on,
    because it would occur again.
    """
    checkpoint, restarts = context.checkpoint, 0
    while True:
        try:
            with context.hang_detector:
                return attempt(context, checkpoint)
        except DamagedCheckpoint as error:
            if checkpoint is context.checkpoint and context.config.run.resume != AUTO:
                raise
            context.damaged.add(checkpoint.folder)
            logger.warning(f"skipped a checkpoint: {error}")
            checkpoint = context.last_checkpoint()
            logger.info(f"the run continues from {checkpoint}")
            context.recover()
        except ProcessLost as error:
            context.guard.stop.must_not_be_made(context.directory)
            if restarts == context.config.run.max_restarts:
                raise
            restarts += 1
            context.status.note(restarts=restarts)
            context.status.phase("restart")
            checkpoint = context.last_checkpoint()
            logger.warning(
                f"{error}\nrestart {restarts} of at most {context.config.run.max_restarts}, from "
                f"{checkpoint or 'the beginning'}"
            )
            context.recover()
