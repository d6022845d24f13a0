"""Training checkpoints: saves and restores weights, optimizer, schedule, reference and random states.

Any parallel layout can read a checkpoint of any other.
"""

import io
import time

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.layers import lora
from grpo_megatron.megatron.state import checkpoint_files, rng
from grpo_megatron.megatron.state.checkpoint_files import Writer, read, read_common
from grpo_megatron.megatron.state.reference import ReferenceWeights
from grpo_megatron.megatron.state.shards import optimizer_pieces, sharded_model, weight_pieces
from grpo_megatron.megatron.trained_model import TrainedModel
from grpo_megatron.run.checkpoints import SaveReport
from grpo_megatron.run.manifest import FileRecord

# Prefix of the names of the reference's weights.
_REFERENCE = "reference."


class RankCheckpoints:
    """Training checkpoints of one rank. At most one is being written at a time."""

    def __init__(self, model: TrainedModel):
        self._model = model

    def _content(self) -> tuple:
        model = self._model
        return [ddp.module for ddp in model.ddp], model.optimizer, model.reference

    def begin(self, folder: str) -> None:
        """Start writing weights, optimizer and learning-rate state as they are now. Collective.

        A thread writes them while other methods may be called. Methods that change what is still to be
        written wait for the thread. The checkpoint is complete when `finish` has returned.
        """
        model = self._model
        if model.writer:
            raise RuntimeError("the previous checkpoint is not finished: call finish first")
        with model.settled_weights(), model.memory.optimizer_at_hand():
            model.writer = save(folder, *self._content())
            if model.config.optimizer.offload:
                model.until_saved()

    def written(self) -> bool:
        """Return True if this rank has written its file, or no checkpoint is in progress."""
        return self._model.writer is None or self._model.writer.done()

    def finish(self) -> SaveReport:
        """Wait until the checkpoint of `begin` is on disk. Collective. May be called while asleep.

        Raises NotWritten on all ranks if any rank could not write. The message names these ranks.
        """
        writer, self._model.writer = self._model.writer, None
        return writer.finish()

    def verify(self, folder: str, files: dict[str, FileRecord]) -> None:
        """Check a checkpoint's files before `load`. Collective. Raises DamagedCheckpoint.

        files: {file name: its recorded size and checksum}.
        """
        checkpoint_files.verify(folder, files)

    def load(self, folder: str) -> None:
        """Restore weights, optimizer, learning-rate state, and a reference that was reset. Collective."""
        self._model.until_saved()
        with self._model.settled_weights(), self._model.memory.optimizer_at_hand():
            load(folder, *self._content())


def save(folder: str, chunks, optimizer, reference: ReferenceWeights | None = None) -> Writer:
    """Start writing a checkpoint on all ranks. The caller must call `finish` of the returned Writer.

    folder: folder to write. The caller renames it when all writers have finished, so that a crash leaves no
        half-written checkpoint under the final name.
    chunks: model chunks of this rank.
    optimizer: None: save the weights only.
    reference: its weights are saved too if they are no longer those of the HF checkpoint in the
        configuration.
    """
    begun = time.perf_counter()
    shards, objects = sharded_model(chunks)
    everything = (item for own in objects for item in own.values())
    own_objects = {item.unique_key: _serialised(item.data) for item in everything if not any(item.replica_id)}
    weights, states, common = weight_pieces(shards, writing=True), [], {}
    stores_reference = reference is not None and not reference.is_initial
    if stores_reference:
        weights += weight_pieces(shards, True, _REFERENCE, reference.held_value)
    if optimizer is not None:
        own_objects[rng.name()] = _serialised(rng.take())
        _fill_optimizer_state(optimizer)
        states = optimizer_pieces(shards, optimizer, writing=True)
        steps = [
            group["step"]
            for part in optimizer.parts()
            for group in part.optimizer.param_groups
            if "step" in group
        ]
        common = {
            "optimizer_steps": int(max(steps)),
            "scheduler": optimizer.scheduler.state_dict(),
            "lora": lora.description(chunks),
            "reference": stores_reference,
        }
    return Writer(folder, weights, states, own_objects, common, begun)


def load(folder: str, chunks, optimizer, reference: ReferenceWeights | None = None) -> None:
    """Restore weights and, unless None, optimizer, learning-rate state and reference from a checkpoint.

    The checkpoint may come from a run with another parallel layout.
    Raises UserError if the checkpoint is of another model, or damaged. Raises UserError also if an optimizer
    is given and the checkpoint has only weights.
    """
    shards, objects = sharded_model(chunks)
    pieces = weight_pieces(shards, writing=False)
    if optimizer is not None:
        common = read_common(folder)
        if "optimizer_steps" not in common:
            raise UserError(
                f"{folder} has only weights, or is from an older version: a run cannot continue from it"
            )
        lora.check_checkpoint(folder, common.get("lora"), chunks)
        _fill_optimizer_state(optimizer)
        pieces += optimizer_pieces(shards, optimizer, writing=False)
        if reference is not None and common["reference"]:
            pieces += weight_pieces(shards, False, _REFERENCE, reference.held_value)
            reference.is_initial = False
    random_name = rng.name()
    found = read(
        folder, pieces, [item.unique_key for own in objects for item in own.values()], optional=[random_name]
    )
    for chunk, own in zip(chunks, objects, strict=True):
        extra = {name: _deserialised(found[item.unique_key]) for name, item in own.items()}
        chunk.load_state_dict(extra, strict=False)
    if optimizer is not None:
        for part in optimizer.parts():
            for group in part.optimizer.param_groups:
                group["step"] = common["optimizer_steps"]
        optimizer.load_scheduler(common["scheduler"])
        # In another layout the ranks keep the random states that they began with.
        if random_name in found:
            rng.restore(_deserialised(found[random_name]))


def save_weights(folder: str, chunks) -> None:
    """Save the model's weights only. The files are complete on return. Collective."""
    save(folder, chunks, None).finish()


def load_weights(folder: str, chunks) -> None:
    """Load the model's weights from what `save` or `save_weights` wrote."""
    load(folder, chunks, None)


def _serialised(value) -> bytes:
    """Serialise a value that is no tensor, such as TransformerEngine's FP8 scales, in Megatron's format."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def _deserialised(buffer: io.BytesIO):
    # weights_only runs no code of the file. TransformerEngine's state is bytes in a BytesIO.
    with torch.serialization.safe_globals([io.BytesIO]):
        return torch.load(buffer, weights_only=True)[0]


def _fill_optimizer_state(optimizer) -> None:
    """Create Adam's moments, which otherwise appear with the first step.

    A checkpoint needs these tensors to save from and to load into.
    """
    for chained in optimizer.parts():
        adam = chained.optimizer
        for group in adam.param_groups:
            group.setdefault("step", 0)
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter].update(
                        exp_avg=torch.zeros_like(parameter, dtype=torch.float32),
                        exp_avg_sq=torch.zeros_like(parameter, dtype=torch.float32),
                    )
