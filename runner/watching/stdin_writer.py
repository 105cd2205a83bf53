"""The standard input of one execution, written as fast as the guest reads it."""

import os
import select

from .. import channel
from ..cells import Cell
from .poll_loop import Watcher


class StdinWriter:
    """Writes the guest's standard input, and then closes it unless it `stays` open for more."""

    def __init__(self, cell: Cell, watcher: Watcher, data: bytes, *, stays: bool) -> None:
        self._cell = cell
        self._watcher = watcher
        self._left = memoryview(data)
        self._stays = stays

    def begin(self) -> None:
        if self._left:
            self._watcher.watch(self._cell.stdin, select.POLLOUT, self._write)
        else:
            self._cell.close_stdin()

    def add(self, data: bytes) -> None:
        """Queue `data` behind the unwritten rest."""
        self._left = memoryview(bytes(self._left) + data)
        self._watcher.watch(self._cell.stdin, select.POLLOUT, self._write)

    def _write(self, event: int) -> None:
        try:
            sent = os.write(self._cell.stdin, self._left[: channel.PACKET_BYTES])
            self._left = self._left[sent:]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the guest closed its end
            self._left = self._left[:0]
        if not self._left or event & select.POLLERR:
            self._watcher.unwatch(self._cell.stdin)
            if not self._stays:
                self._cell.close_stdin()
