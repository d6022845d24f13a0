"""TrainerCheckpoints: saves and loads the trainer's part of a checkpoint, on all ranks together."""

from grpo_megatron.run.checkpoints import SaveReport
from grpo_megatron.run.manifest import FileRecord
from grpo_megatron.trainer.ranks import RankGroup
from grpo_megatron.trainer.weights import TrainerWeights


class TrainerCheckpoints:
    """Saves and loads weights, optimizer state and learning-rate state of all trainer ranks.

    A checkpoint is written in the background, between `begin_checkpoint` and `finish_checkpoint`.
    """

    def __init__(self, ranks: RankGroup, weights: TrainerWeights):
        self._ranks, self._weights = ranks, weights

    def begin_checkpoint(self, folder: str) -> None:
        """Start writing a checkpoint in the background. Training may go on in the meantime.

        `finish_checkpoint` must be called later. When that call returns, the checkpoint is complete.

        folder: folder of the checkpoint.

        Raises UserError if a weight is NaN or infinite, because a broken checkpoint must not replace a good
        one. Nothing is written in this case.
        """
        self._weights.must_be_finite()
        self._ranks.call_alike("checkpoints.begin", folder)

    def checkpoint_written(self) -> bool:
        """Return True if all ranks have written their checkpoint files, or if no checkpoint is in progress.

        If the result is True, `finish_checkpoint` need not wait for the files. This method does not wake
        sleeping ranks.
        """
        return all(self._ranks.group.call("checkpoints.written"))

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport:
        """Wait until all ranks have written their checkpoint files. Return a report on the checkpoint.

        The report has the times of the slowest rank, and the bytes and files of all ranks together. This
        method does not wake sleeping ranks.

        timeout: maximum number of seconds to wait. None: cluster.call_timeout.

        Raises NotWritten if a rank could not write its file.
        """
        reports = self._ranks.group.call("checkpoints.finish", timeout=timeout)
        files = {name: record for report in reports for name, record in report.files.items()}
        seconds, waited = max(r.seconds for r in reports), max(r.waited for r in reports)
        return SaveReport(seconds, waited, sum(r.bytes for r in reports), files)

    def load_checkpoint(self, folder: str, files: dict[str, FileRecord], moments: bool = True) -> None:
        """Check the files of a checkpoint, and then load the checkpoint into all ranks.

        folder: folder of the checkpoint.
        files: {file name: size and checksum of the file when it was written}.
        moments: if False, Adam begins anew: its moments are 0.

        Raises DamagedCheckpoint, which names the file, if a file differs from its record. In this case,
        nothing is loaded.
        """
        self._ranks.call_alike("checkpoints.verify", folder, files)
        self._ranks.call_alike("checkpoints.load", folder, moments)
