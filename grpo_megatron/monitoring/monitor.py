"""The monitor: it passes a run's metrics, samples and messages to files, TensorBoard and the terminal."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from grpo_megatron.batch.sample import with_texts_here
from grpo_megatron.config.keys import default_of, nested_yaml
from grpo_megatron.config.load import flat, known_keys
from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.listener import Listener
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.monitoring.run_files import RunFiles
from grpo_megatron.monitoring.samples import TrainedOn, chosen, distributions, group_text
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.tensorboard import TensorBoard
from grpo_megatron.monitoring.terminal import Terminal
from grpo_megatron.monitoring.throughput import Throughput
from grpo_megatron.monitoring.timeline import DRIVER, Timeline
from grpo_megatron.monitoring.trajectories import ShownTrajectory

logger = logging.getLogger(__name__)

_MIB, _GIB = 2**20, 2**30


class Monitor:
    """Passes a run's metrics and texts to listeners, and updates status.json, timeline.json and the terminal.

    A listener is an object that records metrics and texts. TensorBoard and the run's files (metrics.jsonl,
    texts.jsonl) always are listeners. If a listener cannot write, for example because the disk is full, the
    user is told once, and the run goes on.
    """

    def __init__(
        self,
        directory: str,
        config: Config,
        status: StatusFile,
        resumed: int = 0,
        throughput: Throughput | None = None,
        listeners: Sequence[Listener] = (),
    ):
        """Prepare to measure the start of a run. No file changes before `open`, except for status.json.

        directory: the run's folder
        status: status.json, which the monitor updates but does not close
        resumed: step of the checkpoint that the run continues from; 0 for a new run
        throughput: computes tokens/s and idle shares; None: these are not measured
        listeners: further receivers of metrics, such as Weights & Biases, which the monitor does not close
        """
        self.directory, self.tensorboard_dir = directory, f"{directory}/tensorboard"
        self._options, self._throughput, self._resumed = config.monitor, throughput, resumed
        self._clock = _Clock()
        self._failed: set[str] = set()
        self._step_started = (0.0, 0.0)
        self._process = psutil.Process()
        self._settings = flat(config)
        self._files: RunFiles | None = None
        self._own: list[Listener] = []
        self._listeners = [*listeners]
        self.terminal = Terminal(config.run.total_steps, resumed)
        self.timeline = Timeline(directory, self._options.timeline_mib * _MIB, resumed)
        self.status = status
        self.status.note(step=resumed)
        self.phases = Phases(self._phase_begun, self._phase_ended)

    def open(self) -> None:
        """Open the files in the run's folder, and pass the configuration to the listeners as a text.

        Curves, texts and timeline of steps after the checkpoint are removed. Therefore call this method only
        after the ranks have loaded the checkpoint. The phases until then are written to the timeline.
        """
        self._files = RunFiles(self.directory, self._resumed)
        curves = TensorBoard(self.tensorboard_dir, self._resumed, _hyperparameters(self._settings))
        self._own = [self._files, curves]
        self._listeners = [*self._own, *self._listeners]
        self.timeline.open()
        self._tell("text", 0, "configuration", nested_yaml(self._settings, {}))

    def start_step(self, step: int) -> None:
        with self._clock:
            self.phases.take()
            self.terminal.start_step()
            self.timeline.step = step
        self._step_started = (time.time(), time.perf_counter())

    def finish_step(self, step: int, scalars: dict[str, float], trained_on: TrainedOn) -> dict[str, float]:
        """End a step: add times, throughput and memory to its scalars, and pass them to the listeners.

        Samples and histograms are passed to the listeners too, if they are due in this step. status.json,
        timeline.json and the progress bar are updated.

        scalars: {name: value} of the step.
        trained_on: the sequences that the step trained on.

        Returns a copy of `scalars` with the added values.
        """
        wall, start = self._step_started
        seconds = time.perf_counter() - start
        with self._clock:
            phases = self.phases.take()
            scalars = dict(scalars)
            scalars.update({f"time/{name}": value for name, value in phases.items()})
            scalars["time/step"] = seconds
            scalars["time/other"] = seconds - sum(phases.values())
            scalars["time/monitor"] = self._clock.take() + self.status.take_seconds()
            if self._throughput:
                # Engines that sample ahead work beside the driver's phases.
                sampling = scalars.get("rollout/sampling_seconds", phases.get("generate", 0.0))
                scalars |= self._throughput.scalars(trained_on, seconds, phases | {"generate": sampling})
            scalars["memory/driver_gib"] = self._process.memory_info().rss / _GIB
            scalars["memory/host_available_gib"] = psutil.virtual_memory().available / _GIB
            self.timeline.add_step(wall, seconds)
            self.terminal.finish_step(step)
            self.status.note(step=step, metrics=scalars, metrics_step=step, eta=self.terminal.eta)
            self._tell("scalars", step, scalars)
            self._show(step, trained_on)
            self._flush()
        return scalars

    def _show(self, step: int, trained_on: TrainedOn) -> None:
        """Pass samples (as text) and histograms to the listeners, if they are due in this step.

        monitor.samples_every and monitor.histograms_every set the intervals, in steps.
        """
        options = self._options
        if self.shows_samples(step):
            for index, group in enumerate(with_texts_here(chosen(trained_on.groups, options.sample_groups))):
                self._tell("text", step, f"samples/{index}", group_text(group, options.sample_characters))
        if options.histograms_every and step % options.histograms_every == 0:
            for name, values in distributions(trained_on).items():
                self._tell("histogram", step, name, values)

    def shows_samples(self, step: int) -> bool:
        """Return True if samples of a step are shown (monitor.samples_every)."""
        every = self._options.samples_every
        return bool(every) and step % every == 0

    def trajectories(self, step: int, make: Callable[[], list[ShownTrajectory]]) -> None:
        """Write trajectories of a step to texts.jsonl, from which the report shows them as trees.

        Other listeners do not get them, because they can show texts only.

        make: returns the trajectories. Its errors do not end the run.
        """
        with self._clock, self._survived(self._files):
            for shown in make():
                self._files.trajectory(step, shown)

    def line(self, step: int, scalars: dict[str, float]) -> None:
        """Show one line about a step on the terminal. scalars: the value that `finish_step` returned."""
        with self._clock:
            self.terminal.line(step, scalars)

    def logged(self, step: int, scalars: dict[str, float]) -> None:
        """Pass scalars of a user's own loop to the listeners and status.json, with the times of its phases.

        The times are those since the last call.

        step: number of the step under which the scalars are logged.
        """
        with self._clock:
            times = {f"time/{name}": seconds for name, seconds in self.phases.take().items()}
            self.status.note(step=step, metrics=times | scalars, metrics_step=step)
            self._tell("scalars", step, times | scalars)
            self._flush()

    def evaluated(self, step: int, scalars: dict[str, float]) -> None:
        """Pass the scores of an evaluation to the listeners and status.json, and log them.

        step: number of training steps that were made before the evaluation.
        scalars: {name: score}.
        """
        with self._clock:
            self._tell("scalars", step, scalars)
            self.status.note(evaluation=scalars, evaluation_step=step)
            results = ", ".join(
                f"{name.removeprefix('eval/')} {value:.3f}" for name, value in scalars.items()
            )
            logger.info(f"evaluation after {step} steps: {results}")
            self._flush()

    def text(self, step: int, name: str, text: str) -> None:
        with self._clock:
            self._tell("text", step, name, text)

    def close(self) -> None:
        for listener in self._own:
            with self._survived(listener):
                listener.close()
        with self._survived(self.timeline):
            self.timeline.close()
        self.terminal.close()

    def _phase_begun(self, name: str) -> None:
        with self._clock:
            self.status.phase(name)
            self.terminal.phase(name)

    def _phase_ended(self, name: str, start: float, seconds: float) -> None:
        with self._clock:
            self.timeline.add(DRIVER, name, start, seconds)
            self.status.phase("between phases")

    def _tell(self, what: str, *arguments: Any) -> None:
        for listener in self._listeners:
            with self._survived(listener):
                getattr(listener, what)(*arguments)

    def _flush(self) -> None:
        with self._survived(self.timeline):
            self.timeline.flush()

    @contextmanager
    def _survived(self, receiver: object) -> Iterator[None]:
        """Catch every Exception in the `with` block, so that an error of a receiver does not end the run.

        receiver: the listener or timeline that the block calls. The first error of each class of receivers is
            shown as a warning; later errors are not shown.
        """
        try:
            yield
        except Exception as error:
            name = type(receiver).__name__
            if name not in self._failed:
                self._failed.add(name)
                logger.warning(
                    f"{name} has lost some data of this run: {type(error).__name__}: {error}; the run "
                    "continues"
                )


def _hyperparameters(values: dict[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the configuration values that differ from their defaults, for TensorBoard's table of runs.

    Values of types that TensorBoard does not accept are converted to text.

    values: {key: value} of the whole configuration.
    """
    known = known_keys()
    changed = {key: value for key, value in values.items() if value != default_of(known[key])}
    return {
        key: value if type(value) in (bool, int, float, str) else str(value) for key, value in changed.items()
    }


class _Clock:
    """Stopwatch for the time that the monitor's own work takes. All this work is done inside `with clock`.

    Only the thread that created the clock counts, because other threads do not slow down a step. The time of
    nested `with` blocks counts once.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth, self._start, self._seconds = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._start

    def take(self) -> float:
        """Return the seconds spent in `with` blocks that have ended since the last call of this method."""
        taken, self._seconds = self._seconds, 0.0
        return taken
