"""`Program`: any program of the host in a cell of its own, with pipes to its standard streams."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Self

from ...policies.errors import ClosedError
from ...runner.request import Streams
from ...runner.result import SandboxResult
from .background import Background
from .ports.exposed import ExposedPort, ExposedPorts, SandboxPorts

OnStreams = Callable[[Streams], None]
Work = Callable[
    [OnStreams, int], SandboxResult
]  # the int: a descriptor; once it is readable the program is killed
_CLOSED = "the sandbox was closed"


class Program:
    """A running program in a cell of its own, such as a server, with pipes to its `stdin` and `stdout`.
    Made by `Sandbox.program`; a context manager.

    Its output is not kept.  The pipes are bounded: the program waits until the caller reads, and the
    caller waits until the program reads.  A Program that is garbage-collected is killed.
    """

    def __init__(self, supervised: "SupervisedProgram") -> None:
        self._supervised = supervised
        self._finalizer = weakref.finalize(self, supervised.abandon)

    @property
    def stdin(self) -> int:
        """The descriptor that writes to its standard input, blocking; -1 once closed."""
        return self._supervised.stdin

    @property
    def stdout(self) -> int:
        """The descriptor that reads its standard output, blocking; -1 once closed."""
        return self._supervised.stdout

    @property
    def stderr(self) -> str:
        """Its standard error so far, head and tail, as the result will have it."""
        return self._supervised.stderr()

    def is_alive(self) -> bool:
        """Tell whether it runs, or its cell is still being removed."""
        return self._supervised.is_alive()

    def wait(self, timeout: float | None = None) -> SandboxResult:
        """Wait until nothing in its cell runs, and return the result.

        Raises TimeoutError if that takes more than `timeout` seconds, LaunchError if its launcher died.
        """
        return self._supervised.wait(timeout)

    def close_stdin(self) -> None:
        """Close its standard input; most servers then exit."""
        self._supervised.close_stdin()

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> ExposedPort:
        """Let the host reach a server in its cell until it ends, as `Session.expose` does."""
        return self._supervised.expose(port, path, host_port)

    def kill(self) -> None:
        """Kill it and every process that it started; harmless if it has ended."""
        self._supervised.kill()

    def close(self) -> None:
        """Kill it, wait until nothing in its cell runs, and close both descriptors.

        Closing twice is fine, and `wait` still returns the result.
        """
        self._supervised.end()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SupervisedProgram:
    """The thread that supervises a program, and this process's ends of its streams.

    A forked child has no such thread: it can only close its copies of the descriptors.
    """

    def __init__(
        self, work: Work, on_end: Callable[["SupervisedProgram"], None], ports: ExposedPorts
    ) -> None:
        self._owner = os.getpid()
        self._lock = (
            threading.RLock()
        )  # for the streams; reentrant: a finalizer may run in a thread that holds it
        self._settled = threading.Event()  # the program has its streams, or has ended without them
        self._streams: Streams | None = None
        self._ports = ports
        self.stdin = self.stdout = -1
        self._background = Background(
            "cellwright-program",
            lambda cancel: work(self._begin, cancel),
            lambda: self._end(on_end),
        )

    def _begin(self, streams: Streams) -> None:
        self._streams = streams
        self.stdin, self.stdout = streams.stdin, streams.stdout
        self._settled.set()

    def _end(self, on_end: Callable[["SupervisedProgram"], None]) -> None:
        self._settled.set()
        self._ports.close()
        if self._streams and self._streams.network:
            self._streams.network.close()
        on_end(self)

    def require_streams(self) -> None:
        """Wait until the program has its streams; raises what kept it from starting."""
        try:
            self._settled.wait()
            if self._streams is None:
                self._background.result()
                raise ClosedError(_CLOSED)  # only closing the sandbox cancels it this early
        except BaseException:
            self.end()
            self.abandon()
            raise

    def stderr(self) -> str:
        return self._streams.stderr() if self._streams else ""

    def expose(
        self, port: int, path: str | os.PathLike[str] | None, host_port: int | None
    ) -> ExposedPort:
        self._require_owner()
        network = self._streams.network if self._streams else None
        return self._ports.expose(network and network.copy(), port, path, host_port)

    def is_alive(self) -> bool:
        return os.getpid() == self._owner and self._background.is_alive()

    def wait(self, timeout: float | None) -> SandboxResult:
        self._require_owner()
        if not self._background.join(timeout):
            raise TimeoutError(f"wait: the program still runs after {timeout:g} s")
        return self._background.result()

    def kill(self) -> None:
        if os.getpid() == self._owner:
            self._background.cancel()

    def end(self) -> None:
        """Kill it, and wait until nothing in its cell runs."""
        if os.getpid() == self._owner:
            self._background.cancel()
            self._background.join()

    def abandon(self) -> None:
        """Kill it and close the streams without waiting, which a finalizer must not do."""
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
    """The running programs of one sandbox; safe from many threads."""

    def __init__(self, ports: SandboxPorts) -> None:
        self._ports = ports
        self._owner = os.getpid()
        self._lock = threading.RLock()  # reentrant: a finalizer may run in a thread that holds it
        self._living: set[SupervisedProgram] = set()
        self._closed = False

    def start(self, work: Work) -> Program:
        """Return a running program; raises what kept it from starting."""
        with self._lock:
            if self._closed:
                raise ClosedError(_CLOSED)
            supervised = SupervisedProgram(work, self._forget, self._ports.of_cell())
            self._living.add(supervised)
        supervised.require_streams()
        return Program(supervised)

    def _forget(self, supervised: SupervisedProgram) -> None:
        with self._lock:
            self._living.discard(supervised)

    def close(self) -> None:
        """End all programs and refuse new ones; their descriptors stay open until each is closed."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            living = tuple(self._living)
        for supervised in living:
            supervised.end()


def _closed(descriptor: int) -> int:
    if descriptor >= 0:
        with contextlib.suppress(OSError):  # the caller may have closed it itself
            os.close(descriptor)
    return -1
