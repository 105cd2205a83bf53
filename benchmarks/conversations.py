"""Conversations: a session that keeps its state, and a program that answers line by line."""

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial

from ..harness.sandbox.program import Program
from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.session import Session
from ..policies.errors import CellwrightError, InternalError
from ..runner import channel
from .callers import ProbeResult

_REQUESTS = 20  # of one session, or one program, at most
_ECHO = ("/bin/cat",)
_SILENT_SECONDS = 30.0  # longer than anybody is stopped, or lives

Make = Callable[[], ProbeResult]  # raises CellwrightError
Note = Callable[[Make], object]
Talk = Callable[[Sandbox, threading.Event, Note], None]


def with_sessions(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have session after session say again what it was given with its first request."""
    while not over.is_set():
        with contextlib.suppress(CellwrightError), made.session() as session:
            nonce = os.urandom(8).hex()
            for number in range(_REQUESTS):
                if session.lost or over.is_set():
                    break
                note(partial(_said_again, session, nonce, number))


def with_programs(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have program after program send back each line that it is sent, until it ends or is ended."""
    while not over.is_set():
        with contextlib.suppress(CellwrightError), made.program(_ECHO) as program:
            for _ in range(_REQUESTS):
                if not program.is_alive() or over.is_set():
                    break
                note(partial(_sent_back, program, os.urandom(8).hex()))


def _said_again(session: Session, nonce: str, number: int) -> ProbeResult:
    result = session.execute("print(x)" if number else f"x = {nonce!r}; print(x)")
    return ProbeResult(nonce, result.stdout.strip(), result)


def _sent_back(program: Program, nonce: str) -> ProbeResult:
    """Send a line, and hear it; where the program has ended, tell how."""
    line = f"{nonce}\n".encode()
    with contextlib.suppress(BrokenPipeError):
        os.write(program.stdin, line)
    heard = b""
    while len(heard) < len(line):
        if not channel.has_news(program.stdout, _SILENT_SECONDS):
            raise InternalError("a program that should be gone says nothing")
        piece = os.read(program.stdout, len(line) - len(heard))
        if not piece:
            return ProbeResult(nonce, "", program.wait(_SILENT_SECONDS))
        heard += piece
    return ProbeResult(nonce, heard.decode(errors="replace").strip(), None, "sent back")
