"""The protocol over stdin and stdout, with a limit to each message.

The descriptors are those that `claim` took from everything else (streams.py).
"""

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

import msgspec
from mcp.server import Server
from mcp.server.stdio import stdio_server

from ....runner.nesting import refuse_large_json
from ...mcp.json_lines import RefusedLine, read_json_lines, write_all
from .streams import StdioStreams

if TYPE_CHECKING:
    import anyio

LINE_BYTES = 16 * 1024 * 1024


class LineReader:
    """The client's messages as text.  A refused one is reported on stderr and comes as an empty line,
    which the SDK answers as a parse error."""

    def __init__(self, descriptor: int, longest: int = LINE_BYTES) -> None:
        self._descriptor = descriptor
        self._longest = longest

    async def __aiter__(self) -> AsyncIterator[str]:
        async for line in read_json_lines(self._descriptor, self._longest, _check_decoded_size):
            if isinstance(line, RefusedLine):
                _report(f"a message is not read: {line}")
                yield ""
            else:
                yield line.decode("utf-8", "replace")


def _check_decoded_size(line: bytes) -> None:
    try:
        refuse_large_json(line)
    except msgspec.DecodeError as error:
        raise RefusedLine(str(error)) from None


class LineWriter:
    """The answers as text, written at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def write(self, text: str) -> None:
        """Write all of it; lone surrogates become question marks."""
        await write_all(self._descriptor, text.encode("utf-8", "replace"))

    async def flush(self) -> None:
        """Do nothing: `write` buffers nothing."""


async def serve_stdio(server: Server[Any], streams: StdioStreams) -> None:
    """Serve the one client at the other end until it closes its end."""
    stdin = cast("anyio.AsyncFile[str]", LineReader(streams.reading))
    stdout = cast("anyio.AsyncFile[str]", LineWriter(streams.writing))
    with contextlib.suppress(BrokenPipeError):
        async with stdio_server(stdin, stdout) as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())


def _report(problem: str) -> None:
    print(f"cellwright: {problem}", file=sys.stderr, flush=True)
