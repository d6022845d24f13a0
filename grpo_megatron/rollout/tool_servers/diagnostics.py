"""Diagnostics of MCP servers: their output besides the protocol, for warnings and error messages."""

import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any

from grpo_megatron.errors import printable, shortened
from grpo_megatron.logs import Rarely

# How much of the end of a server's stderr messages quote.
_QUOTED = 2000

_warn = Rarely(logging.getLogger(__name__))


class _Garbage(logging.Filter):
    """Replaces the client's error about a line that is no message, which has a traceback, by a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        if not isinstance(error, ValueError):
            return True
        lines = getattr(error, "errors", lambda: [{}])()
        line = shortened(printable(str(lines[0].get("input", ""))), 200)
        _warn(
            f"an MCP server has written to stdout what is no message of the protocol; it is ignored: {line}"
        )
        return False


logging.getLogger("mcp.client.stdio").addFilter(_Garbage())


class HttpStatus:
    """Keeps the status of the last HTTP response, if it was an error, for messages."""

    def __init__(self):
        self._said = ""

    async def note(self, response: Any) -> None:
        """Look at a response. The HTTP client calls this."""
        code = response.status_code
        self._said = f" (HTTP status {code} {response.reason_phrase})" if code >= 400 else ""

    def end(self) -> str:
        """Return the status as the rest of a message; "" if it was no error."""
        return self._said

    def close(self) -> None:
        pass


class ErrorOutput:
    """Reads the stderr of a server's process, and keeps the end for messages.

    file: file to which the process writes
    """

    def __init__(self, is_logged: bool):
        """Open the pipe.

        is_logged: True if all that is read is also written to stderr of this process.
        """
        reading, writing = os.pipe()
        self.file = os.fdopen(writing, "w")
        self._is_logged, self._end = is_logged, b""
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._thread.start()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as file:
            while read := file.read(1 << 16):
                self._end = (self._end + read)[-_QUOTED:]
                if self._is_logged:
                    with suppress(OSError):  # such as a full log: the server must not wait for its reader
                        sys.stderr.write(read.decode(errors="replace"))
                        sys.stderr.flush()

    def end(self) -> str:
        """Return the end of what the process has written, as the rest of a message; "" if it is empty."""
        self._thread.join(0.5)  # ends with the last process that can write
        text = printable(self._end.decode(errors="replace")).strip()
        return f"; its stderr ends with:\n{text}" if text else ""

    def close(self) -> None:
        self.file.close()
