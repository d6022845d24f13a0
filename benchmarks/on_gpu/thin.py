"""Shrink wheels of CUDA libraries: keep the machine code of one GPU architecture, and leave out files.

A library keeps its kernels in the ELF section .nv_fatbin, in containers with one entry for each architecture.
Entries of other architectures are overwritten with zeros. No byte moves, so that the library loads as before,
and zeros compress to almost nothing.
"""

import base64
import hashlib
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of all entries
# kind, attributes, size of this header, size of the payload, ..., architecture
_ENTRY = struct.Struct("<HHIQIIHHI")
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)


class Entry(NamedTuple):
    """The code for one architecture in a library."""

    architecture: int
    """Compute capability without the point: 90 for Hopper."""
    start: int
    """First byte of the code in the file."""
    end: int
    """Byte after the last one."""


def sections(image: bytes | bytearray) -> dict[str, tuple[int, int]]:
    """Return {name: (start, end)} of the sections of a 64-bit little-endian ELF file.

    Raises ValueError for any other file.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    header = _ELF_HEADER.unpack_from(image)
    table, size, count, names = header[6], header[11], header[12], header[13]
    rows = [_SECTION_HEADER.unpack_from(image, table + index * size) for index in range(count)]
    strings = rows[names][4]
    found = {}
    for row in rows:
        name = bytes(image[strings + row[0] : image.index(b"\0", strings + row[0])]).decode()
        found[name] = row[4], row[4] + row[5]
    return found


def containers(image: bytes | bytearray, start: int, end: int) -> Iterator[list[Entry]]:
    """Yield the entries of each container in a section.

    Raises ValueError if the section has another format.
    """
    while start < end:
        if not image[start]:  # containers are aligned
            start += 1
            continue
        magic, _, header, size = _CONTAINER.unpack_from(image, start)
        if magic != _MAGIC:
            raise ValueError(f"there is no container of GPU code at byte {start}")
        position, limit = start + header, start + header + size
        entries = []
        while position < limit:
            _, _, own, payload, *_, architecture = _ENTRY.unpack_from(image, position)
            if not own or position + own + payload > limit:
                raise ValueError(f"the entry of GPU code at byte {position} ends after its container")
            entries.append(Entry(architecture, position + own, position + own + payload))
            position += own + payload
        yield entries
        start = limit


def thinned(library: bytes, architecture: int) -> tuple[bytes, dict[int, int]]:
    """Return the library with the code of one architecture, and {other architecture: bytes of code removed}.

    A container without that architecture stays whole, because the driver may compile its PTX.
    """
    image, removed = bytearray(library), {}
    found = sections(image)
    for name in FATBIN_SECTIONS:
        for entries in containers(image, *found.get(name, (0, 0))):
            if architecture not in {entry.architecture for entry in entries}:
                continue
            for entry in entries:
                if entry.architecture != architecture:
                    image[entry.start : entry.end] = bytes(entry.end - entry.start)
                    removed[entry.architecture] = removed.get(entry.architecture, 0) + entry.end - entry.start
    return bytes(image), removed


def rewrite_wheel(
    source: Path, target: Path, keep: Callable[[str], bool], change: Callable[[str, bytes], bytes]
) -> None:
    """Write a wheel with the files that `keep` accepts, as `change` returns them, and a new RECORD."""
    rows = []
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        (record,) = [name for name in old.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
        for item in old.infolist():
            if item.is_dir() or item.filename == record or not keep(item.filename):
                continue
            content = change(item.filename, old.read(item))
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{item.filename},sha256={digest},{len(content)}\n")
            # With a fixed date, the same wheel always has the same digest.
            info = zipfile.ZipInfo(item.filename, _FIXED_DATE)
            info.external_attr, info.compress_type = item.external_attr, zipfile.ZIP_DEFLATED
            new.writestr(info, content)
        rows.append(f"{record},,\n")
        new.writestr(zipfile.ZipInfo(record, _FIXED_DATE), "".join(rows))
