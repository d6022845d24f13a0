"""Lossless delta encoding of parcels: only elements that changed since the last sync are sent, compressed.

A parcel is a buffer of packed weights, and its payload is what is sent for it. An RL step at a small learning
rate leaves most bf16 weights unchanged. A delta payload holds a bitmap of the changed elements and their new
values, both compressed. If a delta is not possible or not smaller, the payload is the whole parcel.
"""

import struct

import numpy as np
import torch
import zstandard

from grpo_megatron.weights.sync.parcels import Parcel

# The footer of every payload: its kind (_FULL or _DELTA), and for a delta the bytes of its compressed bitmap.
_FOOTER = struct.Struct("<qq")
_FULL, _DELTA = 0, 1
_LEVEL = 1


def max_payload(parcel: Parcel) -> int:
    """Return the maximum size in bytes of a parcel's payload: the whole parcel and a footer.

    A parcel is one message of packed weights. Its payload is the encoded form in which the parcel is sent.
    """
    return parcel.total_bytes + _FOOTER.size


def _elements(parcel: Parcel, buffer: torch.Tensor) -> np.ndarray:
    """Return packed weights as a 1-d array of unsigned integers, to compare elements bit by bit.

    The integers are as wide as the smallest dtype of the weights. The result shares memory with `buffer` if
    `buffer` is on a CPU.

    parcel: layout of one message of packed weights.
    buffer: uint8, the packed weights.
    """
    size = min(dtype.itemsize for dtype in parcel.dtypes)
    return (
        buffer[: parcel.data_bytes]
        .cpu()
        .numpy()
        .view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])
    )


class Encoder:
    """Delta encoder: it reduces a trainer rank's messages to the weights that changed since the last sync.

    The encoder keeps a copy of the weights that it encoded last, in host memory.

    sent_bytes: bytes of all payloads since the last call of `begin`.
    """

    def __init__(self):
        self._sent: dict[tuple[str, int], np.ndarray] = {}
        self.sent_bytes = 0

    def begin(self, full: bool) -> None:
        """Prepare for the next weight sync, and set `sent_bytes` to 0.

        full: True to send all weights in this sync, because receivers may lack the weights of the last sync.
            The encoder then forgets the weights of the last sync.
        """
        self.sent_bytes = 0
        if full:
            self._sent.clear()

    def encode(self, parcel: Parcel, buffer: torch.Tensor) -> torch.Tensor:
        """Return the payload to send for a parcel, uint8 [bytes], and keep the weights for the next sync.

        A parcel is one message of packed weights. The payload contains the elements that changed since the
        last sync, compressed. It contains the whole parcel instead if all elements changed, if the compressed
        changes would not be smaller, or if the encoder does not have the weights of the last sync. The
        receiver restores the parcel with the function `decode`. The bytes of the payload are added to
        `sent_bytes`.

        buffer: uint8, the packed parcel with its digests, followed by room for the footer (`max_payload`
            bytes in all). A payload with the whole parcel is a view of this buffer.
        """
        elements, key = _elements(parcel, buffer), (parcel.link.name, parcel.index)
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
        """Return the bytes to send if only the changed elements of a message are sent, uint8 [bytes].

        Return None if the compressed changes would not be smaller than the whole message, or if all elements
        changed.

        parcel: layout of the message.
        buffer: uint8, the packed weights of the message, with their digests (checksums).
        elements: the weights as unsigned integers, from `_elements`.
        changed: bool, one per element: True if the element changed since the last sync.
        """
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
    """Restore a message of packed weights from the payload that `Encoder.encode` made of it.

    Return uint8 [total_bytes]: the packed weights, followed by their digests (checksums). If the payload
    contains the whole message, the result is a view of the payload.

    parcel: layout of the message.
    payload: uint8, the received bytes. They may contain only the elements that changed since the last sync.
    parameters: {name of an engine's parameter: this rank's part of it}, with the values of the last sync. The
        elements that did not change are copied from these parameters, which stay as they are.
    """
    kind, size = _FOOTER.unpack(payload[-_FOOTER.size :].cpu().numpy().tobytes())
    if kind == _FULL:
        return payload[: -_FOOTER.size]
    buffer = torch.empty(parcel.total_bytes, dtype=torch.uint8)
    parcel.pack_again(parameters, buffer)
    raw = payload.cpu().numpy()
    elements = _elements(parcel, buffer)  # shares the buffer's memory
    decompressor = zstandard.ZstdDecompressor()
    digests_at = len(raw) - _FOOTER.size - 8 * len(parcel.tensor_spans)
    bits = np.frombuffer(decompressor.decompress(raw[:size].tobytes()), dtype=np.uint8)
    values = np.frombuffer(decompressor.decompress(raw[size:digests_at].tobytes()), dtype=elements.dtype)
    elements[np.unpackbits(bits, count=len(elements)).astype(bool)] = values
    buffer[parcel.data_bytes :] = payload[digests_at : -_FOOTER.size]
    return buffer.to(payload.device)
