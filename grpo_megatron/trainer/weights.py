"""TrainerWeights: checks, sends and exports the trained weights, which all ranks hold together."""

from grpo_megatron.cluster.processes import Calls, Process
from grpo_megatron.errors import UserError
from grpo_megatron.trainer.ranks import RankGroup
from grpo_megatron.weights.sync.messages import SyncCommand


class TrainerWeights:
    """Handle on the trained model's current weights, which are sharded over the ranks.

    last_step: index of the last training step that changed the weights; None if no step has changed them
        since they were loaded
    """

    def __init__(self, ranks: RankGroup):
        self._ranks = ranks
        self.last_step: int | None = None

    @property
    def processes(self) -> list[Process]:
        return self._ranks.processes

    def must_be_finite(self) -> None:
        """Raise UserError if a weight of the model is NaN or infinite.

        Training cannot recover from such a weight.
        """
        found = dict(zip(self.processes, self._ranks.awake().call("weights.broken"), strict=True))
        broken = [(process.name, name) for process, names in found.items() for name in names]
        if broken:
            since = (
                "since they were loaded"
                if self.last_step is None
                else f"since the optimizer step of step {self.last_step}"
            )
            raise UserError(
                f"{len(broken)} parameters contain NaN or infinity {since}, such as {broken[0][1]} on "
                f"{broken[0][0]}; continue from an earlier checkpoint with a lower optimizer.lr or "
                "optimizer.clip_grad, or start from an intact model"
            )

    def scale(self, factor: float, share: float = 1.0) -> None:
        """Multiply all weights by `factor`. The self-test then checks that changed weights reach the engines.

        The next optimizer step undoes the multiplication, because the optimizer's master weights do not
        change.

        share: fraction of the elements to multiply, chosen at random. If it is below 1, data-parallel
            replicas have different weights afterwards, so do not train with them.
        """
        self._ranks.call_alike("weights.scale", factor, share)

    def send_weights(self, command: SyncCommand) -> Calls:
        """Start a weight sync: every rank sends its share of the weights to the engines.

        Returns the calls to the ranks without waiting. The result of each is the rank's SyncReport.

        command: describes the weight sync to the ranks.
        """
        return self._ranks.awake().submit("weights.send", command)

    def save_hf(self, folder: str) -> None:
        """Write the current weights to `folder` as a Hugging Face checkpoint.

        Raises UserError if a weight is NaN or infinite.
        """
        self.must_be_finite()
        self._ranks.call_alike("weights.save_hf", folder)
