"""One stream of a guest's output: its head and its tail are kept, the middle is counted."""

import os
from collections.abc import Callable

_CHUNK = 64 * 1024
_PIPE_BYTES = 1024 * 1024
OnOutput = Callable[[str, bytes], None]


class Capture:
    """Reads a pipe until its end, keeping at most `limit` bytes of it."""

    def __init__(self, name: str, pipe: int, limit: int, on_output: OnOutput | None) -> None:
        self.name = name
        self.pipe = pipe
        self.total_bytes = 0
        self._head = bytearray()
        self._head_limit = limit - limit // 2
        self._tail = bytearray()
        self._tail_limit = limit // 2
        self._on_output = on_output

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return True
        self._keep(data)
        if data and self._on_output:
            self._on_output(self.name, data)
        return bool(data)

    def drain(self) -> None:
        """Take what the pipe holds, at most 1 MiB (pipe(7)); who still writes is not waited for."""
        before = -1
        end = self.total_bytes + _PIPE_BYTES
        while before != self.total_bytes < end:
            before = self.total_bytes
            self.read()

    def _keep(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_limit + _CHUNK:  # trim seldom: it copies
            self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    @property
    def dropped_bytes(self) -> int:
        self._trim()
        return self.total_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """Return what was kept, undecodable bytes replaced, with a notice where some are missing."""
        dropped = self.dropped_bytes
        if not dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        notice = f"\n[... {dropped} bytes dropped ...]\n"
        return (
            self._head.decode("utf-8", "replace") + notice + self._tail.decode("utf-8", "replace")
        )
