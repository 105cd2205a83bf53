"""`Program`: any program of the host's in a cell of its own, spoken with over its standard streams."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Self

from ...policies.errors import ClosedError
from ...runner.performance import Streams
from ...runner.result import SandboxResult
from .background import Background

OnStreams = Callable[[Streams], None]
Work = Callable[[OnStreams, int], SandboxResult]  # the second is a descriptor that ends it
_CLOSED = "the sandbox was closed"


class Program:
    """A program that lives in a cell of its own until it ends, or is ended: a server, spoken with over
    `stdin` and `stdout`.  Made by `Sandbox.program`; a context manager.

    What it writes is kept by nobody: who does not read makes it wait, and who writes what it does not
    read waits himself.  One that nobody holds any more is killed.
    """

    def __init__(self, life: "Life") -> None:
        self._life = life
        self._finalizer = weakref.finalize(self, life.abandon)

    @property
    def stdin(self) -> int:
        """Our end of the pipe that is its standard input, a blocking descriptor; -1 once closed."""
        return self._life.stdin

    @property
    def stdout(self) -> int:
        """Our end of the pipe that is its standard output, a blocking descriptor; -1 once closed."""
        return self._life.stdout

    @property
    def stderr(self) -> str:
        """What it has written to standard error so far, head and tail, as the result will have it."""
        return self._life.stderr()

    def is_alive(self) -> bool:
        """Tell whether it runs, or is just being taken down."""
        return self._life.is_alive()

    def wait(self, timeout: float | None = None) -> SandboxResult:
        """Return what came of it, once nothing in its cell runs any more.

        Raises TimeoutError if it lives on for `timeout` seconds, and LaunchError if its launcher died.
        """
        return self._life.wait(timeout)

    def close_stdin(self) -> None:
        """Have it read the end of its input, by which most servers know that they may go."""
        self._life.close_stdin()

    def kill(self) -> None:
        """Kill it and whatever it started; harmless if it has ended."""
        self._life.kill()

    def close(self) -> None:
        """Kill what still runs, wait until nothing of it is left to run, and close both descriptors.

        Closing twice is fine, and `wait` still tells how it ended.
        """
        self._life.end()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Life:
    """What a program is to those who end it: a thread that supervises it, and our ends of its streams.

    In a process that was forked from ours there is no such thread: it can only close its copies.
    """

    def __init__(self, work: Work, on_end: Callable[["Life"], None]) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()  # of the streams; reentrant, since a finalizer may come
        self._settled = threading.Event()  # it has its streams, or will have none
        self._streams: Streams | None = None
        self.stdin = self.stdout = -1
        self._background = Background(
            "cellwright-program",
            lambda cancel: work(self._begin, cancel),
            lambda: self._end(on_end),
        )

    def _begin(self, streams: Streams) -> None:
        self._streams = streams
        self.stdin, self.stdout, _ = streams
        self._settled.set()

    def _end(self, on_end: Callable[["Life"], None]) -> None:
        self._settled.set()
        on_end(self)

    def require_streams(self) -> None:
        """Wait until it has them; raises what kept it from running."""
        try:
            self._settled.wait()
            if self._streams is None:
                self._background.result()
                raise ClosedError(_CLOSED)  # nothing else calls it off so early
        except BaseException:
            self.end()
            self.abandon()
            raise

    def stderr(self) -> str:
        return self._streams.stderr() if self._streams else ""

    def is_alive(self) -> bool:
        return os.getpid() == self._owner and self._background.is_alive()

    def wait(self, timeout: float | None) -> SandboxResult:
        self._require_owner()
        if not self._background.join(timeout):
            raise TimeoutError(f"the program lives on after {timeout:g} s")
        return self._background.result()

    def kill(self) -> None:
        if os.getpid() == self._owner:
            self._background.cancel()

    def end(self) -> None:
        """Kill it, and wait until nothing of it runs."""
        if os.getpid() == self._owner:
            self._background.cancel()
            self._background.join()

    def abandon(self) -> None:
        """Kill it and close the streams; waits for nothing, as a finalizer must not."""
        self.kill()
        self.close_stdin()
        with self._lock:
            self.stdout = _closed(self.stdout)

    def close_stdin(self) -> None:
        with self._lock:
            self.stdin = _closed(self.stdin)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ClosedError("the program was started before this process was forked")


class Programs:
    """Those of one sandbox that live; safe from many threads."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()  # reentrant: a finalizer may close while this thread looks
        self._living: set[Life] = set()
        self._closed = False

    def start(self, work: Work) -> Program:
        """Return a program that runs; raises what kept it from running."""
        with self._lock:
            if self._closed:
                raise ClosedError(_CLOSED)
            life = Life(work, self._forget)
            self._living.add(life)
        life.require_streams()
        return Program(life)

    def _forget(self, life: Life) -> None:
        with self._lock:
            self._living.discard(life)

    def close(self) -> None:
        """End them all, and start no more; their descriptors stay with those who have them."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            living = tuple(self._living)
        for life in living:
            life.end()


def _closed(descriptor: int) -> int:
    if descriptor >= 0:
        with contextlib.suppress(OSError):  # it may be closed behind our back
            os.close(descriptor)
    return -1
