"""Messages over two descriptors, one JSON object a line: the stdio transport, with a limit to lines.

The SDK's own reads a line however long it is.  Works over any pair of descriptors that can be waited
for: pipes of a process, of a program in a cell, or a socket.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_PARTS = 200_000  # of one message: each becomes an object of some hundred bytes
_READ_BYTES = 65_536
_KEPT_ERRORS = 4096
_LAST_WORDS_SECONDS = 2.0

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
AtEnd = Callable[[], Awaitable[None]]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


class ProtocolViolation(Exception):  # noqa: N818 - what happened
    """A server sent what no server may; the conversation is over."""


@contextlib.asynccontextmanager
async def pipe_streams(
    to_server: int, from_server: int, at_end: AtEnd
) -> AsyncIterator[TransportStreams]:
    """Give the streams of a conversation; the descriptors stay the caller's, who closes them after.

    `at_end` is awaited, for two seconds at most, before the session learns that nothing more comes:
    a server's last words are on their way then.  Whatever is no message comes out as an exception,
    which sessions skip: servers print banners.
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
            try:
                async for line in _lines(descriptor):
                    await incoming.send(_parsed(line))
                with anyio.move_on_after(_LAST_WORDS_SECONDS):
                    await at_end()
            except ProtocolViolation as violation:
                await incoming.send(violation)


async def _lines(descriptor: int) -> AsyncIterator[bytes]:
    """Yield lines until the other side closes; raises ProtocolViolation for one that is too long."""
    line = bytearray()
    while data := await _some(descriptor):
        first, *others = data.split(b"\n")
        line += first
        for other in others:
            yield bytes(line)
            line = bytearray(other)
        if len(line) > MAX_LINE_BYTES:
            raise ProtocolViolation(f"it sent a line of more than {MAX_LINE_BYTES} bytes")


async def _some(descriptor: int) -> bytes:
    while True:
        await anyio.wait_readable(descriptor)
        try:
            return os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            continue
        except OSError:  # EIO, ECONNRESET: nobody is there any more
            return b""


def _parsed(line: bytes) -> SessionMessage | Exception:
    if line.count(b",") + line.count(b"[") + line.count(b"{") > MAX_PARTS:
        return ProtocolViolation(f"it sent a message of more than {MAX_PARTS} parts")
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, RecursionError):
        return ValueError(f"a line of {len(line)} bytes is no message")


async def _write(descriptor: int, outgoing: Outgoing) -> None:
    async with outgoing:
        with contextlib.suppress(OSError):  # it has gone; reading says so
            async for each in outgoing:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                await _write_all(descriptor, text.encode() + b"\n")


async def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        await anyio.wait_writable(descriptor)
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(descriptor, left) :]


class Tail:
    """The end of what a server writes to its standard error."""

    def __init__(self) -> None:
        self.text = ""
        self._ended = anyio.Event()

    async def follow(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        kept = b""
        while data := await _some(descriptor):
            kept = (kept + data)[-_KEPT_ERRORS:]
            self.text = kept.decode("utf-8", "replace")
        self._ended.set()

    async def end(self) -> None:
        """Wait until nobody can write there any more."""
        await self._ended.wait()
