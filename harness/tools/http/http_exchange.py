"""One HTTP request and its answer over a connection to a vetted address, within a deadline and a size.

The standard library reads the answer, so that the tool needs no other package: each connection carries
one request, so no answer can be mistaken for another one. Every read has the rest of the deadline as
its timeout, and counts against one budget, headers included.
"""

import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from ....policies.errors import CellwrightError
from .targets import Target

_HEADER_BYTES = 256 * 1024  # bytes of all headers and chunk sizes, in addition to the body
_CHUNK = 65_536
_MOST_INTERIM = 16  # interim responses, such as 103, before the final one (RFC 9110, 15.2)
_SWITCHING = 101
_MOST_ADDRESSES = 16
_FINAL = 200  # statuses below it are interim answers
_MOST_MEMBERS = 16  # gzip members in one body; each costs a copy of the rest

Resolve = Callable[[str, int], Sequence[str]]  # returns the addresses of a name


class HttpError(Exception):
    """A request failed: the server or the network did not answer as it should."""


class CallDeadline:
    """A moment at which a whole call ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left; raises HttpError if there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise self.passed()
        return left

    def passed(self) -> HttpError:
        return HttpError(f"no whole answer after {self._seconds:g} seconds")


class HttpAnswer(NamedTuple):
    """An answer, decompressed: the names of `headers` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes
    received_bytes: int


def system_addresses(name: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, as the host resolves it."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


class _Lookups:
    """Counts lookups, which cannot be interrupted (getaddrinfo(3)), also after their callers gave up.

    No caller takes the threads of others: names that it may ask for can have slow name servers.
    """

    _MOST, _MOST_OF_CALLER = 512, 4

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._of_callers: Counter[str] = Counter()

    def begin(self, caller: str, deadline: CallDeadline) -> None:
        """Count a lookup, once there may be one more; raises HttpError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(caller), deadline.left()):
                raise deadline.passed()
            self._of_callers[caller] += 1

    def end(self, caller: str) -> None:
        with self._changed:
            self._of_callers[caller] -= 1
            self._of_callers += Counter()  # drops entries that are zero
            self._changed.notify_all()

    def _has_room(self, caller: str) -> bool:
        return (
            self._of_callers[caller] < self._MOST_OF_CALLER
            and self._of_callers.total() < self._MOST
        )


_LOOKUPS = _Lookups()


def addresses_of(
    name: str, port: int, resolve: Resolve, deadline: CallDeadline, caller: str = ""
) -> Sequence[str]:
    """Resolve a name once, in a thread, so that the deadline holds; raises HttpError."""
    found: list[Sequence[str] | OSError] = []
    _LOOKUPS.begin(caller, deadline)

    def ask() -> None:
        try:
            found.append(resolve(name, port))
        except (OSError, UnicodeError) as error:
            found.append(OSError(str(error)))
        finally:
            _LOOKUPS.end(caller)

    thread = threading.Thread(target=ask, name="http-lookup", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread could be started
        _LOOKUPS.end(caller)
        raise HttpError(f"{name} cannot be resolved now") from None
    thread.join(deadline.left())
    if not found:
        raise deadline.passed()
    if isinstance(found[0], OSError) or not found[0]:
        raise HttpError(f"{name} cannot be resolved")
    return list(dict.fromkeys(found[0]))[:_MOST_ADDRESSES]


def dial(addresses: Sequence[str], port: int, deadline: CallDeadline) -> socket.socket:
    """Return a connection to the first address that answers; raises HttpError."""
    for number, address in enumerate(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(deadline.left() / (len(addresses) - number))
            sock.connect((address, port))
        except OSError:
            sock.close()
            continue
        except BaseException:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    deadline.left()
    raise HttpError("no connection: refused, unreachable, or no answer in time")


def secured(
    sock: socket.socket, name: str, context: ssl.SSLContext, deadline: CallDeadline
) -> socket.socket:
    """Return a TLS connection whose certificate is of `name`; raises HttpError."""
    try:
        sock.settimeout(deadline.left())
        return context.wrap_socket(sock, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        raise HttpError(f"{name}: invalid certificate: {error.verify_message}") from None
    except OSError as error:
        deadline.left()
        raise HttpError(f"{name}: no TLS connection: {error.strerror or error}") from None


def send(sock: socket.socket, data: bytes, deadline: CallDeadline) -> None:
    """Send all of `data`; raises HttpError."""
    view = memoryview(data)
    try:
        while view:
            sock.settimeout(deadline.left())
            view = view[sock.send(view[:_CHUNK]) :]
    except OSError as error:
        deadline.left()
        raise HttpError(f"the connection broke: {error.strerror or error}") from None


class _Stream(io.RawIOBase):
    """The source of http.client: a socket with a deadline and a budget of bytes."""

    def __init__(self, sock: socket.socket, deadline: CallDeadline, budget: int) -> None:
        self._sock = sock
        self._deadline = deadline
        self.budget = budget
        self.received_bytes = 0
        self._buffer = io.BufferedReader(self, _CHUNK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._deadline.left())
        count = self._sock.recv_into(buffer)
        self.received_bytes += count
        if self.received_bytes > self.budget:
            raise HttpError("the answer is too large")
        return count

    def makefile(self, *_: object) -> Any:
        """Return the one buffer of all answers: an interim one may have come with the next."""
        return self._buffer


def receive(
    sock: socket.socket, method: str, most_bytes: int, deadline: CallDeadline
) -> HttpAnswer:
    """Return the answer to a request; raises HttpError for one that is invalid, late or too large.

    `most_bytes` caps the body as it is sent, and again as it is decompressed.
    """
    stream = _Stream(sock, deadline, _HEADER_BYTES)
    with answering(stream, method, most_bytes, deadline) as (response, headers):
        body = response.read(most_bytes + 1)
        if len(body) > most_bytes:
            raise HttpError(f"the answer is larger than {most_bytes} bytes")
        if response.length:
            raise HttpError("the answer ended early")
        body = decompressed(body, headers.get("content-encoding", ""), most_bytes)
    return HttpAnswer(response.status, headers, body, stream.received_bytes)


@contextlib.contextmanager
def answering(
    source: "socket.socket | _Stream", method: str, most_bytes: int, deadline: CallDeadline
) -> Iterator[tuple[http.client.HTTPResponse, dict[str, str]]]:
    """Yield the answer to a request, to be read in pieces, and its headers.

    Raises HttpError, also for what goes wrong while it is read; `most_bytes` caps the body.
    """
    stream = source if isinstance(source, _Stream) else _Stream(source, deadline, _HEADER_BYTES)
    with (
        _errors_as_http(deadline), contextlib.closing(stream.makefile()),
        # Closed before its buffer is: else its finalizer complains (Python 3.13 and newer).
        contextlib.closing(_final(stream, method)) as response,
    ):  # fmt: skip
        stream.budget += most_bytes
        yield response, _headers(response)


def _final(stream: _Stream, method: str) -> http.client.HTTPResponse:
    """Return the final answer, whose body was not read; raises HttpError."""
    for _ in range(_MOST_INTERIM + 1):
        response = http.client.HTTPResponse(cast("socket.socket", stream), method=method)
        with contextlib.ExitStack() as unless_final:
            unless_final.callback(response.close)
            response.begin()  # skips 100 Continue, as many as the budget allows
            if response.status >= _FINAL:
                unless_final.pop_all()
                return response
            if response.status == _SWITCHING:
                raise HttpError(f"the server answered {_SWITCHING}: no other protocol is spoken")
            cast("Any", response).fp = None  # keep the buffer, which `response` would close
    raise HttpError(f"the server sent more than {_MOST_INTERIM} interim answers")


@contextlib.contextmanager
def _errors_as_http(deadline: CallDeadline) -> Iterator[None]:
    try:
        yield
    except CellwrightError:  # the caller that reads raised it; some are ValueErrors
        raise
    except (http.client.HTTPException, ValueError, zlib.error) as error:
        raise HttpError(f"the answer is invalid: {type(error).__name__}") from None
    except OSError as error:
        deadline.left()
        raise HttpError(f"the connection broke: {error.strerror or error}") from None


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in response.getheaders():
        key = name.lower()
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found


def decompressed(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Return a body without its gzip or deflate encoding; raises HttpError if it is larger than
    `most_bytes` then, before more than that was decompressed."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity") or not body:
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise HttpError(f"the answer has the unknown encoding {encoding[:40]!a}")
    found, parts = 0, []
    for _ in range(_MOST_MEMBERS):
        decoder = zlib.decompressobj(zlib.MAX_WBITS + 32)  # gzip or zlib, by the header
        part = decoder.decompress(body, most_bytes - found + 1)
        found += len(part)
        if found > most_bytes:
            raise HttpError(f"the answer is larger than {most_bytes} bytes, decompressed")
        if not decoder.eof:
            raise HttpError("the answer ended early, compressed")
        parts.append(part)
        body = decoder.unused_data
        if not body.strip(b"\0"):
            return b"".join(parts)
    raise HttpError("the answer has too many compressed parts")


def request_bytes(
    method: str, target: Target, headers: dict[str, str], body: bytes, *,
    is_absolute: bool = False, encoding: str = "gzip",
) -> bytes:  # fmt: skip
    """Return a request.  `headers` are checked; `is_absolute`: for a proxy; `encoding`: of answers."""
    line = str(target) if is_absolute else f"{target.path}{target.query}"
    lines = [
        f"{method} {line} HTTP/1.1",
        f"Host: {target.authority}",
        "Connection: close",
        f"Accept-Encoding: {encoding}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
