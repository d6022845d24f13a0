"""A file that grows by whole rows, so that a full disk or a kill costs no earlier one."""

import os
from pathlib import Path


class RowFile:
    """Appends text to a file. What is there stays, apart from half a row that a killed process left at the end."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    def append(self, text: str) -> None:
        """Write all of it, or nothing: raises OSError for a disk that is full, after which the file is as it was."""
        before, rest = self.size, memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        """What is appended after this raises OSError."""
        # The number soon is another file's, into which a late row would go.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
