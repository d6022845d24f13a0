"""Training checkpoints: saves and restores weights, optimizer, schedule, reference and random states.

A run with any parallel layout can read a checkpoint that any other layout has written.
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
    """Saves and loads one rank's part of training checkpoints. Only one checkpoint is written at a time."""

    def __init__(self, model: TrainedModel):
        self._model = model

    def _content(self) -> tuple:
        model = self._model
        return [ddp.module for ddp in model.ddp], model.optimizer, model.reference

    def begin(self, folder: str) -> None:
        """Start writing the current weights, optimizer state, learning-rate state and random states.

        All ranks must call this. A thread writes the files. The checkpoint is complete when `finish` has
        returned. Until then, training may go on: methods that change a tensor first wait until the thread has
        read it. With optimizer.offload, `begin` itself waits until the thread has read all tensors.

        Reference weights are written too if `reset_reference` has replaced them by the policy's.

        folder: folder to write. It is the same on all ranks.

        Raises RuntimeError if the previous checkpoint has not been finished.
        """
        model = self._model
        if model.writer:
            raise RuntimeError("the previous checkpoint is not finished: call finish first")
        with model.settled_weights(), model.memory.optimizer_at_hand():
            model.writer = save(folder, *self._content())
            if model.config.optimizer.offload:
                model.until_saved()

    def written(self) -> bool:
        """Return True if this rank writes no checkpoint now: none was begun, or writing has ended.

        Writing may have ended with an error, which `finish` raises.
        """
        return self._model.writer is None or self._model.writer.done()

    def finish(self) -> SaveReport:
        """Wait until the checkpoint that `begin` started is on disk. Return the report on this rank's files.

        All ranks must call this. They may call it while device memory is freed (RankMemory.sleep).

        Raises NotWritten on all ranks if any rank could not write its file, or if rank 0 could not write the
        metadata. The message names these ranks.
        """
        writer, self._model.writer = self._model.writer, None
        return writer.finish()

    def verify(self, folder: str, files: dict[str, FileRecord]) -> None:
        """Raise DamagedCheckpoint if a checkpoint's files are damaged. Call this on all ranks before `load`.

        Raises another UserError if a file cannot be read, because the checkpoint may then be intact.

        files: {file name: recorded size and checksum of the file}.
        """
        checkpoint_files.verify(folder, files)

    def load(self, folder: str, moments: bool = True) -> None:
        """Restore weights, optimizer state and learning-rate state from a checkpoint.

        moments: if False, Adam begins anew: its moments are 0.

        All ranks must call this. Random states are restored too if the parallel layout is the same. Reference
        weights are restored if the checkpoint has them, which is the case if `reset_reference` had replaced
        them before the checkpoint was written.

        Raises UserError if the checkpoint is of another model, damaged, has only weights, or has other LoRA
        adapters.
        """
        self._model.until_saved()
        with self._model.settled_weights(), self._model.memory.optimizer_at_hand():
            load(folder, *self._content())
            if not moments:
                self._model.optimizer.forget()


def save(folder: str, chunks, optimizer, reference: ReferenceWeights | None = None) -> Writer:
    """Start writing this rank's part of a checkpoint. Return the Writer, whose `finish` the caller must call.

    All ranks must call this.

    folder: folder to write. The caller should rename it after `finish`, so that a crash leaves no
        half-written checkpoint under the final name.
    chunks: model chunks of this rank.
    optimizer: Optimizer of these chunks. Random states are saved with its state. None: save only weights.
    reference: reference weights. They are saved only if they have changed since they were first loaded. None:
        there are none.
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
    """Restore the weights of a checkpoint that any parallel layout has written, and optionally the optimizer.

    All ranks must call this.

    chunks: model chunks of this rank, which are filled in place.
    optimizer: Optimizer whose state and learning-rate schedule are restored. Random states are then restored
        too, if the parallel layout is the same. None: restore only weights.
    reference: reference weights, which are restored if an optimizer is given and the checkpoint has any.

    Raises UserError if the checkpoint is of another model or damaged. With an optimizer, raises UserError
    also if the checkpoint has no optimizer state, or if its LoRA adapters differ from the model's.
    """
    shards, objects = sharded_model(chunks)
    pieces = weight_pieces(shards, writing=False)
    if optimizer is not None:
        common = read_common(folder)
        if "optimizer_steps" not in common:
            raise UserError(
                f"a run cannot continue from {folder}, which has only weights or is from an older version; "
                "choose another checkpoint"
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


def _serialised(value) -> bytes:
    """Return a value that is not a tensor, such as random states, as bytes in the format of torch.save.

    Megatron stores such a value as a list with one item, so this function does the same.
    """
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def _deserialised(buffer: io.BytesIO):
    # With weights_only, torch runs no code from the file. TransformerEngine's state is bytes in a BytesIO.
    with torch.serialization.safe_globals([io.BytesIO]):
        return torch.load(buffer, weights_only=True)[0]


def _fill_optimizer_state(optimizer) -> None:
    """Create Adam's moments, as zeros, if the optimizer has taken no step yet.

    Saving a checkpoint reads these tensors, and loading one fills them.
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
