"""A file that grows by whole rows. Neither a full disk nor the kill of the process damages an earlier row."""

import os
from pathlib import Path


class RowFile:
    """A file that is only appended to, such as metrics.jsonl.

    A killed process may have left half a row at the end. This class does not remove it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._descriptor).st_size

    def append(self, text: str) -> None:
        """Write all of the text or nothing.

        Raises OSError if the disk is full. The file is then unchanged.
        """
        before, rest = self.size, memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        """Close the file. Appending to it afterwards raises OSError."""
        # Forget the descriptor: its number will soon belong to another file, into which a late row would go.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
