"""Lines of JSON over descriptors: a reader that bounds each line before it is parsed, and a writer.

The client of other servers and our own server share both.  Neither blocks a thread: a thread could not
be told to stop.
"""

import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import anyio.lowlevel

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
