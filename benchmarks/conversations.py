"""Conversations: calls of every form, sessions that keep their state, branch, pause and go on, programs
that answer line by line, and programs that have packages and a way out by name."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial

from ..harness.sandbox.programs.program import Program
from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sessions.session import Session
from ..policies.errors import CellwrightError, InternalError
from ..runner import channel
from .callers import ProbeResult

_REQUESTS = 20  # requests of one session, or one program, at most
_ECHO = ("/bin/cat",)
_BRANCHES = 2  # concurrent branches of a session
# Of network_servers.py: what follows an e comes back, after another e.
_OUT_AND_BACK = """
import cellwright_sample, socket
with socket.create_connection((name, port), 4) as sock:
    sock.sendall(b"e" + nonce.encode())
    heard = b""
    while len(heard) < 1 + len(nonce):
        piece = sock.recv(99)
        if not piece: raise ConnectionError("it ended early")
        heard += piece
assert cellwright_sample.add(1, 2) == 3
print(heard[1:].decode())
"""
_SILENT_SECONDS = 30.0  # longer than anybody is stopped, or lives

Make = Callable[[], ProbeResult]  # raises CellwrightError
Note = Callable[[Make], object]
Talk = Callable[[Sandbox, threading.Event, Note], None]


def repeat(text: str) -> str:
    """Return the text: the tool that programs of `with_calls` call."""
    return text


def with_calls(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have call after call say a nonce: at its end, as it is printed, by a tool, and until the call is
    cancelled."""
    for form in itertools.cycle((_said, _streamed, _repeated, _cancelled)):
        if over.is_set():
            return
        note(partial(form, made, os.urandom(8).hex()))


def with_sessions(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have session after session say again what it was given with its first request."""
    while not over.is_set():
        with contextlib.suppress(CellwrightError), made.session() as session:
            nonce = os.urandom(8).hex()
            for number in range(_REQUESTS):
                if session.lost or over.is_set():
                    break
                note(partial(_said_again, session, nonce, number))


def with_branches(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have branches of session after session say what the session was given, and what each was."""
    while not over.is_set():
        with contextlib.suppress(CellwrightError), made.session() as session:
            nonce = os.urandom(8).hex()
            note(partial(_said_again, session, nonce, 0))
            while not session.lost and not over.is_set():
                with contextlib.ExitStack() as opened:
                    for each in session.branch(_BRANCHES):
                        opened.enter_context(each)
                        own = os.urandom(8).hex()
                        note(partial(_added, each, nonce, own))
                note(
                    partial(_said_again, session, nonce, 1)
                )  # changes of a branch stay in the branch


def with_pauses(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have session after session be paused and resumed, and say again what it was given at first."""
    while not over.is_set():
        with contextlib.suppress(CellwrightError), contextlib.ExitStack() as opened:
            session, nonce = opened.enter_context(made.session()), os.urandom(8).hex()
            note(partial(_said_again, session, nonce, 0))
            while not session.lost and not over.is_set():
                session = opened.enter_context(made.resume(session.pause()))
                note(partial(_said_again, session, nonce, 1))


def with_servers(given: dict[str, str | int]) -> Talk:
    """Return a conversation in which programs, which have a package, send a nonce out and back: `given`
    has the `name` and the `port` of the server."""

    def send_all(made: Sandbox, over: threading.Event, note: Note) -> None:
        while not over.is_set():
            note(partial(_sent_out, made, given, os.urandom(8).hex()))

    return send_all


def with_programs(made: Sandbox, over: threading.Event, note: Note) -> None:
    """Have program after program send back each line that it is sent, until it ends or is ended."""
    while not over.is_set():
        with contextlib.suppress(CellwrightError), made.program(_ECHO) as program:
            for _ in range(_REQUESTS):
                if not program.is_alive() or over.is_set():
                    break
                note(partial(_sent_back, program, os.urandom(8).hex()))


def _said(made: Sandbox, nonce: str) -> ProbeResult:
    result = made.execute(f"print({nonce!r})")
    return ProbeResult(nonce, result.stdout.strip(), result)


def _streamed(made: Sandbox, nonce: str) -> ProbeResult:
    pieces: list[bytes] = []
    result = made.execute(f"print({nonce!r})", on_output=lambda _, data: pieces.append(data))
    return ProbeResult(nonce, b"".join(pieces).decode(errors="replace").strip(), result)


def _repeated(made: Sandbox, nonce: str) -> ProbeResult:
    result = made.execute(f"from tools import repeat\nprint(repeat(text={nonce!r}))")
    return ProbeResult(nonce, result.stdout.strip(), result)


def _cancelled(made: Sandbox, nonce: str) -> ProbeResult:
    """Cancel a program that has said its nonce; one that ended otherwise has said nothing."""
    cancel = os.eventfd(0)
    try:
        result = made.execute(
            f"print({nonce!r}, flush=True)\nimport time; time.sleep(60)",
            on_output=lambda *_: os.eventfd_write(cancel, 1), cancel=cancel,
        )  # fmt: skip
    finally:
        os.close(cancel)
    said = result.stdout.strip()
    return ProbeResult(nonce, said if said != nonce or result.reason == "cancelled" else "", result)


def _said_again(session: Session, nonce: str, number: int) -> ProbeResult:
    result = session.execute("print(x)" if number else f"x = {nonce!r}; print(x)")
    return ProbeResult(nonce, result.stdout.strip(), result)


def _added(session: Session, nonce: str, own: str) -> ProbeResult:
    result = session.execute(f"x += {own!r}; print(x)")
    return ProbeResult(nonce + own, result.stdout.strip(), result)


def _sent_out(made: Sandbox, given: dict[str, str | int], nonce: str) -> ProbeResult:
    result = made.execute(_OUT_AND_BACK, inputs={**given, "nonce": nonce})
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
