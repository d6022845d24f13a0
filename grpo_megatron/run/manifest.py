"""manifest.json of a checkpoint: size and digest of every file, and a digest of this list.

The manifest detects damage. It does not protect against deliberate changes.
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
# Most bytes of one write. Writing gigabytes to a slow disk takes minutes, and the hang detector must see that
# the rank makes progress meanwhile.
_WRITE_BYTES = 64 * 2**20


class DamagedCheckpoint(UserError):
    """Error of a checkpoint whose files are missing or differ from the files that were written.

    An earlier checkpoint may be intact. If a file merely cannot be read on this node, a plain UserError is
    raised instead, because the checkpoint itself may be intact.
    """


class FileRecord(NamedTuple):
    """Size and digest of one file of a checkpoint, as the manifest lists them.

    size: size in bytes
    digest: XXH3 digest of 128 bits, as hexadecimal digits
    """

    size: int
    digest: str


class DigestedFile:
    """Wrapper of a binary file for writing. It computes the file's size and digest for the manifest.

    The file must be written from beginning to end.
    """

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
    """Read a whole file, and return its size and digest. Raises OSError if the file cannot be read."""
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

    This function checks that all listed files exist and have the right size. It does not check their digests;
    `problems` does.

    Raises DamagedCheckpoint, which names the file, if the manifest or a file is missing or wrong. Raises
    UserError if a file cannot be read.
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
    """Compare files of a checkpoint with their digests. Return one error per wrong or unreadable file.

    The files are read completely. The error is a DamagedCheckpoint if the content is wrong, or another
    UserError if this node cannot read the file. No error is raised.

    folder: the checkpoint's folder.
    files: {path of a file in `folder`: its size and digest}, from `read_manifest`.
    names: the files to check, as keys of `files`.
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
    """Raise one of the errors that a check of a checkpoint's files (`problems`) has found, if any.

    An error about a file that cannot be read takes precedence over a DamagedCheckpoint, because a
    DamagedCheckpoint makes the caller skip the checkpoint for good.

    found: the errors.
    """
    in_order = sorted(found, key=lambda error: isinstance(error, DamagedCheckpoint))
    if in_order:
        raise in_order[0]


def _digest_of(listed: object) -> str:
    return xxhash.xxh3_128_hexdigest(json_text(listed, sort_keys=True).encode())
