"""Calls of tools over the control socket: a call goes out, and its answer comes back.

Any thread may call; one waiting thread reads for all.  In a coroutine a call is awaited, elsewhere it
returns the value.
"""

import json
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..channel import LAST, PACKET_BYTES, Channel, Receiver, has_news, packets
from ..messages import NOT_JSON, Answer, Call, decoder, encode, encode_behind
from .import_finders import PLACE
from .plain_values import NotPlain, plain, quick_json

_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_DECODE: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # no function of Python
# frames of these files stand between the program and the call of a tool
FILES = tuple(
    os.path.join(os.path.dirname(__file__), name)
    for name in ("import_finders.py", "plain_values.py", "tool_caller.py", "tool_module.py")
)
_NOT_THE_PROGRAM = (*FILES, f"{PLACE}/")  # frames of these files are not the program's
_ANSWERS = decoder(Answer)
_GONE = ("closed", "the host has gone")
_AT_ONCE = 32  # the supervisor ends a cell that has 64 calls open


class GuestToolError(Exception):
    """A call of a tool that was refused, or that failed; `kind` says how.

    Programs see it as `tools.ToolError`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


GuestToolError.__module__ = "tools"
GuestToolError.__name__ = GuestToolError.__qualname__ = "ToolError"


class ToolCaller:
    """Calls tools over one control socket, from any thread and any event loop of one process."""

    def __init__(self, sock: Channel, control: int, receiver: Receiver) -> None:
        self._sock = sock
        self._control = control
        self._receiver = receiver
        self._process = self._main = 0  # set by `open`, because the launcher makes the object
        self._changed = threading.Condition()
        self._reading = False
        self._open = self._sites = False
        self._closing = -1  # becomes readable when no thread may read any more
        self._number = 0
        self._waiting: dict[int, Callable[[Answer], None]] = {}

    def is_ours(self) -> bool:
        """Tell whether this is the process that may call, not a child of it."""
        return os.getpid() == self._process

    def open(self, *, sites: bool) -> None:
        """Allow calls; with `sites` each says where in the program it stands."""
        self._sites = sites
        if not self._process:
            self._process, self._main = os.getpid(), threading.get_ident()
        with self._changed:
            self._closing = os.eventfd(0)
            self._open = True

    def close(self) -> None:
        """Stop calls and reads until the next request; waiting calls fail.  Without effect if none is
        open: the number of the descriptor may be a file of the program's by now."""
        with self._changed:
            if self._closing < 0:
                return
            self._open = False
            waiting, self._waiting = self._waiting, {}
            for number, deliver in waiting.items():
                deliver(Answer(number, None, "closed", "the program has ended"))
            os.eventfd_write(self._closing, 1)
            self._changed.notify_all()
            # An interrupt may have come before the reading thread could say that it stopped reading.
            self._changed.wait_for(lambda: not self._reading, timeout=0.5)
            self._reading = False
            closing, self._closing = self._closing, -1
            os.close(closing)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the value that the tool gave, or in a coroutine what to await for it."""
        site = _site() if self._sites else ""
        asyncio = sys.modules.get("asyncio")
        if asyncio and (loop := asyncio._get_running_loop()):
            return self._call_later(loop, name, arguments, site)
        alone = len(sys._current_frames()) == 1
        if alone and self._open and not self._reading and len(self._waiting) < _AT_ONCE:
            return _value(self._call_alone(name, arguments, site))
        return _value(self._call(name, arguments, site, alone=alone))

    def suggestion_for(self, name: str) -> str:
        """Return the host's message about an unknown tool; empty if the host cannot be asked now."""
        site = _site() if self._sites else ""
        try:
            answer = self._call("tools.describe", {"name": name}, site, alone=False)
        except GuestToolError:
            return ""
        return answer.message if answer.kind == "not_found" else ""

    def _call(self, name: str, arguments: Mapping[str, Any], site: str, *, alone: bool) -> Answer:
        answers: list[Answer] = []
        number = self._send(name, arguments, site, answers.append, alone=alone)
        try:
            self._wait(lambda: bool(answers))
        finally:
            if number in self._waiting:
                self._waiting[number] = _ignore
        return answers[0]

    def _call_alone(self, name: str, arguments: Mapping[str, Any], site: str) -> Answer:
        """Return the answer to a call of the program's only thread: no other one reads or waits, unless
        a signal handler starts it.

        It calls few functions: each takes a microsecond here, three times as long as in a loop, since
        the host has used the processor's caches meanwhile.
        """
        given = quick_json(arguments) or _encoded(arguments)
        if os.getpid() != self._process:
            self._refuse_child()
        self._number = number = self._number + 1
        packet = encode_behind(LAST, Call(number, name, given, site, True))
        self._reading = True
        try:
            if len(packet) <= PACKET_BYTES:
                self._sock.send(packet)
            else:
                for piece in packets(bytes(packet[1:])):
                    self._sock.send(piece)
            while (frame := self._receiver.receive()) != b"":
                if frame:
                    answer: Answer = _ANSWERS.decode(frame)
                    if answer.number == number:
                        return answer
                    self._deliver(answer)
            raise GuestToolError(*_GONE)
        except BaseException:
            self._waiting[number] = _ignore  # the host counts the call as open until it answers
            raise
        finally:
            self._reading = False
            if self._waiting:
                with self._changed:
                    self._changed.notify_all()

    async def _call_later(
        self, loop: Any, name: str, arguments: Mapping[str, Any], site: str
    ) -> Any:
        future = loop.create_future()

        def deliver(answer: Answer) -> None:
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(answer))

        while len(self._waiting) >= _AT_ONCE:
            self._read_what_is_there()
            await _a_moment(loop)
        number = self._send(name, arguments, site, deliver)
        loop.add_reader(self._control, self._read_what_is_there)
        try:
            return _value(await future)
        finally:
            if (
                number in self._waiting
            ):  # abandoned; the host counts the call as open until it answers
                self._waiting[number] = _ignore
            if all(deliver is _ignore for deliver in list(self._waiting.values())):
                loop.remove_reader(self._control)

    def _send(
        self, name: str, arguments: Mapping[str, Any], site: str, deliver: Callable[[Answer], None],
        *, alone: bool = False,
    ) -> int:  # fmt: skip
        given = quick_json(arguments) or _encoded(arguments)
        self._refuse_child()
        while True:
            self._wait(self._has_room)
            with self._changed:
                if self._has_room():  # no other thread was faster
                    return self._send_now((name, given, site, alone), deliver)

    def _refuse_child(self) -> None:
        if not self.is_ours():
            raise GuestToolError("closed", "only the program's first process can call tools")

    def _has_room(self) -> bool:
        return len(self._waiting) < _AT_ONCE or not self._open

    def _send_now(
        self, call: tuple[str, bytes, str, bool], deliver: Callable[[Answer], None]
    ) -> int:
        """Send a call; `_changed` is held."""
        if not self._open:
            raise GuestToolError("closed", "there is no request in which to call a tool")
        self._number += 1
        self._waiting[self._number] = deliver
        for packet in packets(encode(Call(self._number, *call))):
            self._sock.send(packet)
        return self._number

    def _deliver(self, answer: Answer) -> None:
        with self._changed:
            if deliver := self._waiting.pop(answer.number, None):
                deliver(answer)
            self._changed.notify_all()

    def _wait(self, is_met: Callable[[], bool]) -> None:
        """Wait until the call is answered. If no other thread reads, this one reads for all."""
        while not is_met():
            with self._changed:
                self._changed.wait_for(lambda: is_met() or not self._reading)
                if is_met():
                    return
                self._reading = True
            self._read()

    def _read_what_is_there(self) -> None:
        with self._changed:
            if self._reading or not self._open or not has_news(self._control):
                return
            self._reading = True
        self._read()

    def _read(self) -> None:
        """Receive a packet and deliver the answer that it completes. This thread holds `_reading`.

        No other thread may begin to read before the delivery, because it could be waiting for this
        answer.
        """
        answer = None
        try:
            # Only the main thread closes, so it cannot close while it reads.
            reads_on = threading.get_ident() == self._main or self._has_news()
            answer = self._receive() if reads_on else None
        finally:
            with self._changed:
                self._reading = False
                if answer and (deliver := self._waiting.pop(answer.number, None)):
                    deliver(answer)
                self._changed.notify_all()

    def _receive(self) -> Answer | None:
        frame = self._receiver.receive()
        if frame == b"":
            raise GuestToolError(*_GONE)
        return _ANSWERS.decode(frame) if frame else None

    def _has_news(self) -> bool:
        """Wait for a packet; False if the program ends before there is one."""
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        return self._closing not in (descriptor for descriptor, _ in poll.poll())


def _encoded(arguments: Mapping[str, Any]) -> bytes:
    """Return JSON of arguments; raises TypeError naming the one that JSON cannot hold."""
    try:
        return _ENCODE(arguments).encode()
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return _ENCODE(plain(arguments)).encode()
    except NotPlain as error:
        raise TypeError(f"{NOT_JSON}{error}") from None


def _ignore(_: Answer) -> None:
    """Drop the answer to a call that was given up."""


async def _a_moment(loop: Any) -> None:
    future = loop.create_future()
    loop.call_later(0.001, lambda: future.done() or future.set_result(None))
    await future


def _site() -> str:
    frame = sys._getframe(2)
    while (name := frame.f_code.co_filename).startswith(_NOT_THE_PROGRAM) and frame.f_back:
        frame = frame.f_back
    return f"{name[-100:]}:{frame.f_lineno}"


def _value(answer: Answer) -> Any:
    if answer.kind:
        raise GuestToolError(answer.kind, answer.message)
    return _DECODE((answer.value or b"null").decode(), 0)[0]
