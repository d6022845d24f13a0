"""TrainerCheckpoints: the trainer's part of a checkpoint, which all ranks write and read together."""

from grpo_megatron.run.checkpoints import SaveReport
from grpo_megatron.run.manifest import FileRecord
from grpo_megatron.trainer.ranks import RankGroup
from grpo_megatron.trainer.weights import TrainerWeights


class TrainerCheckpoints:
    """Saves and loads weights, optimizer states and learning-rate state of all ranks."""

    def __init__(self, ranks: RankGroup, weights: TrainerWeights):
        self._ranks, self._weights = ranks, weights

    def begin_checkpoint(self, folder: str) -> None:
        """Start writing a checkpoint in the background. Training may go on in the meantime.

        The checkpoint is complete when `finish_checkpoint` has returned; the caller must call that.
        Raises UserError if the weights are not finite.
        """
        self._weights.must_be_finite()  # a broken checkpoint must not replace a good one
        self._ranks.call_alike("checkpoints.begin", folder)

    def checkpoint_written(self) -> bool:
        """Return True if the files of all ranks are written, or if no checkpoint is in progress.

        `finish_checkpoint` then returns quickly. This method does not wake sleeping ranks.
        """
        return all(self._ranks.group.call("checkpoints.written"))

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport:
        """Wait until the files of all ranks are complete. This method does not wake sleeping ranks.

        timeout: maximum number of seconds to wait. None: the timeout of other calls to the ranks.
        Returns a report with the times of the slowest rank, and the bytes and files of all ranks together.
        Raises NotWritten if a rank could not write its file.
        """
        reports = self._ranks.group.call("checkpoints.finish", timeout=timeout)
        files = {name: record for report in reports for name, record in report.files.items()}
        seconds, waited = max(r.seconds for r in reports), max(r.waited for r in reports)
        return SaveReport(seconds, waited, sum(r.bytes for r in reports), files)

    def load_checkpoint(self, folder: str, files: dict[str, FileRecord]) -> None:
        """Check the files of a checkpoint, then load the checkpoint into all ranks.

        files: {file name: recorded size and checksum of the file}.
        Raises DamagedCheckpoint, naming the file, if a file differs from its record. Nothing is loaded then.
        """
        self._ranks.call_alike("checkpoints.verify", folder, files)
        self._ranks.call_alike("checkpoints.load", folder)
