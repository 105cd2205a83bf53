"""The protocol over stdin and stdout: lines no longer than we read, and an end that always comes.

The descriptors are those that `claim` took from everything else (streams.py).  Neither is read or
written by a thread, which could not be told to stop.
"""

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
import msgspec
from mcp.server import Server
from mcp.server.stdio import stdio_server

from ....runner.nesting import refuse_large_json
from .streams import StdioStreams

LINE_BYTES = 16 * 1024 * 1024
_CHUNK = 64 * 1024
_ATOMIC = 4096  # PIPE_BUF in pipe(7): a pipe that is writable takes so much without waiting


class LineReader:
    """What comes down a descriptor, by lines; one that is overlong, or decodes to many times its size,
    comes as one that is empty."""

    def __init__(self, descriptor: int, longest: int = LINE_BYTES) -> None:
        self._descriptor = descriptor
        self._longest = longest

    async def __aiter__(self) -> AsyncIterator[str]:
        pending, overlong = bytearray(), False
        while chunk := await self._read():
            *whole, rest = chunk.split(b"\n")
            for part in whole:
                pending += part
                yield "" if overlong or _is_refused(pending) else pending.decode("utf-8", "replace")
                pending, overlong = bytearray(), False
            pending += rest
            if len(pending) > self._longest:
                _say(f"a message is longer than {self._longest} bytes, and is not read")
                pending, overlong = bytearray(), True

    async def _read(self) -> bytes:
        await _until(anyio.wait_readable, self._descriptor)
        return os.read(self._descriptor, _CHUNK)


def _is_refused(control: bytearray) -> bool:
    """Tell whether a message decodes to many times its size, and say it."""
    try:
        refuse_large_json(control)
    except msgspec.DecodeError as error:
        _say(f"a message is not read: {error}")
        return True
    return False


class LineWriter:
    """What goes into a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def write(self, text: str) -> None:
        """Write all of it, as it is taken."""
        data = memoryview(text.encode("utf-8", "replace"))
        while data:
            await _until(anyio.wait_writable, self._descriptor)
            data = data[os.write(self._descriptor, data[:_ATOMIC]) :]

    async def flush(self) -> None:
        """Nothing is held back."""


async def _until(ready: Any, descriptor: int) -> None:
    """Wait for a descriptor; a regular file cannot be waited for, and never has to."""
    try:
        await ready(descriptor)
    except PermissionError:  # EPERM of epoll_ctl(2)
        await anyio.lowlevel.checkpoint()


async def serve_pipes(server: Server[Any], streams: StdioStreams) -> None:
    """Serve the one client at the other end until it closes its end."""
    stdin = cast("anyio.AsyncFile[str]", LineReader(streams.reading))
    stdout = cast("anyio.AsyncFile[str]", LineWriter(streams.writing))
    with contextlib.suppress(BrokenPipeError):
        async with stdio_server(stdin, stdout) as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())


def _say(words: str) -> None:
    print(f"cellwright: {words}", file=sys.stderr, flush=True)
