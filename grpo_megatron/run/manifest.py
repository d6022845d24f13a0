"""manifest.json of a checkpoint: size and digest of every file, and a digest of the list.

The manifest detects damage, but no deliberate changes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, parse_object, reading, replace_text
from grpo_megatron.paths import is_absent
from grpo_megatron.progress import moved

MANIFEST = "manifest.json"
_DAMAGED = "the checkpoint is damaged, but an earlier one may be intact"
_READ_BYTES = 4 * 2**20
# Most bytes of one write. A tensor of gigabytes takes a slow disk minutes, during which the rank must be seen
# to make progress.
_WRITE_BYTES = 64 * 2**20


class DamagedCheckpoint(UserError):
    """The files of a checkpoint differ from the files that were written. An earlier checkpoint may be sound.

    A checkpoint that this node cannot read does not count as damaged, because it may be sound.
    """


class FileRecord(NamedTuple):
    """Size and digest of a checkpoint's file, as the manifest lists them.

    size: in bytes
    digest: XXH3 of 128 bits, as hexadecimal digits
    """

    size: int
    digest: str


class DigestedFile:
    """A file that is written from beginning to end, while its digest for the manifest is computed."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest, self._size = file, xxhash.xxh3_128(), 0

    def write(self, data) -> int:
        memory, before = memoryview(data).cast("B"), self._size
        for start in range(0, len(memory), _WRITE_BYTES):
            part = memory[start : start + _WRITE_BYTES]
            self._digest.update(part)
            self._size += self._file.write(part)
            moved()
        return self._size - before

    def tell(self) -> int:
        return self._size

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Read a whole file, and return its size and digest. Raises OSError if it cannot be read."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
            moved()
    return FileRecord(size, digest.hexdigest())


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Write manifest.json into the folder of a checkpoint.

    files: {path of a file in `folder`: its size and digest}.
    """
    listed = {name: list(record) for name, record in sorted(files.items())}
    text = json_text({"files": listed, "digest": _digest_of(listed)}, indent=1)
    replace_text(folder / MANIFEST, text)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return {path of a file in `folder`: its size and digest} from a checkpoint's manifest.

    Checks that all files exist and have the right size. `problems` checks the digests. Raises
    DamagedCheckpoint, which names the file, if the manifest or a file is missing or wrong. Raises UserError
    if a file cannot be read.
    """
    path = folder / MANIFEST
    if is_absent(path):
        raise DamagedCheckpoint(
            f"{folder} is not a complete checkpoint, because it has no {MANIFEST}; an earlier one may be "
            "complete"
        )
    with reading(path):
        raw = path.read_bytes()
    try:
        content = parse_object(raw, str(path))
    except UserError as error:
        raise DamagedCheckpoint(f"{error}; {_DAMAGED}") from error
    if set(content) != {"files", "digest"} or _digest_of(content["files"]) != content["digest"]:
        raise DamagedCheckpoint(f"{path} does not match its own digest; {_DAMAGED}")
    files = {name: FileRecord(*record) for name, record in content["files"].items()}
    for name, record in files.items():
        path = folder / name
        if is_absent(path):
            raise DamagedCheckpoint(f"{path} does not exist; {_DAMAGED}")
        with reading(path):
            size = path.stat().st_size
        if size != record.size:
            raise DamagedCheckpoint(f"{path} has {size} bytes, but {record.size} were written; {_DAMAGED}")
    return files


def problems(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> list[UserError]:
    """Read files of a checkpoint completely. Return an error for each file that does not match its digest.

    The error is a DamagedCheckpoint if the content is wrong, or another UserError if this node cannot read
    the file.

    folder: the checkpoint's folder.
    files: the result of `read_manifest`.
    names: keys of `files`: the files to check.
    """
    found: list[UserError] = []
    for name in names:
        try:
            with reading(folder / name):
                right = record_of(folder / name) == files[name]
        except UserError as error:
            found.append(error)
            continue
        if not right:
            found.append(DamagedCheckpoint(f"{folder / name} does not match its digest; {_DAMAGED}"))
    return found


def must_be_sound(found: Iterable[UserError]) -> None:
    """Raise one of the errors that `problems` found, if there are any.

    If there are errors of both kinds, an error of reading is raised and no DamagedCheckpoint. After a
    DamagedCheckpoint, the caller would skip the checkpoint, although it may be sound.

    found: the result of `problems`.
    """
    in_order = sorted(found, key=lambda error: isinstance(error, DamagedCheckpoint))
    if in_order:
        raise in_order[0]


def _digest_of(listed: object) -> str:
    return xxhash.xxh3_128_hexdigest(json_text(listed, sort_keys=True).encode())
