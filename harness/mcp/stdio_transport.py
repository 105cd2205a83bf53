"""The stdio transport of MCP: one JSON message a line over two descriptors, with a limit to each line.

The SDK's own transport reads a line however long it is.  This one works over any pair of descriptors
that can be polled: the pipes of a process or of a program in a cell, or a socket.

Lines of JSON over descriptors: a reader that bounds each line before it is parsed, and a writer.

The client of other servers and our own server share both. Neither blocks a thread, which could not be
stopped.
"""

import contextlib
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_PARTS = 200_000  # parts of one message; each becomes an object of some hundred bytes
_KEPT_STDERR_BYTES = 4096
_LAST_OUTPUT_SECONDS = 2.0

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
AtEnd = Callable[[], Awaitable[None]]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


class ProtocolViolation(Exception):  # noqa: N818 - what happened
    """The server sent a message that the protocol or cellwright's limits forbid; the connection
    ends."""


@contextlib.asynccontextmanager
async def pipe_streams(
    to_server: int, from_server: int, at_end: AtEnd
) -> AsyncIterator[TransportStreams]:
    """Give the streams of a connection; the caller owns the descriptors and closes them afterwards.

    At the end of the server's output, `at_end` is awaited for two seconds at most before the SDK's
    session learns of the end: the last lines of the server's stderr are still on their way then.  A
    line that is no message comes out as an exception, which sessions skip: servers print banners.
    """
    for descriptor in (to_server, from_server):
        os.set_blocking(descriptor, False)
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks, read_stream, write_stream:
        tasks.start_soon(_read, from_server, incoming, at_end)
        tasks.start_soon(_write, to_server, outgoing)
        try:
            yield read_stream, write_stream
        finally:
            tasks.cancel_scope.cancel()


async def _read(descriptor: int, incoming: Incoming, at_end: AtEnd) -> None:
    async with incoming:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in read_json_lines(descriptor, MAX_LINE_BYTES, _check_parts):
                if isinstance(line, RefusedLine):
                    await incoming.send(ProtocolViolation(f"it sent {line}"))
                    return
                await incoming.send(_parsed(line))
            with anyio.move_on_after(_LAST_OUTPUT_SECONDS):
                await at_end()


def _check_parts(line: bytes) -> None:
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_PARTS:
        raise RefusedLine(f"a message of more than {MAX_PARTS} parts")


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, RecursionError):
        return ValueError(f"a line of {len(line)} bytes is no message")


async def _write(descriptor: int, outgoing: Outgoing) -> None:
    async with outgoing:
        with contextlib.suppress(
            OSError
        ):  # the server has closed its input; reading reports the end
            async for each in outgoing:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                await write_all(descriptor, text.encode() + b"\n")


class StderrTail:
    """The end of a server's standard error."""

    def __init__(self) -> None:
        self.text = ""
        self._ended = anyio.Event()

    async def follow(self, descriptor: int) -> None:
        """Read until every writer has closed the descriptor."""
        os.set_blocking(descriptor, False)
        kept = b""
        while data := await read_some(descriptor):
            kept = (kept + data)[-_KEPT_STDERR_BYTES:]
            self.text = kept.decode("utf-8", "replace")
        self._ended.set()

    async def wait_until_complete(self) -> None:
        """Wait until every writer has closed the descriptor."""
        await self._ended.wait()


_READ_BYTES = 65_536


class RefusedLine(Exception):  # noqa: N818 - also a value: the reader yields it in the line's place
    """A line that is too long, or too expensive to parse; its text is the reason."""


async def read_json_lines(
    descriptor: int, longest: int, check: Callable[[bytes], None]
) -> AsyncIterator[bytes | RefusedLine]:
    """Yield each line without its newline, until the other side closes.

    A line of more than `longest` bytes yields a RefusedLine as soon as it exceeds that; the reader then
    keeps nothing of it and skips to its end.  So does a line for which `check` raises RefusedLine.  A
    last line without a newline is dropped.
    """
    line, is_skipping = bytearray(), False
    while data := await read_some(descriptor):
        *ends, rest = data.split(b"\n")
        for part in ends:
            if is_skipping:
                is_skipping = False
                continue
            line += part
            yield _checked(bytes(line), longest, check)
            line = bytearray()
        if is_skipping:
            continue
        line += rest
        if len(line) > longest:
            yield _too_long(longest)
            line, is_skipping = bytearray(), True


def _checked(line: bytes, longest: int, check: Callable[[bytes], None]) -> bytes | RefusedLine:
    if len(line) > longest:
        return _too_long(longest)
    try:
        check(line)
    except RefusedLine as refused:
        return refused
    return line


def _too_long(longest: int) -> RefusedLine:
    return RefusedLine(f"a line of more than {longest} bytes")


async def read_some(descriptor: int) -> bytes:
    """Return the next bytes, or b"" once the other side has closed or the connection has failed."""
    while True:
        await _wait_until(anyio.wait_readable, descriptor)
        try:
            return os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            continue
        except OSError:  # EIO, ECONNRESET
            return b""


async def write_all(descriptor: int, data: bytes) -> None:
    """Write `data`, waiting without a thread while the other side does not read; raises OSError.

    A blocking descriptor gets PIPE_BUF bytes at a time: a pipe that is writable takes that many without
    blocking (pipe(7)).
    """
    left = memoryview(data)
    at_once = select.PIPE_BUF if os.get_blocking(descriptor) else max(1, len(data))
    while left:
        await _wait_until(anyio.wait_writable, descriptor)
        try:
            left = left[os.write(descriptor, left[:at_once]) :]
        except BlockingIOError:
            continue


async def _wait_until(is_ready: Callable[[int], Awaitable[None]], descriptor: int) -> None:
    """Wait for a descriptor.  epoll_ctl(2) refuses regular files with EPERM: they are always ready."""
    try:
        await is_ready(descriptor)
    except PermissionError:
        await anyio.lowlevel.checkpoint()
