"""`Program`: any program of the host in a cell of its own, with pipes to its standard streams."""

import contextlib
import errno
import os
import signal
import threading
import weakref
from collections.abc import Callable

from ....policies.closing import Closing
from ....policies.errors import ClosedError
from ....runner.cells.cell import number_of
from ....runner.requests.request import Streams
from ....runner.requests.result import SandboxResult
from ..calls.background import Background
from ..network.exposed_ports import ExposedPort, ExposedPorts, HostPort, SandboxPorts

OnStreams = Callable[[Streams], None]
Work = Callable[
    [OnStreams, int], SandboxResult
]  # the int is a descriptor; when it becomes readable the program is killed
_PROCESS_GROUP = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9
_CLOSED = "the sandbox was closed"


class Program(Closing):
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
    def master(self) -> int:
        """The descriptor of the master of its terminal, which does not block; -1 without one."""
        return self._supervised.master

    def send_signal(self, number: int) -> None:
        """Send a signal to it and its process group, before Linux 6.9 to it alone; harmless if it
        has ended."""
        self._supervised.send_signal(number)

    def number(self) -> int:
        """Return its process id on this host; 0 if it has ended."""
        return self._supervised.number()

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

    def close_stdout(self) -> None:
        """Close the reading end of its standard output: it gets SIGPIPE when it writes."""
        self._supervised.close_stdout()

    def hang_up(self) -> None:
        """Close the master of its terminal: the programs there get SIGHUP (pty(7))."""
        self._supervised.hang_up()

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None,
        host_port: HostPort | None = None,
    ) -> ExposedPort:  # fmt: skip
        """Let the host reach a server in its cell until it ends, as `Session.expose` does; `host_port`
        may be an address and a port."""
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
        self._settled = threading.Event()  # the program has its streams, or has ended
        self._streams: Streams | None = None
        self._ports = ports
        self.stdin = self.stdout = self.master = self._process = -1
        self._background = Background(
            "cellwright-program",
            lambda cancel: work(self._begin, cancel),
            lambda: self._end(on_end),
        )

    def _begin(self, streams: Streams) -> None:
        self._streams = streams
        self.stdin, self.stdout = streams.stdin, streams.stdout
        self._process, self.master = streams.process, streams.master
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
        self, port: int, path: str | os.PathLike[str] | None, host_port: HostPort | None
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

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process >= 0:
                try:
                    signal.pidfd_send_signal(self._process, number, None, _PROCESS_GROUP)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # an older kernel
                        raise
                    signal.pidfd_send_signal(self._process, number)

    def number(self) -> int:
        with self._lock:
            return number_of(self._process) if self._process >= 0 else 0

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
        self.close_stdout()
        self.hang_up()
        with self._lock:
            self._process = _closed(self._process)

    def close_stdin(self) -> None:
        with self._lock:
            self.stdin = _closed(self.stdin)

    def close_stdout(self) -> None:
        with self._lock:
            self.stdout = _closed(self.stdout)

    def hang_up(self) -> None:
        with self._lock:
            self.master = _closed(self.master)

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
