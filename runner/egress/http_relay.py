"""`RequestRelay`: the requests of one plain HTTP connection, each of which the rules allow (RFC 9112).

h11 parses both directions and every message is written anew, so the server gets the request that was
decided about and no byte beside it.  A request is read only after the answer to the one before, and
nothing but HTTP/1.1 follows: an offer to upgrade is not passed on.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterable

import h11 as h11

from ...policies.network.names import canonical_name
from ...policies.network.rules import HttpRequest
from .relay import RefusedError, Turns

WhyNot = Callable[[HttpRequest], str]  # a request must not be made; empty if it may
_CHUNK_BYTES = 64 * 1024
_MOST_HEAD_BYTES = 64 * 1024
_MOST_PIECES = 256  # of a head
_MOST_INTERIM = 16  # answers, such as 103, before the final one (RFC 9110, 15.2)
_HEAD_SECONDS = 15.0
_DRAIN_SECONDS, _DRAIN_BYTES = 1.0, 1 << 20  # of a request that was refused
_STANDARD_PORT = 80
# Of one connection, not of a request (RFC 9110, 7.6.1); the rest of `Expect` is answered here.
_OF_CONNECTION = frozenset(
    (
        b"connection", b"expect", b"http2-settings", b"keep-alive", b"proxy-connection", b"te",
        b"upgrade",
    )
)  # fmt: skip
_REFUSED = (
    "HTTP/1.1 {status} Refused\r\nContent-Type: text/plain; charset=us-ascii\r\n"
    "Content-Length: {length}\r\nConnection: close\r\n\r\n{text}"
)
_Headers = list[tuple[bytes, bytes]]


class _Side:
    """A socket, and the state of HTTP on it."""

    def __init__(
        self, sock: socket.socket, role: type[h11.CLIENT] | type[h11.SERVER], turns: Turns,
        on_sent: Callable[[int], None], on_received: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.sock = sock
        self.turns = turns
        self.http = h11.Connection(role, _MOST_HEAD_BYTES)
        self._on_sent = on_sent
        self._on_received = on_received
        self._loop = asyncio.get_running_loop()

    async def next(self) -> object:
        """Return the next event; raises OSError and h11.RemoteProtocolError."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            await self.read()
        return event

    async def read(self) -> None:
        data = await self._loop.sock_recv(self.sock, _CHUNK_BYTES)
        self._on_received(len(data))
        self.http.receive_data(data)
        await self.turns.wait()

    async def send(self, event: h11.Event) -> None:
        """Send what an event is on the wire; raises OSError, h11.LocalProtocolError and what `on_sent`
        raises."""
        if data := self.http.send(event):
            self._on_sent(len(data))
            await self._loop.sock_sendall(self.sock, data)
            await self.turns.wait()  # one piece that was received can be thousands of events

    def has_ended_message(self) -> bool:
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE


class RequestReader:
    """Reads the requests of a program, and refuses those that the rules do not allow.

    `request` is the one that has no whole answer yet.
    """

    def __init__(
        self,
        guest: socket.socket,
        first: bytes,
        name: str,
        port: int,
        why_not: WhyNot,
        turns: Turns,
    ) -> None:
        """`first` was read already; requests must be for `name` on `port`."""
        self._name = name
        self._port = port
        self._why_not = why_not
        self.used_at = time.monotonic()
        self.request: HttpRequest | None = None
        self.side = _Side(guest, h11.SERVER, turns, self._use, self._use)
        if first:  # h11 takes no bytes for the end
            self.side.http.receive_data(first)

    def _use(self, size: int) -> None:
        self.used_at = time.monotonic()

    def why_not_now(self) -> str:
        """Return why the request that has no whole answer must end, empty if it may go on."""
        return self._why_not(self.request) if self.request else ""

    async def next(self) -> h11.Request | None:
        """Return the next request as it goes to the server, None at the end of the stream.

        Raises RefusedError, after the program was told in an answer, and OSError.
        """
        try:
            event = await self._head()
        except h11.RemoteProtocolError:
            raise await self._refused(400, "the request is not valid HTTP/1.1") from None
        except TimeoutError:
            why = f"no whole request within {_HEAD_SECONDS:g} s"
            raise await self._refused(408, why) from None
        if not isinstance(event, h11.Request):
            return None
        if why := self._why_refused(event):
            raise await self._refused(403, why)
        return h11.Request(method=event.method, target=event.target, headers=self._passed_on(event))

    async def _head(self) -> object:
        pieces = 0
        is_begun = bool(self.side.http.trailing_data[0])
        async with asyncio.timeout(_HEAD_SECONDS if is_begun else None) as timer:
            while (event := self.side.http.next_event()) is h11.NEED_DATA:
                await self.side.read()
                if not is_begun:
                    is_begun = True
                    timer.reschedule(asyncio.get_running_loop().time() + _HEAD_SECONDS)
                pieces += 1
                if pieces > _MOST_PIECES:
                    raise h11.RemoteProtocolError("a head in too many pieces")
        return event

    def _why_refused(self, request: h11.Request) -> str:
        names = [name for name, _ in request.headers]
        if request.http_version not in (b"1.0", b"1.1"):
            return "a version of HTTP that is not read"
        if b"transfer-encoding" in names and (
            b"content-length" in names or request.http_version == b"1.0"
        ):
            return "a request with two lengths"
        for name, value in request.headers:
            if name == b"host" and not self._is_own(value.decode("latin-1")):
                return f"the header Host is {value[:253].decode('latin-1')!a}"
        if request.method == b"CONNECT" or not request.target.startswith(b"/"):
            return "the target of the request is not a path"
        path, _, query = request.target.decode("ascii", "replace").partition("?")
        headers = tuple(name.decode("ascii") for name in names)
        self.request = HttpRequest(request.method.decode("ascii"), path, query, headers)
        return self._why_not(self.request)

    def _is_own(self, authority: str) -> bool:
        name, _, port = authority.partition(":")
        try:
            return canonical_name(name) == self._name and port in ("", str(self._port))
        except ValueError:
            return False

    def _passed_on(self, request: h11.Request) -> _Headers:
        own = self._name if self._port == _STANDARD_PORT else f"{self._name}:{self._port}"
        left_out = _OF_CONNECTION | {b"host"}
        headers = [(b"Host", own.encode("ascii")), *_without(left_out, request)]
        return headers + ([(b"Connection", b"close")] if _closes(request) else [])

    async def _refused(self, status: int, why: str) -> RefusedError:
        """Answer a request that is refused; return the error to raise."""
        text = f"cellwright: {why}\n"
        answer = _REFUSED.format(status=status, length=len(text), text=text).encode("ascii")
        loop, guest = asyncio.get_running_loop(), self.side.sock
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(_DRAIN_SECONDS):
                await loop.sock_sendall(guest, answer)
                guest.shutdown(socket.SHUT_WR)
                # A close with unread bytes is a reset, by which the program could miss the answer.
                left = _DRAIN_BYTES
                while left > 0 and (data := await self.side.turns.receive(guest, _CHUNK_BYTES)):
                    left -= len(data)
        return RefusedError(why, is_told=True)


class RequestRelay:
    """Passes on requests, and their answers, until one end closes or a request is refused."""

    def __init__(
        self, reader: RequestReader, first: h11.Request, outside: socket.socket,
        on_bytes: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """`first` is the first request; `on_bytes` is as for a Relay."""
        self._reader = reader
        self._first = first
        self._on_bytes = on_bytes
        self._guest = reader.side
        self._outside = _Side(
            outside, h11.CLIENT, reader.side.turns, self._count_sent, self._count_received
        )
        self.sent_bytes = self.received_bytes = 0
        self.is_uploaded = False

    @property
    def used_at(self) -> float:
        return self._reader.used_at

    def why_not_now(self) -> str:
        """Return why the rules do not allow the request that is being answered."""
        return self._reader.why_not_now()

    async def run(self, uploaded: asyncio.Event) -> None:
        """Relay until an end closes; raises OSError, RefusedError and what `on_bytes` raises."""
        request: h11.Request | None = self._first
        try:
            while request and await self._exchange(request, uploaded):
                self._reader.request = None
                self._guest.http.start_next_cycle()
                self._outside.http.start_next_cycle()
                request = await self._next()
            self.is_uploaded = True
        except h11.LocalProtocolError:
            raise OSError(errno.EPROTO, "the answer cannot be passed on") from None
        finally:
            uploaded.set()

    async def _next(self) -> h11.Request | None:
        """Return the next request; None once either side has closed, or the server speaks unasked."""
        asked = asyncio.create_task(self._reader.next())
        ended = asyncio.create_task(self._outside.read())
        try:
            await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
            request = await asked if asked.done() else None
            spoke = self._outside.http.trailing_data != (b"", False)  # and waits for its turn
            return None if spoke or ended.done() else request
        finally:
            await _end(asked, ended)

    async def _exchange(self, request: h11.Request, uploaded: asyncio.Event) -> bool:
        """Pass on one request and its answer; return whether another one may follow."""
        uploaded.clear()
        await self._outside.send(request)
        if self._guest.http.they_are_waiting_for_100_continue:
            await self._guest.send(h11.InformationalResponse(status_code=100, headers=[]))
        upload = asyncio.create_task(self._upload(uploaded))
        download = asyncio.create_task(self._download(request.method))
        try:
            await asyncio.gather(upload, download)
        finally:
            await _end(upload, download)
        if self._outside.http.trailing_data[0]:  # it would be taken for the answer to the next one
            return False
        return self._guest.has_ended_message() and self._outside.has_ended_message()

    async def _upload(self, uploaded: asyncio.Event) -> None:
        while True:
            try:
                event = await self._guest.next()
            except h11.RemoteProtocolError:
                raise RefusedError("the body of a request is not valid HTTP/1.1") from None
            try:
                if not isinstance(event, h11.Data):
                    await self._outside.send(h11.EndOfMessage())  # without trailers
                    return uploaded.set()
                await self._outside.send(h11.Data(data=bytes(event.data)))
            except OSError:  # the server takes no more, but it may still answer
                return None

    async def _download(self, method: bytes) -> None:
        event, interim = await self._answered(), 0
        while isinstance(event, h11.InformationalResponse):
            interim += 1
            if interim > _MOST_INTERIM:
                raise OSError(errno.EPROTO, f"more than {_MOST_INTERIM} interim answers")
            event = await self._answered()
        if not isinstance(event, h11.Response):
            raise OSError(errno.ECONNRESET, "the server closed the connection")
        headers = _without(_OF_CONNECTION, event)
        if _closes(event) or _ends_by_closing(event, method):
            headers.append((b"Connection", b"close"))
        await self._guest.send(
            h11.Response(status_code=event.status_code, reason=event.reason, headers=headers)
        )
        while isinstance(event := await self._answered(), h11.Data):
            await self._guest.send(h11.Data(data=bytes(event.data)))
        await self._guest.send(h11.EndOfMessage())

    async def _answered(self) -> object:
        try:
            return await self._outside.next()
        except h11.RemoteProtocolError:
            raise OSError(errno.EPROTO, "the answer is not valid HTTP/1.1") from None

    def _count_sent(self, size: int) -> None:
        self._on_bytes(size, 0)
        self.sent_bytes += size

    def _count_received(self, size: int) -> None:
        self._on_bytes(0, size)
        self.received_bytes += size
        self._reader.used_at = time.monotonic()


async def _end(*tasks: "asyncio.Task[h11.Request | None] | asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _without(names: frozenset[bytes], message: h11.Request | h11.Response) -> _Headers:
    return [(raw, value) for raw, value in message.headers.raw_items() if raw.lower() not in names]


def _closes(message: h11.Request | h11.Response) -> bool:
    """Tell whether no other message follows on the connection."""
    options = [value.lower() for name, value in message.headers if name == b"connection"]
    return message.http_version < b"1.1" or any(b"close" in each for each in options)


def _ends_by_closing(answer: h11.Response, method: bytes) -> bool:
    names: Iterable[bytes] = [name for name, _ in answer.headers]
    has_body = method != b"HEAD" and answer.status_code not in (204, 304)
    return has_body and not {b"content-length", b"transfer-encoding"} & set(names)
