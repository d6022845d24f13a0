"""Functions that the checkpoint tests run on each rank, and a reader for the written files."""

import contextlib
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_megatron.config.schema import CheckpointConfig
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.results import TrainResult
from grpo_megatron.megatron.state import checkpoint, checkpoint_files, shards
from grpo_megatron.run.checkpoints import Checkpoints, SaveReport
from grpo_megatron.run.manifest import DamagedCheckpoint
from tests.messages import logged
from tests.parallel.actors import micro_batches, reference_logprobs
from tests.parallel.optimizers import State, state_of, step


class Kept:
    """Stands in for a run's trainer in run.checkpoints.Checkpoints, with an actor of one rank."""

    def __init__(self, actor: Actor):
        self._checkpoints = actor.checkpoints
        self.begin_checkpoint, self.checkpoint_written = actor.checkpoints.begin, actor.checkpoints.written

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport:
        return self._checkpoints.finish()


class Outcome(NamedTuple):
    """One rank's state at the checkpoint and after the next step, and that step's result."""

    at: State
    after: State
    result: TrainResult | None


def _state(actor: Actor) -> State:
    with actor.model.memory.optimizer_at_hand():
        return state_of(actor)


@contextmanager
def _small_pieces():
    """Cut tiny tensors into several pieces within rows, as large ones are."""
    most, shards._MOST_ELEMENTS = shards._MOST_ELEMENTS, 500
    try:
        yield
    finally:
        shards._MOST_ELEMENTS = most


def save(config, batches, loss, folder) -> Outcome:
    """Do a step on each batch. The checkpoint is saved before the last one."""
    actor = Actor(config)
    for batch in batches[:-1]:
        step(actor, batch, loss)
    at = _state(actor)
    with _small_pieces():
        actor.checkpoints.begin(folder)
        actor.checkpoints.finish()
    result = step(actor, batches[-1], loss)
    return Outcome(at, _state(actor), result)


def resume(config, batch, loss, folder, again=None) -> Outcome:
    """Load the checkpoint and do a step.

    again: folder to save what was loaded, or None.
    """
    actor = Actor(config)
    actor.checkpoints.load(folder)
    at = _state(actor)
    if again:
        actor.checkpoints.begin(again)
        actor.checkpoints.finish()
    result = step(actor, batch, loss)
    return Outcome(at, _state(actor), result)


def save_while_training(config, batches, loss, folder, not_waiting=None) -> State:
    """Save slowly while the ranks train, use the reference and sleep.

    Return the state at the begin of the checkpoint.

    not_waiting: a planted fault, "weights" or "states". Code that changes these does not wait until they are
        read.
    """
    actor = Actor(config)
    step(actor, batches[0], loss)
    at = _state(actor)
    write, wait = torch.save, checkpoint_files.Writer.wait_until_read
    # On a busy machine the step begins late. What does not wait for the files must find them unwritten.
    longest = {None: 0.02, "weights": 0.1, "states": 1.0}[not_waiting]
    stepped = threading.Event()

    def slowly(value, file):
        stepped.wait(longest)
        write(value, file)

    def waits(writer, weights_only=False):
        if (not_waiting == "weights") != weights_only or not_waiting is None:
            wait(writer, weights_only)

    exchange = actor.model.reference.in_place

    @contextmanager
    def lasting():
        """Let the exchange last as long as a large model's, so that it overlaps with the writes of the
        checkpoint.
        """
        with exchange():
            time.sleep(0.3)
            yield

    actor.model.reference.in_place = lasting
    try:
        checkpoint_files.torch.save, checkpoint_files.Writer.wait_until_read = slowly, waits
        actor.checkpoints.begin(folder)
        assert not actor.checkpoints.written()
        parts = micro_batches(batches[1], config, actor.rank.dp_rank, packing=True)[1]
        reference_logprobs(actor, parts)
        if not_waiting is None:
            actor.memory.sleep()
            actor.memory.wake()
        step(actor, batches[1], loss)
        stepped.set()
        report = actor.checkpoints.finish()
    finally:
        checkpoint_files.torch.save, checkpoint_files.Writer.wait_until_read = write, wait
    assert 0 < report.waited < report.seconds + 1
    return at


def fail(config, batches, loss, folder) -> str:
    """Return the error of a checkpoint that cannot be written.

    Training goes on, and the next checkpoint is written.
    """
    actor = Actor(config)
    actor.checkpoints.begin(folder)
    step(actor, batches[0], loss)
    said = ""
    try:
        actor.checkpoints.finish()
    except UserError as error:
        said = str(error)
    actor.checkpoints.begin(f"{folder}-next")
    actor.checkpoints.finish()
    return said


def refusals(config, other, folder) -> list[str]:
    """Return the errors on loading a checkpoint of another model, one with only weights, and one without
    .metadata.
    """
    actor = Actor(config)
    folders = [f"{folder}/{name}" for name in ("other", "weights", "begun")]
    another = Actor(other)
    another.checkpoints.begin(folders[0])
    another.checkpoints.finish()
    checkpoint.save(folders[1], actor.model.chunks, None).finish()
    actor.checkpoints.begin(folders[2])
    actor.checkpoints.finish()
    Path(folders[2], ".metadata").unlink()
    said = []
    for name in folders:
        try:
            actor.checkpoints.load(name)
        except UserError as error:
            said.append(str(error))
    return said


def _state_of(step: int) -> dict:
    """Return the driver's state after a step of supervised training."""
    return {"step": step, "order": {}, "tokens": 0, "config": {}}


def save_as_a_run(config, batches, loss, folder) -> list[State]:
    """Save a checkpoint before each step, as a run does, and return the states."""
    actor, states = Actor(config), []
    saver = Checkpoints(folder, CheckpointConfig(every=1, async_save=False, keep=9), Kept(actor))
    for number, batch in enumerate(batches):
        states.append(_state(actor))
        saver.save(number, partial(_state_of, number))
        step(actor, batch, loss)
    return states


def save_to_a_full_disk(config, batches, loss, folder) -> tuple[list[str], State]:
    """Save before each step like a run, while another file fills the disk until the third.

    Return its output and last state.
    """
    actor, state = Actor(config), None
    root = Path(folder)
    saver = Checkpoints(
        f"{folder}/checkpoints", CheckpointConfig(every=1, async_save=False, keep=1), Kept(actor)
    )
    with logged() as said:
        for number, batch in enumerate(batches):
            if number == 1:
                with contextlib.suppress(OSError), open(root / "filler", "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            if number == 2:
                (root / "filler").unlink()
            state = _state(actor)
            saver.save(number, partial(_state_of, number))
            step(actor, batch, loss)
        saver.finish()
    return said, state


def damages(folders: list[tuple[str, dict]]) -> list[str]:
    """Return the result of verifying each (actor's folder, its files), "" if nothing is wrong."""
    found = []
    for folder, files in folders:
        try:
            checkpoint_files.verify(folder, files)
            found.append("")
        except DamagedCheckpoint as error:
            found.append(str(error))
    return found


class ResetOutcome(NamedTuple):
    """One rank's log-probs of the policy and of the reference, which was reset before the last step."""

    policy: np.ndarray | None
    reference: np.ndarray | None


def _logprobs(actor, config, batch) -> ResetOutcome:
    parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)[1]
    return ResetOutcome(actor.passes.logprobs(parts), reference_logprobs(actor, parts))


def save_after_reset(config, batches, loss, folder) -> ResetOutcome:
    """Reset the reference between two steps, and again while the checkpoint is slowly written."""
    actor = Actor(config)
    step(actor, batches[0], loss)
    actor.weights.reset_reference()
    step(actor, batches[1], loss)
    expected = _logprobs(actor, config, batches[2])
    write = torch.save

    def slowly(value, file):
        time.sleep(0.02)
        write(value, file)

    checkpoint_files.torch.save = slowly
    try:
        with _small_pieces():
            actor.checkpoints.begin(folder)
        actor.weights.reset_reference()
    finally:
        checkpoint_files.torch.save = write
    actor.checkpoints.finish()
    return expected


def resume_after_reset(config, batch, folder) -> ResetOutcome:
    actor = Actor(config)
    actor.checkpoints.load(folder)
    return _logprobs(actor, config, batch)


def random_numbers(config, folder, resumed: bool) -> list[float]:
    """Return the numbers that a rank draws after a checkpoint.

    resumed: True to draw them after loading, False in the process that saves.
    """
    actor = Actor(config)
    if resumed:
        actor.checkpoints.load(folder)
    else:
        torch.rand(3)
        with get_cuda_rng_tracker().fork():
            torch.rand(5)
        actor.checkpoints.begin(folder)
        actor.checkpoints.finish()
    with get_cuda_rng_tracker().fork():
        within = torch.rand(2)
    return [*torch.rand(2).tolist(), *within.tolist()]


def global_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, assembled from all ranks' files."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    pieces = [
        shards.Rectangle(
            name,
            tuple(tensor.size),
            (0,) * len(tensor.size),
            torch.empty(tensor.size, dtype=tensor.properties.dtype),
            False,
        )
        for name, tensor in described.items()
        if isinstance(tensor, TensorStorageMetadata)
    ]
    checkpoint_files.read(folder, pieces, [])
    return {piece.name: piece.data for piece in pieces}


def bytes_of_ranks(folder: str) -> list[int]:
    return [path.stat().st_size for path in sorted(Path(folder).glob("*.distcp"))]
