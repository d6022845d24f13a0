"""Only what changed since the last sync: exact, and compressed.

After a step of reinforcement learning at a small learning rate most bf16 weights are what they were. A payload says which elements
changed, one bit each, and their new values; both compressed. Where that would not be smaller, the whole parcel travels.
"""

import struct

import numpy as np
import torch
import zstandard

from grpo_megatron.weights.sync.parcels import Parcel

# Behind every payload: what it is, and for a delta the bytes of its compressed bits.
_FOOTER = struct.Struct("<qq")
_FULL, _DELTA = 0, 1
_LEVEL = 1


def max_payload(parcel: Parcel) -> int:
    """Bytes of the largest payload of a parcel."""
    return parcel.total_bytes + _FOOTER.size


def _elements(parcel: Parcel, buffer: torch.Tensor) -> np.ndarray:
    """The data as integers of the size of its smallest elements."""
    size = min(dtype.itemsize for dtype in parcel.dtypes)
    return (
        buffer[: parcel.data_bytes]
        .cpu()
        .numpy()
        .view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])
    )


class Encoder:
    """On the sender; keeps what it sent last, in the host's memory. sent_bytes: of all payloads since the last `begin`."""

    def __init__(self):
        self._sent: dict[tuple[str, int], np.ndarray] = {}
        self.sent_bytes = 0

    def begin(self, full: bool) -> None:
        """full: receivers do not have what was sent last."""
        self.sent_bytes = 0
        if full:
            self._sent.clear()

    def encode(self, parcel: Parcel, buffer: torch.Tensor) -> torch.Tensor:
        """The payload uint8 of a packed and sealed buffer, which has room for `max_payload`."""
        elements, key = _elements(parcel, buffer), (parcel.link.name, parcel.number)
        before = self._sent.get(key)
        self._sent[key] = elements.copy()
        payload = None if before is None else self._changes(parcel, buffer, elements, elements != before)
        if payload is None:
            end = max_payload(parcel)
            buffer[parcel.total_bytes : end] = torch.frombuffer(
                bytearray(_FOOTER.pack(_FULL, 0)), dtype=torch.uint8
            )
            payload = buffer[:end]
        self.sent_bytes += len(payload)
        return payload

    @staticmethod
    def _changes(
        parcel: Parcel, buffer: torch.Tensor, elements: np.ndarray, changed: np.ndarray
    ) -> torch.Tensor | None:
        """None if it is not smaller than the parcel."""
        if np.count_nonzero(changed) * elements.itemsize >= parcel.data_bytes:
            return None
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        bits = compressor.compress(np.packbits(changed).tobytes())
        values = compressor.compress(elements[changed].tobytes())
        if len(bits) + len(values) >= parcel.data_bytes:
            return None
        digests = buffer[parcel.data_bytes : parcel.total_bytes].cpu().numpy().tobytes()
        payload = bytearray(bits + values + digests + _FOOTER.pack(_DELTA, len(bits)))
        return torch.frombuffer(payload, dtype=torch.uint8).to(buffer.device)


def decode(parcel: Parcel, payload: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The buffer uint8 [>= total_bytes] that was encoded; parameters: the receiver's, as the last sync left them."""
    kind, size = _FOOTER.unpack(payload[-_FOOTER.size :].cpu().numpy().tobytes())
    if kind == _FULL:
        return payload[: -_FOOTER.size]
    buffer = torch.empty(parcel.total_bytes, dtype=torch.uint8)
    parcel.pack_again(parameters, buffer)
    raw = payload.cpu().numpy()
    elements = _elements(parcel, buffer)  # shares the buffer's memory
    decompressor, behind = zstandard.ZstdDecompressor(), len(raw) - _FOOTER.size - 8 * len(parcel.runs)
    bits = np.frombuffer(decompressor.decompress(raw[:size].tobytes()), dtype=np.uint8)
    values = np.frombuffer(decompressor.decompress(raw[size:behind].tobytes()), dtype=elements.dtype)
    elements[np.unpackbits(bits, count=len(elements)).astype(bool)] = values
    buffer[parcel.data_bytes :] = payload[behind : -_FOOTER.size]
    return buffer.to(payload.device)
