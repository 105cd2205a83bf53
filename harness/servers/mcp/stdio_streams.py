"""The descriptors of stdin and stdout, reserved for the protocol.

Does not import the SDK, so that the command can claim them before it runs the files of --tools.
"""

import os
import sys
from typing import NamedTuple

from ....policies.errors import PolicyError


class StdioStreams(NamedTuple):
    """Descriptors of the client's pipe: the protocol is read from `reading` and written to
    `writing`."""

    reading: int
    writing: int


def claim() -> StdioStreams:
    """Move standard input and output to new descriptors for the rest of this process.

    After this, descriptor 0 is empty and descriptor 1 is standard error, and they stay so: text that
    Python, a C library or a child still holds in a buffer then goes to standard error whenever it is
    flushed, at exit too.  Raises PolicyError if standard input or output is closed.
    """
    try:
        streams = StdioStreams(os.dup(0), os.dup(1))
    except OSError as error:
        raise PolicyError(
            f"cannot serve over a pipe: standard input or output is closed ({error.strerror})",
            "start it from an MCP client, or serve over HTTP: --http",
        ) from None
    if sys.stdout is not None:
        sys.stdout.flush()  # flushes this command's earlier output
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return streams
