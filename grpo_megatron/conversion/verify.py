"""Check that a Megatron checkpoint equals an HF checkpoint, by comparing all bits and both models' logits.

This is the work of tools/verify_checkpoint.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from grpo_megatron.conversion.listing import Described
from grpo_megatron.conversion.pool import Progress, run
from grpo_megatron.conversion.sources import (
    Buffer,
    Read,
    hf_reader,
    megatron_tensors,
    weights_folder,
)
from grpo_megatron.conversion.units import BUCKET_BYTES, file_bytes, filled
from grpo_megatron.errors import UserError
from grpo_megatron.files import read_object
from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.checkpoint_layout import rows_within
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint

LOGITS_BOUND = 1e-5  # largest allowed difference of float32 logits, relative to the largest magnitude
_LENGTHS = (48, 17)  # lengths of the sequences whose logits are compared


@dataclass
class _Comparer:
    """Job for worker processes: compare tensors of an HF and a Megatron checkpoint bit by bit.

    open_hf: opens the HF checkpoint, and returns the function that reads its tensors.
    open_megatron: opens the Megatron checkpoint, and returns the function that reads it by HF names.
    """

    open_hf: Callable[[], Read]
    open_megatron: Callable[[], Read]

    def start(self) -> None:
        self.read_hf, self.read_megatron = self.open_hf(), self.open_megatron()
        self.buffers = Buffer(), Buffer()

    def do(self, unit: list[Described], advance) -> list[str]:
        return [line for tensor in unit if (line := self._compare(tensor, advance))]

    def _compare(self, tensor: Described, advance) -> str | None:
        different, largest = 0, 0.0
        for start, shape in rows_within(tensor.shape, tensor.dtype.itemsize, BUCKET_BYTES // 2):
            ours, theirs = (buffer.tensor(shape, tensor.dtype) for buffer in self.buffers)
            self.read_megatron(tensor.name, start, ours)
            self.read_hf(tensor.name, start, theirs)
            advance(theirs.nbytes)
            if not torch.equal(_bits(ours), _bits(theirs)):
                different += int((_bits(ours) != _bits(theirs)).sum())
                largest = max(largest, float((ours.float() - theirs.float()).abs().max()))
        count = tensor.nbytes // tensor.dtype.itemsize
        return (
            f"{tensor.name}: {different} of {count} elements differ, by up to {largest:.3g}"
            if different
            else None
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor as integers, so that a NaN equals itself and -0 differs from 0."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    )


def different_bits(hf: str, megatron: str, processes: int) -> tuple[list[str], Progress]:
    """Compare all tensors of an HF checkpoint with those in a Megatron checkpoint bit by bit.

    Return (lines, progress). Nothing is written to disk.

    - lines: one line for each HF tensor whose values differ in the Megatron checkpoint.
    - progress: bytes read and seconds taken.

    hf: folder of the HF checkpoint.
    megatron: folder of the Megatron checkpoint.
    processes: maximum number of worker processes.

    Raises UserError if a checkpoint is damaged, incomplete or of another model.
    """
    from grpo_megatron.megatron.state.model_layout import saved_model

    arch, checkpoint = read_architecture(hf), HFCheckpoint(hf)
    entries = weight_map(arch)
    violations = checkpoint.violations(entries)
    if violations:
        raise UserError("; ".join(violations))
    source = megatron_tensors(weights_folder(megatron), saved_model(arch))
    tensors = [
        # A dequantised tensor is rounded to the model's dtype before it is written to Megatron's checkpoint.
        Described(name, shape, arch.dtype if checkpoint.is_fp8(name) else checkpoint.header(name)[1])
        for name, shape in hf_shapes(entries).items()
    ]
    total = sum(tensor.nbytes for tensor in tensors)
    units = [unit for unit, _ in filled(((tensor, tensor.nbytes) for tensor in tensors), file_bytes(total))]
    found: list[str] = []
    progress = run(
        _Comparer(partial(hf_reader, hf), source.open),
        units,
        processes,
        megatron,
        total,
        lambda _, lines: found.extend(lines),
    )
    return found, progress


def logits_difference(hf: str, megatron: str) -> tuple[float, float]:
    """Compare the logits of Megatron's model and transformers' model for random tokens, in float32.

    Return (largest absolute difference of logits, largest magnitude of transformers' logits). A reward model
    has one logit per token, the token's score. Both models are loaded completely, one after the other.

    hf: folder of the HF checkpoint, which transformers loads.
    megatron: folder of the Megatron checkpoint.
    """
    import transformers

    from grpo_megatron.megatron.state.logits import logits_of

    arch = read_architecture(hf)
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(arch.vocab_size, (length,), generator=random) for length in _LENGTHS]
    # Not by model_type, because transformers does not know Kimi-K2's.
    architecture = read_object(Path(hf) / "config.json")["architectures"][0]
    # transformers dequantises MXFP4 to bfloat16, whatever dtype is asked for.
    model = getattr(transformers, architecture).from_pretrained(hf, dtype=torch.float32).float()
    head = model.score if arch.scalar_head else model.lm_head
    with torch.no_grad():
        theirs = torch.cat(
            [head(model.eval().model(tokens[None]).last_hidden_state[0]) for tokens in sequences]
        )
    del model, head
    ours = logits_of(str(weights_folder(megatron).absolute()), arch, sequences)
    return float((ours - theirs).abs().max()), float(theirs.abs().max())
