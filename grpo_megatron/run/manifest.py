"""manifest.json of a checkpoint: every file with its size and digest, and a digest of all that. It recognises damage, not malice."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from grpo_megatron.errors import UserError
from grpo_megatron.json_files import read_object
from grpo_megatron.paths import file_problem, is_absent, sync_to_disk

MANIFEST = "manifest.json"
_READ_BYTES = 4 * 2**20


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written; an earlier one may be."""


class FileRecord(NamedTuple):
    """size: in bytes. digest: XXH3 of 128 bits, as hexadecimal digits."""

    size: int
    digest: str


class DigestedFile:
    """A file that is being written from its beginning to its end, with the digest of what went through."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest, self._size = file, xxhash.xxh3_128(), 0

    def write(self, data) -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Of a file, by reading all of it. Raises OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
    return FileRecord(size, digest.hexdigest())


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """files: by their path in the folder."""
    listed = {name: list(record) for name, record in sorted(files.items())}
    text = json.dumps({"files": listed, "digest": _digest_of(listed)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    sync_to_disk(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint, all of which have the size they were written with.

    Raises DamagedCheckpoint that names the file which is not right.
    """
    path = folder / MANIFEST
    if is_absent(path):
        raise DamagedCheckpoint(f"{folder} is not a whole checkpoint (it has no {MANIFEST}), or of a version that wrote none")
    try:
        content = read_object(path)
    except UserError as error:
        raise DamagedCheckpoint(f"{error}; the checkpoint is damaged") from error
    if set(content) != {"files", "digest"} or _digest_of(content["files"]) != content["digest"]:
        raise DamagedCheckpoint(f"{path} does not match its own digest; the checkpoint is damaged")
    files = {name: FileRecord(*record) for name, record in content["files"].items()}
    for name, record in files.items():
        problem = file_problem(folder / name)
        if problem is None and (size := (folder / name).stat().st_size) != record.size:
            problem = f"has {size} bytes, {record.size} were written"
        if problem:
            raise DamagedCheckpoint(f"{folder / name} {problem}; the checkpoint is damaged")
    return files


def damage(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> list[str]:
    """One sentence for each of these files whose content is not what was written."""
    found = []
    for name in names:
        try:
            right = record_of(folder / name) == files[name]
        except OSError as error:
            found.append(f"{folder / name} cannot be read: {error.strerror}")
            continue
        if not right:
            found.append(f"{folder / name} does not match its digest")
    return found


def _digest_of(listed: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(listed, sort_keys=True).encode())
