"""`Worker`: one worker of a sandbox, as the sandbox has it.

A worker is started by exec, never by fork, because the embedding process may have threads.  It ends by
itself when its control socket is closed, also by the death of this process.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import msgspec

from ....policies.errors import CellwrightError, ClosedError, LauncherLost, LaunchError
from ....runner import channel
from ....runner.concurrency import NEVER, begin_thread
from ....runner.launching.spawn import import_paths, interpreter
from ....runner.messages import Answer, Call, decode, encode
from ....runner.requests.request import OnOutput, Request
from ..remote.call_frames import error_of, failure_of
from ..remote.connections import ConnectionPool, OnDescriptors, Requests, _Connection
from ..remote.frames import Failure
from . import worker_frames

_BOOTSTRAP = (
    "import json,os,sys;"
    "sys.path[:]=json.loads(os.read(3,1<<20));"
    "from cellwright.harness.servers.worker.worker_main import main;"
    "main()"
)
_START_SECONDS = 120.0
_END_SECONDS = 60.0  # from closing the control socket to SIGKILL
_DYING_SECONDS = 30.0  # from the end of a connection to the end of its process
_UPCALL_BYTES = 2 << 30
_R = TypeVar("_R", bound=msgspec.Struct)
# Returns the answer to an upcall, and a descriptor that goes with it, which is then closed.
AnswerUpcall = Callable[["Worker", msgspec.Struct], tuple[msgspec.Struct, int]]


class Worker:
    """A child process that makes cells; safe from many threads."""

    def __init__(
        self, number: int, start: worker_frames.StartWorker, hidden: Collection[str],
        answer: AnswerUpcall, on_end: "Callable[[Worker], None]",
    ) -> None:  # fmt: skip
        """Start the process, without the variables of the environment that are `hidden`.

        `answer` answers its upcalls, in threads; `on_end` is called when it has ended.  Raises
        LaunchError.
        """
        self.number = number
        self.running = 0  # calls that were placed here
        self.used = 0  # moment of the last call
        self.python: tuple[str, ...] = ()
        self.is_ready = self._is_closing = False
        self._answer = answer
        self._on_end = on_end
        self._sending = threading.Lock()
        self._began = threading.Event()  # set by the answer to the first frame, or at the end
        self._ended = threading.Event()  # set when it was reaped
        self._failure: CellwrightError | None = None
        self._last: list[Callable[[], None]] = []
        self._tools: dict[str, _ToolsOfExecution] = {}
        self._control, self.pid = _spawned(hidden)
        self._pidfd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._pidfd)
        server = f"worker {number}"
        pool = _PoolOfWorker(self._connected, "", server, worker_frames.WorkerReply)
        pool.has_died = self._has_died
        self.requests = Requests(pool)
        with contextlib.suppress(OSError):  # it has ended, which `wait` reports
            channel.send(self._control, encode(start))
        begin_thread("cellwright-worker", self._read)

    def wait(self) -> None:
        """Wait until it takes requests; raises what its sandbox raises, and LaunchError."""
        if not self._began.wait(_START_SECONDS):
            self._failure = LaunchError(f"worker {self.number}: not ready in {_START_SECONDS:g} s")
        if self._failure:
            raise self._failure
        self.is_ready = True

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER, on_descriptors: OnDescriptors | None = None,
    ) -> _R:  # fmt: skip
        """Return the reply to a request; raises what the worker raises, and LauncherLost if it ends."""
        reply = self.requests.pool.ask(request, on_output, cancel, on_descriptors)
        assert isinstance(reply, kind)  # noqa: S101 - of a worker of this version
        return reply

    def send_descriptor(self, frame: msgspec.Struct, descriptor: int) -> None:
        """Send a frame with a descriptor on the control socket; raises ClosedError if it has ended."""
        try:
            with self._sending:
                channel.send(self._control, encode(frame), (descriptor,))
        except OSError:
            if not self._is_closing and not self.has_ended(_DYING_SECONDS):
                raise
            raise ClosedError(f"worker {self.number} has ended") from None

    def _has_died(self) -> bool:
        """Tell whether a connection was closed because the worker has ended unasked."""
        if self._is_closing or not self.has_ended(_DYING_SECONDS):
            return False
        self.is_ready = False
        return True

    @contextlib.contextmanager
    def answering(self, request: Request) -> Iterator[None]:
        """Have the tools of a request answer during the block; later ones are orphans."""
        if request.on_call is None:
            yield
            return
        tools = self._tools[request.execution_id] = _ToolsOfExecution(request)
        try:
            yield
        finally:
            del self._tools[request.execution_id]
            tools.end()

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Wait until the process has ended; False if it has not in time."""
        return channel.has_news(self._pidfd, seconds)

    def at_end(self, work: Callable[[], None]) -> None:
        """Do `work` when it has ended, perhaps at once."""
        self._last.append(work)
        if self._ended.is_set():
            work()

    def hang_up(self) -> None:
        """Have it end, and let running calls raise ClosedError."""
        self.is_ready, self._is_closing = False, True
        self.requests.pool.close()
        with contextlib.suppress(OSError):
            self._control.shutdown(_socket.SHUT_WR)

    def reap(self) -> None:
        """Wait until it has ended, after `hang_up`; kill it if that takes too long."""
        if not self.has_ended(_END_SECONDS):
            self.kill()
        self._ended.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            _signal.pidfd_send_signal(self._pidfd, _signal.SIGKILL)

    def _connected(self) -> _socket.SocketType:
        """Return a connection to it; raises LauncherLost if it has ended, before anything was asked."""
        ours, theirs = channel.pair()
        try:
            self.send_descriptor(worker_frames.OpenConnection(), theirs.fileno())
        except BaseException as error:
            ours.close()
            if not isinstance(error, ClosedError) or self._is_closing:
                raise
            self.is_ready = False
            raise LauncherLost(cell_began=False) from None
        finally:
            theirs.close()
        return ours

    def _read(self) -> None:
        """Read the control socket until its end, and reap the process then."""
        with contextlib.suppress(OSError, channel.ProtocolError, msgspec.DecodeError):
            while self._take(*channel.receive_with_descriptors(self._control)):
                pass
        self._reap_now()

    def _take(self, frame: bytes, descriptors: list[int]) -> bool:
        if not frame:
            return False
        told = decode(frame, worker_frames.FromWorker)
        if isinstance(told, worker_frames.OpenUpcalls):
            sock = _socket.socket(fileno=descriptors.pop())
            begin_thread("cellwright-upcalls", lambda: self._serve_upcalls(sock))
        elif isinstance(told, Failure):
            self._failure = error_of(told)
        else:
            self.python = told.python
            self._began.set()
        return True

    def _serve_upcalls(self, sock: _socket.SocketType) -> None:
        receiver = channel.Receiver(sock, _UPCALL_BYTES)
        with contextlib.closing(sock), contextlib.suppress(OSError):
            while frame := receiver.receive_whole():
                answer, descriptor = self._answered(decode(frame, worker_frames.Upcall))
                try:
                    descriptors = () if descriptor < 0 else (descriptor,)
                    channel.send(sock, encode(answer), descriptors)
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)

    def _answered(self, upcall: msgspec.Struct) -> tuple[msgspec.Struct, int]:
        try:
            if isinstance(upcall, worker_frames.UseTool):
                tools = self._tools.get(upcall.execution_id)
                return worker_frames.ToolAnswered(tools.use(upcall) if tools else None), NEVER
            return self._answer(self, upcall)
        except Exception as error:  # noqa: BLE001 - reported to the worker; bugs also to stderr
            return failure_of(error), NEVER

    def _reap_now(self) -> None:
        self.is_ready = False
        self.kill()  # it may have closed the socket and live on
        with contextlib.suppress(ChildProcessError):  # the embedding process may reap everything
            os.waitpid(self.pid, 0)
        self.requests.pool.cut()
        self._control.close()
        if not self._began.is_set():
            self._failure = self._failure or LaunchError(
                f"worker {self.number} ended as it started"
            )
            self._began.set()
        self._ended.set()
        for work in self._last:
            work()
        self._on_end(self)


class _PoolOfWorker(ConnectionPool):
    """Connections to a worker, whose end is a LauncherLost; `has_died` tells it from other errors."""

    has_died: Callable[[], bool]
    kept = 1024  # as many as calls may run: another one is a thread of the worker

    def _new_connection(self) -> _Connection:
        try:
            return super()._new_connection()
        except LaunchError as error:  # it was killed before it answered the greeting
            if isinstance(error, LauncherLost) or not self.has_died():
                raise
            raise LauncherLost(cell_began=False) from None

    def _end_of(self, error: ClosedError) -> CellwrightError:
        return LauncherLost(cell_began=True) if self.has_died() else super()._end_of(error)


class _ToolsOfExecution:
    """The tools that the program of one execution may call."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._open = 0
        self._has_ended = False

    def use(self, upcall: worker_frames.UseTool) -> Answer | None:
        """Return the answer of a tool; None if the program is to be stopped without one."""
        with self._lock:
            self._open += 1
        answers: list[Answer] = []
        call = Call(upcall.number, upcall.name, upcall.arguments, upcall.site, upcall.alone)
        try:
            if self._request.on_call:
                self._request.on_call(call, answers.append)
        finally:
            with self._lock:
                self._open -= 1
                is_orphan = self._has_ended
            if is_orphan and self._request.orphans:
                self._request.orphans.add(-1)
        return answers[0] if answers else None

    def end(self) -> None:
        """Count the calls that still run as orphans."""
        with self._lock:
            self._has_ended, still = True, self._open
        if self._request.orphans:
            self._request.orphans.add(still)


def _spawned(hidden: Collection[str]) -> tuple[_socket.SocketType, int]:
    """Start a worker; return its control socket and its pid.  Raises LaunchError."""
    executable = interpreter()
    ours, theirs = channel.pair()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
    ]
    catchable = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
    environment = {name: each for name, each in os.environ.items() if name not in hidden}
    try:
        pid = os.posix_spawn(
            executable, [executable, "-I", "-S", "-c", _BOOTSTRAP], environment,
            file_actions=actions, setsid=True, setsigmask=[], setsigdef=catchable,
        )  # fmt: skip
        paths = [os.path.abspath(each) for each in (*sys.path, *import_paths(()))]
        ours.send(json.dumps(list(dict.fromkeys(paths))).encode())
    except OSError as error:
        ours.close()
        raise LaunchError(f"cannot start {executable}: {error.strerror}") from None
    finally:
        theirs.close()
    return ours, pid
