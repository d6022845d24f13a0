"""RankMemory frees the device memory of a rank while rollout engines use the device."""

from grpo_megatron.cluster.memory import occupied
from grpo_megatron.megatron.memory.parking import return_to_system
from grpo_megatron.megatron.memory.training import Bytes
from grpo_megatron.megatron.micro_batch import PreparedStore
from grpo_megatron.megatron.trained_model import TrainedModel


class RankMemory:
    """Frees and restores the device memory of one rank, for rollout engines that share its device."""

    def __init__(self, model: TrainedModel, prepared: PreparedStore):
        self._model, self._prepared = model, prepared

    def make_room(self) -> None:
        """Free the prepared micro-batches of the training step, and caches of torch and TransformerEngine.

        Call this after the step's last training pass and before a weight sync, in which engines need the
        memory. Recorded experts and the reference's hidden states are lost. All else is made again when it is
        needed.
        """
        self._prepared.clear()
        self._model.memory.drop_caches()
        return_to_system()

    def sleep(self) -> dict[str, Bytes]:
        """Free the device memory of weights, gradients and optimizer states until `wake`.

        All ranks must call this. Rollout engines use the memory in the meantime. Until `wake`, only the
        methods `written` and `finish` of RankCheckpoints may be called, which end the writing of a
        checkpoint.

        Returns the memory in use before and after: {"before": {kind: bytes}, "asleep": {kind: bytes}}. The
        kinds are "parameters", "gradients", "optimizer", "fp8_casts" (FP8 copies of the weights), and
        "occupied" for all memory of this process.
        """
        model = self._model
        report = {"before": model.memory.resident() | {"occupied": occupied()}}
        with model.settled_weights():
            pass  # waits for values that are still arriving from other replicas
        model.until_saved()
        self.make_room()
        model.memory.sleep()
        return report | {"asleep": model.memory.resident() | {"occupied": occupied()}}

    def wake(self) -> None:
        """Bring weights, gradients and optimizer states back after `sleep`. All ranks must call this."""
        self._model.memory.wake()
