"""A file that grows by whole rows. A full disk or a kill damages no earlier row."""

import os
from pathlib import Path


class RowFile:
    """Appends text to a file, and leaves its earlier content as it is.

    A killed process may have left half a row at the end, which this class does not remove.
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
