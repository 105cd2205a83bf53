"""One stream of a guest's output: keeps its head and its tail, counts the middle."""

import os
import threading
from collections import deque
from collections.abc import Callable

_CHUNK = 64 * 1024
_PIPE_BYTES = 1024 * 1024
_SMALL = 4096  # pieces below it are put together: each costs an object
OnOutput = Callable[[str, bytes], None]


class Capture:
    """Reads a pipe until its end, keeping at most `limit` bytes."""

    def __init__(self, name: str, pipe: int, limit: int, on_output: OnOutput | None) -> None:
        self.name = name
        self.pipe = pipe
        self.total_bytes = 0
        self._head = bytearray()
        self._head_limit = limit - limit // 2
        # As it came: to copy what is dropped later cost a quarter of our time in a stream (measured).
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._tail_limit = limit // 2
        self._on_output = on_output
        self._lock = threading.Lock()  # of what is kept: others may ask while it grows

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return True
        self.take(data)
        return bool(data)

    def take(self, data: bytes) -> None:
        """Keep `data`, which came another way than through the pipe."""
        self._keep(data)
        if data and self._on_output:
            self._on_output(self.name, data)

    def drain(self) -> None:
        """Take what the pipe holds, at most 1 MiB (pipe(7)); who still writes is not waited for."""
        before = -1
        end = self.total_bytes + _PIPE_BYTES
        while before != self.total_bytes < end:
            before = self.total_bytes
            self.read()

    def _keep(self, data: bytes) -> None:
        with self._lock:
            self.total_bytes += len(data)
            if (room := self._head_limit - len(self._head)) > 0:
                self._head += data[:room]
                data = data[room:]
            if data:
                self._keep_last(data)

    def _keep_last(self, data: bytes) -> None:
        tail = self._tail
        self._tail_bytes += len(data)
        if len(data) < _SMALL and tail and len(tail[-1]) < _SMALL:
            tail[-1] += data
        else:
            tail.append(data)
        while tail and self._tail_bytes - len(tail[0]) >= self._tail_limit:
            self._tail_bytes -= len(tail.popleft())

    @property
    def dropped_bytes(self) -> int:
        return self.total_bytes - len(self._head) - min(self._tail_bytes, self._tail_limit)

    def text(self) -> str:
        """Return what was kept, undecodable bytes replaced, with a notice where some are missing."""
        if not self.total_bytes:
            return ""
        with self._lock:
            dropped, head, tail = self.dropped_bytes, bytes(self._head), b"".join(self._tail)
        if not dropped:
            return (head + tail).decode("utf-8", "replace")
        kept = min(len(tail), self._tail_limit)
        notice = f"\n[... {dropped} bytes dropped ...]\n"
        return (
            head.decode("utf-8", "replace")
            + notice
            + tail[len(tail) - kept :].decode("utf-8", "replace")
        )
