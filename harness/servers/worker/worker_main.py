"""The process of a worker: makes the cells of a sandbox, and serves its requests until it hangs up.

The main thread reads the control socket.  Each connection has a thread, which carries out one request
at a time; anything that the sandbox sends meanwhile cancels it.  Connections for upcalls lead the
other way.
"""

import _socket
import contextlib
import os
import select
import threading
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import msgspec

from ....policies.errors import ClosedError, InternalError
from ....runner import channel
from ....runner.concurrency import begin_thread
from ....runner.kernel.credentials import set_name
from ....runner.kernel.steps import Now
from ....runner.messages import decode, encode
from ...sandbox.remote import frames
from ...sandbox.remote.call_frames import error_of, failure_of
from ...sandbox.workers import worker_frames
from .worker_service import WorkerService, opened_service

_CONTROL = 3
_FRAME_BYTES = 2 << 30
_END_SECONDS = 45.0  # for taking the cells down
_A = TypeVar("_A", bound=msgspec.Struct)


class Upcalls:
    """Connections to the sandbox: one for each upcall at work, kept for the next; safe from many
    threads."""

    def __init__(self, control: _socket.SocketType) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._idle: list[_socket.SocketType] = []

    def ask(self, upcall: msgspec.Struct, kind: type[_A]) -> _A:
        """Return the answer; raises what the sandbox raises, and ClosedError if it is gone."""
        return self.ask_for_descriptor(upcall, kind)[0]

    def ask_for_descriptor(self, upcall: msgspec.Struct, kind: type[_A]) -> tuple[_A, list[int]]:
        """Do what `ask` does for an answer of one packet; return its descriptors too."""
        sock = self._taken()
        try:
            channel.send(sock, encode(upcall))
            frame, descriptors = _received(sock)
        except (OSError, channel.ProtocolError):
            sock.close()
            raise ClosedError("the sandbox was closed") from None
        with self._lock:
            self._idle.append(sock)
        answer = decode(frame, worker_frames.UpcallAnswer)
        if isinstance(answer, frames.Failure):
            raise error_of(answer)
        if not isinstance(answer, kind):
            raise InternalError(f"the sandbox answered with {type(answer).__name__}")
        return answer, descriptors

    def _taken(self) -> _socket.SocketType:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        ours, theirs = channel.pair()
        try:
            with self._lock:
                frame = encode(worker_frames.OpenUpcalls())
                channel.send(self._control, frame, (theirs.fileno(),))
        except OSError:
            ours.close()
            raise ClosedError("the sandbox was closed") from None
        finally:
            theirs.close()
        return ours

    def tell(self, frame: msgspec.Struct) -> None:
        """Send a frame on the control socket."""
        with self._lock, contextlib.suppress(OSError):
            channel.send(self._control, encode(frame))


def _received(sock: _socket.SocketType) -> tuple[bytes, list[int]]:
    """Receive a frame of any length, with the descriptors of its first packet."""
    space = _socket.CMSG_SPACE(4)
    packet, ancillary, _, _ = sock.recvmsg(
        channel.PACKET_BYTES + 1, space, _socket.MSG_CMSG_CLOEXEC
    )
    descriptors = channel.descriptors_of(ancillary)
    if not packet:
        raise ConnectionResetError
    if not channel.has_more(packet):
        return packet[1:], descriptors
    rest = channel.Receiver(sock, _FRAME_BYTES).receive_whole()
    return packet[1:] + rest, descriptors


class SandboxConnection:
    """One connection of the sandbox: the client of the request that runs (daemon/service.py)."""

    def __init__(self, sock: _socket.SocketType) -> None:
        self._socket = sock
        self._receiver = channel.Receiver(sock, _FRAME_BYTES)

    def serve(self, service: WorkerService) -> None:
        """Carry out requests until the sandbox hangs up."""
        with contextlib.closing(self._socket), contextlib.suppress(OSError):
            while frame := self._receiver.receive_whole():
                reply = self._reply_to(frame, service)
                if reply is not None:
                    channel.send(self._socket, encode(reply))

    def _reply_to(self, frame: bytes, service: WorkerService) -> msgspec.Struct | None:
        try:
            request = decode(frame, worker_frames.WorkerRequest | frames.Hello)
            if isinstance(request, frames.Cancel):  # it came after the reply
                return None
            if isinstance(request, frames.Hello):
                return frames.Welcome(frames.VERSION, os.getpid(), _FRAME_BYTES)
            return service.answer(request, self)
        except Exception as error:  # noqa: BLE001 - reported to the sandbox; bugs also to stderr
            return failure_of(error)

    def fileno(self) -> int:
        return self._socket.fileno()

    def weigh(self, extra: int) -> None:
        """Count nothing: the sandbox has checked the request."""

    def on_output(self, stream: str, data: bytes) -> None:
        chunk = frames.OutputChunk(stream, data)  # type: ignore[arg-type] # one of the two
        with contextlib.suppress(OSError):
            channel.send(self._socket, encode(chunk))

    @contextlib.contextmanager
    def terminal_quota(self) -> Iterator[None]:
        yield

    def hand_over(self, frame: msgspec.Struct, descriptors: tuple[int, ...]) -> None:
        with contextlib.suppress(OSError):
            channel.send(self._socket, encode(frame), descriptors)

    def await_end(self, watched: int) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(watched, 0)  # POLLHUP
        poll.poll()

    def is_gone(self) -> bool:
        return channel.has_news(self._socket.fileno())


def main() -> None:
    """Serve the sandbox at the control socket, and end when it hangs up."""
    set_name(Now(), "cell-worker")
    control = _socket.socket(fileno=_CONTROL)
    os.set_inheritable(_CONTROL, False)
    upcalls = Upcalls(control)
    frame = channel.Receiver(control, _FRAME_BYTES).receive_whole()
    if not frame:
        os._exit(0)
    try:
        service = opened_service(decode(frame, worker_frames.StartWorker), upcalls)
    except Exception as error:  # noqa: BLE001 - reported to the sandbox; bugs also to stderr
        upcalls.tell(failure_of(error))
        os._exit(1)
    upcalls.tell(worker_frames.Started(service.python))
    try:
        _accept(control, service)
    finally:
        begin_thread("cellwright-last", lambda: _end_after(_END_SECONDS))
        service.close()
        os._exit(0)


def _accept(control: _socket.SocketType, service: WorkerService) -> None:
    while True:
        try:
            frame, descriptors = channel.receive_with_descriptors(control)
        except (OSError, channel.ProtocolError):
            return
        if not frame:
            return
        told = decode(frame, worker_frames.ToWorker)
        (number,) = descriptors
        if isinstance(told, worker_frames.AskForSocket):
            service.ask_for_socket(told.execution_id, number)
            continue
        connection = SandboxConnection(_socket.socket(fileno=number))
        begin_thread("cellwright-request", partial(connection.serve, service))


def _end_after(seconds: float) -> None:
    threading.Event().wait(seconds)
    os._exit(1)
