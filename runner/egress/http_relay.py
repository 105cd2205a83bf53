"""`RequestRelay`: the requests of one HTTP connection, each of which the rules allow (RFC 9112).

h11 parses both directions, and every message is written anew, so that the server gets exactly the
request that was decided about. A request is read only after the answer to the one before, and nothing
but HTTP/1.1 follows: an offer to upgrade is not passed on, except that of a WebSocket to a host with
credentials where the rules allow every request.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Iterable

import h11 as h11

from ...policies.network.canonical import canonical_name
from ...policies.network.rules import HttpRequest
from .connection_relay import RefusedError, Stream, Turns
from .credential_exchange import CredentialExchange, Forms, Replacer, UnfitValueError

WhyNot = Callable[[HttpRequest], str]  # returns why a request is refused; empty if it is allowed
_CHUNK_BYTES = 64 * 1024
_MOST_HEAD_BYTES = 64 * 1024
_MOST_PIECES = 256  # pieces of a header section
_MOST_INTERIM = 16  # interim responses, such as 103, before the final one (RFC 9110, 15.2)
_HEAD_SECONDS = 15.0
_SWITCHING = 101
_DRAIN_SECONDS, _DRAIN_BYTES = 1.0, 1 << 20  # read of a refused request
_STANDARD_PORTS = {"http": 80, "https": 443}
# Hop-by-hop headers (RFC 9110, 7.6.1). The relay itself answers `Expect`.
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
_UNCHANGED = Replacer(Forms(()), bytes)


class _Side:
    def __init__(
        self, stream: Stream, role: type[h11.CLIENT] | type[h11.SERVER], turns: Turns,
        on_sent: Callable[[int], None], on_received: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.stream = stream
        self.turns = turns
        self.http = h11.Connection(role, _MOST_HEAD_BYTES)
        self._on_sent = on_sent
        self._on_received = on_received

    async def next(self) -> object:
        """Return the next event; raises OSError and h11.RemoteProtocolError."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            await self.read()
        return event

    async def read(self) -> None:
        data = await self.stream.receive(_CHUNK_BYTES)
        self._on_received(len(data))
        self.http.receive_data(data)
        await self.turns.wait()

    async def send(self, event: h11.Event) -> None:
        """Send the bytes of an event; raises OSError, h11.LocalProtocolError and the exceptions of
        `on_sent`."""
        if data := self.http.send(event):
            self._on_sent(len(data))
            await self.stream.send(data)
            await self.turns.wait()  # one received piece can hold thousands of events

    async def copy_to(self, other: "_Side", change: Callable[[bytes], bytes]) -> None:
        """Pass on what comes after an upgrade, to the end."""
        data = self.http.trailing_data[0]
        while data or (data := await self.stream.receive(_CHUNK_BYTES)):
            self._on_received(len(data))
            changed = change(data)
            other._on_sent(len(changed))
            await other.stream.send(changed)
            await self.turns.wait()
            data = b""
        await other.stream.end()

    async def send_data(self, data: bytes) -> None:
        if data:
            await self.send(h11.Data(data=data))

    def has_ended_message(self) -> bool:
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE


class RequestReader:
    """Reads the requests of a program, and refuses those that the rules do not allow.

    `request` is the one that has no whole answer yet.
    """

    def __init__(
        self, guest: Stream, first: bytes, name: str, port: int, why_not: WhyNot, turns: Turns,
        exchange: CredentialExchange | None = None, *, may_upgrade: bool = False,
    ) -> None:  # fmt: skip
        """`first` was read already; requests must be for `name` on `port`. `exchange`: of a sandbox
        with credentials. `may_upgrade`: to a WebSocket."""
        self._may_upgrade = may_upgrade
        self._name = name
        self._port = port
        self._why_not = why_not
        self.exchange = exchange
        self.used_at = time.monotonic()
        self.request: HttpRequest | None = None
        self.side = _Side(guest, h11.SERVER, turns, self._use, self._use)
        if first:  # h11 takes empty bytes as the end of the stream
            self.side.http.receive_data(first)

    def _use(self, size: int) -> None:
        self.used_at = time.monotonic()

    def why_not_now(self) -> str:
        """Return why an unanswered request must end; empty if it may continue."""
        return self._why_not(self.request) if self.request else ""

    async def next(self) -> h11.Request | None:
        """Return the next request as it goes to the server, None at the end of the stream.

        Raises RefusedError, after answering the program, and OSError.
        """
        try:
            event = await self._head()
        except h11.RemoteProtocolError:
            raise await self.refused(400, "the request is not valid HTTP/1.1") from None
        except TimeoutError:
            why = f"no whole request within {_HEAD_SECONDS:g} s"
            raise await self.refused(408, why) from None
        if not isinstance(event, h11.Request):
            return None
        if why := self._why_refused(event):
            raise await self.refused(403, why)
        target, headers = event.target, self._passed_on(event)
        if self.exchange and self.request:
            self.exchange.begin(self.request, self.side.stream.scheme)
            target, headers = self.exchange.target(target), self.exchange.headers(headers)
        return h11.Request(method=event.method, target=target, headers=headers)

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
        standard = _STANDARD_PORTS[self.side.stream.scheme]
        own = self._name if self._port == standard else f"{self._name}:{self._port}"
        left_out = _OF_CONNECTION | {b"host"}
        headers = [(b"Host", own.encode("ascii")), *_without(left_out, request)]
        if self._may_upgrade and _upgrades(request):
            return [*headers, (b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        return headers + ([(b"Connection", b"close")] if _closes(request) else [])

    async def refused(self, status: int, why: str) -> RefusedError:
        """Answer a request that is refused; return the error to raise."""
        text = f"cellwright: {why}\n"
        answer = _REFUSED.format(status=status, length=len(text), text=text).encode("ascii")
        guest = self.side.stream
        with contextlib.suppress(OSError):  # includes TimeoutError
            async with asyncio.timeout(_DRAIN_SECONDS):
                await guest.send(answer)
                await guest.end()
                # Closing with unread bytes sends a reset, and the program could lose the answer.
                left = _DRAIN_BYTES
                while left > 0 and (data := await guest.receive(_CHUNK_BYTES)):
                    left -= len(data)
                    await self.side.turns.wait()
        return RefusedError(why, is_answered=True)


class RequestRelay:
    """Passes on requests, and their answers, until one end closes or a request is refused."""

    def __init__(
        self, reader: RequestReader, first: h11.Request, outside: Stream,
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
            await self._agree()
            while request and await self._exchange(request, uploaded):
                self._reader.request = None
                self._guest.http.start_next_cycle()
                self._outside.http.start_next_cycle()
                request = await self._next()
            self.is_uploaded = True
            for each in (self._guest.stream, self._outside.stream):
                with contextlib.suppress(OSError):
                    await each.end()
        except h11.LocalProtocolError:
            raise OSError(errno.EPROTO, "the answer cannot be passed on") from None
        finally:
            uploaded.set()

    async def _agree(self) -> None:
        """Agree with the server on TLS, if it is spoken; tell the program why that failed."""
        try:
            await self._outside.stream.handshake()
        except OSError as error:
            why = getattr(error, "verify_message", "") or error.strerror or "no TLS in time"
            raise await self._reader.refused(502, f"the server: {ascii(why)[1:-1]}") from None

    async def _next(self) -> h11.Request | None:
        """Return the next request; None once either side has closed, or the server speaks unasked."""
        asked = asyncio.create_task(self._reader.next())
        ended = asyncio.create_task(self._outside.read())
        try:
            await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
            request = await asked if asked.done() else None
            spoke = self._outside.http.trailing_data != (b"", False)  # bytes wait for their turn
            return None if spoke or ended.done() else request
        finally:
            await _end(asked, ended)

    async def _exchange(self, request: h11.Request, uploaded: asyncio.Event) -> bool:
        """Pass on one request and its answer; return whether another one may follow."""
        uploaded.clear()
        upload, answer = _UNCHANGED, _UNCHANGED
        if exchange := self._reader.exchange:
            upload, answer = exchange.body(list(request.headers)), exchange.answer()
        await self._outside.send(request)
        if self._guest.http.they_are_waiting_for_100_continue:
            await self._guest.send(h11.InformationalResponse(status_code=100, headers=[]))
        tasks = (
            asyncio.create_task(self._upload(uploaded, upload)),
            asyncio.create_task(self._download(request.method, answer)),
        )
        try:
            await asyncio.gather(*tasks)
            if self._outside.http.our_state is h11.SWITCHED_PROTOCOL:
                return await self._pass_frames(uploaded, answer)
        finally:
            await _end(*tasks)
        if self._outside.http.trailing_data[
            0
        ]:  # it would be taken as the answer to the next request
            return False
        return self._guest.has_ended_message() and self._outside.has_ended_message()

    async def _pass_frames(self, uploaded: asyncio.Event, put: Replacer) -> bool:
        """Relay a WebSocket until both ends have closed. Frames of servers are bytes as they are (RFC
        6455, 5.1), so values are found in them; those of clients are masked by random keys."""
        tasks = (
            asyncio.create_task(self._guest.copy_to(self._outside, bytes)),
            asyncio.create_task(self._outside.copy_to(self._guest, put.feed)),
        )
        try:
            await asyncio.gather(*tasks)
        finally:
            uploaded.set()
            await _end(*tasks)
        return False

    async def _upload(self, uploaded: asyncio.Event, put: Replacer) -> None:
        while True:
            try:
                event = await self._guest.next()
            except h11.RemoteProtocolError:
                raise RefusedError("the body of a request is not valid HTTP/1.1") from None
            try:
                if not isinstance(event, h11.Data):
                    await self._outside.send_data(put.end())
                    await self._outside.send(h11.EndOfMessage())  # without trailers
                    return uploaded.set()
                await self._outside.send_data(put.feed(bytes(event.data)))
            except UnfitValueError as error:
                raise RefusedError(str(error)) from None
            except OSError:  # the server reads no more, but may still answer
                return None

    async def _download(self, method: bytes, put: Replacer) -> None:
        event = await self._final_answer()
        if isinstance(event, h11.InformationalResponse):
            headers = [(name, put.whole(value)) for name, value in event.headers.raw_items()]
            await self._guest.send(
                h11.InformationalResponse(status_code=_SWITCHING, headers=headers)
            )
            return
        if not isinstance(event, h11.Response):
            raise OSError(errno.ECONNRESET, "the server closed the connection")
        await self._require_readable(event, method)
        headers = [
            (put.whole(name), put.whole(value)) for name, value in _without(_OF_CONNECTION, event)
        ]
        if _closes(event) or _ends_by_closing(event, method):
            headers.append((b"Connection", b"close"))
        await self._guest.send(
            h11.Response(
                status_code=event.status_code, reason=put.whole(event.reason), headers=headers
            )
        )  # fmt: skip
        while isinstance(event := await self._answered(), h11.Data):
            await self._guest.send_data(put.feed(bytes(event.data)))
        await self._guest.send_data(put.end())
        await self._guest.send(h11.EndOfMessage())

    async def _final_answer(self) -> object:
        """Return the final answer, or that which switches to a WebSocket; others are left out."""
        event, interim = await self._answered(), 0
        while isinstance(event, h11.InformationalResponse) and event.status_code != _SWITCHING:
            interim += 1
            if interim > _MOST_INTERIM:
                raise OSError(errno.EPROTO, f"more than {_MOST_INTERIM} interim answers")
            event = await self._answered()
        return event

    async def _require_readable(self, answer: h11.Response, method: bytes) -> None:
        """Refuse a body in which values could not be found.  Servers were asked for none."""
        exchange = self._reader.exchange
        if not (exchange and exchange.is_read and _has_body(answer, method)):
            return
        for name, value in answer.headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise await self._reader.refused(502, "the answer is compressed, although unasked")

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


def _upgrades(request: h11.Request) -> bool:
    """Tell whether a program asks for a WebSocket, and for nothing else."""
    asked = [value.lower() for name, value in request.headers if name == b"upgrade"]
    return asked == [b"websocket"] and request.method == b"GET" and request.http_version == b"1.1"


def _has_body(answer: h11.Response, method: bytes) -> bool:
    return method != b"HEAD" and answer.status_code not in (204, 304)


def _ends_by_closing(answer: h11.Response, method: bytes) -> bool:
    names: Iterable[bytes] = [name for name, _ in answer.headers]
    return _has_body(answer, method) and not {b"content-length", b"transfer-encoding"} & set(names)
