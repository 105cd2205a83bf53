"""The daemon's answer about the open cells of a project, where it has not run the command itself."""

import argparse
import sys

from ...policies.errors import PolicyError
from ...runner.messages import decode
from ..sandbox.remote import frames
from ..sandbox.remote.call_frames import error_of
from ..text.terminal_text import harmless
from . import open_cell_client as client


def has_told_of_open_cells(options: argparse.Namespace) -> bool:
    """Tell why no open cell is used, or that some were closed; return whether there is nothing else to
    do.  Raises PolicyError with --keep or --close if the daemon does neither."""
    wanted = "--close" if options.close else "--keep" if options.keep else ""
    if client.left_over == client.NONE_WAS_USED and not wanted:
        return False
    if client.left_over is None:
        if not wanted:
            return False
        path = client.socket_path(["--connect", options.connect] if options.connect else [])
        raise PolicyError(f"{wanted}: no daemon answers at {path}", 'start one: "cellwright serve"')
    reply = decode(client.left_over, frames.Reply)
    if isinstance(reply, frames.Failure) and wanted:
        raise error_of(reply)
    if not isinstance(reply, frames.NoOpenCell):
        return False
    if options.close:
        print(f"cellwright: open cells that were closed: {reply.closed}", file=sys.stderr)
        return True
    if options.keep:
        raise PolicyError(f"--keep: {reply.why or 'the open cell has just ended'}")
    if reply.why:
        print(f"cellwright: a cell of its own: {harmless(reply.why)}", file=sys.stderr)
    return False
