"""TensorBoard's event files, with scalars, histograms, texts, and a layout of charts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from grpo_megatron.monitoring.charts import tensorboard_layout

# Number of events that may wait for the thread that writes them.
_QUEUE = 1000
# Seconds until the next attempt after a failure to write.
_AGAIN = 60.0


class TensorBoard:
    """A Listener that writes scalars, histograms and texts to TensorBoard's event files."""

    def __init__(self, directory: str, resumed: int, hyperparameters: dict[str, bool | int | float | str]):
        """Open an event file, and write the layout of charts and the hyperparameters to it.

        directory: folder of the event files
        resumed: step of the checkpoint that the run continues from; 0 for a new run. Later points of the
            curves are removed
        hyperparameters: {key: value} of the configuration, with which TensorBoard compares runs
        """
        self._directory, self._hyperparameters = directory, hyperparameters
        self._failed: float | None = None  # time.monotonic() when writing failed
        self._open(purge_step=resumed + 1 if resumed else 0)

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(self._directory, purge_step=purge_step, max_queue=_QUEUE)
        self._writer.add_custom_scalars(tensorboard_layout())
        # SummaryWriter.add_hparams would write them as a separate run below this one.
        for summary in hparams(
            self._hyperparameters,
            {"reward/mean": 0.0, "eval/greedy": 0.0, "throughput/tokens_per_second": 0.0},
        ):
            self._writer.file_writer.add_summary(summary)

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Enclose a write to the event file in a `with` block, and resume writing after a full disk.

        A SummaryWriter's thread ends at its first OSError, and every later write raises the error again. So a
        new SummaryWriter is opened before the block, if a write failed at least _AGAIN seconds ago. An
        OSError in the `with` block is passed on.

        step: step of the write. A new SummaryWriter removes the points of the curves from this step on.
        """
        try:
            if self._failed is not None and time.monotonic() - self._failed >= _AGAIN:
                self._failed = time.monotonic()
                self._open(purge_step=step)
                self._failed = None
            yield
        except OSError:
            if self._failed is None:
                self._failed = time.monotonic()
            raise

    def scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # Write one event for all scalars. The writer's thread takes few at a time, and add_scalar would wait
        # for it.
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        with self._writing(step):
            self._writer.file_writer.add_summary(summary, step)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        with self._writing(step):
            self._writer.add_histogram(name, values, step)

    def text(self, step: int, name: str, text: str) -> None:
        with self._writing(step):
            self._writer.add_text(name, verbatim(text), step)

    def close(self) -> None:
        self._writer.close()


def verbatim(text: str) -> str:
    """Turn a text into a Markdown block of code, which TensorBoard shows without any change."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    # Split at all characters that end a line in Markdown. Otherwise the indent would be missing after some of
    # them.
    return "".join(f"    {line}\n" for line in text.splitlines())
