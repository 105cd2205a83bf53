"""A session's side in the guest: programs that come one after the other to one `__main__`.

SIGINT, by which the supervisor ends a program that takes too long, is ignored but while a program
runs: it never interrupts what we do in between, and one that comes too late is lost.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import io
import linecache
import os
import sys
import types
from typing import Any

from ..channel import Channel, Receiver
from ..messages import Become, Finished, RunProgram, Start
from .evaluation import Executor, Source, outcome
from .exchange import give, receive, report
from .tools import Toolbox

_SOURCES = 200  # programs whose lines tracebacks can still show


def converse(
    run: RunProgram, receiver: Receiver, sock: Channel, main: types.ModuleType, toolbox: Toolbox
) -> int:
    """Run what comes, starting with `run`, until there will be no more; return an exit code.

    A child that a program forked, and that came to that program's end, ends: the next program, and
    the word on this one, are its parent's.
    """
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    session, itself = _Session(main, toolbox), os.getpid()
    following: RunProgram | Start | Become | None = run
    while isinstance(following, RunProgram):
        finished, code = session.answer(following)
        if os.getpid() != itself:
            return code
        report((finished, code), sock, following.nonce)
        following = receive(receiver)
    return 0


class _Session:
    def __init__(self, main: types.ModuleType, toolbox: Toolbox) -> None:
        self._main = main
        self._toolbox = toolbox
        self._handler: Any = _signal.default_int_handler  # or what programs put in its place
        self._executor = Executor()

    def answer(self, run: RunProgram) -> tuple[Finished, int]:
        finished, code = outcome(
            lambda: self._run(run), run.value_bytes, run.picture_bytes, is_plain=run.plain
        )
        self._toolbox.close()
        for name in ("stdout", "stderr"):
            with contextlib.suppress(Exception):  # the guest's own object, or closed by it, or gone
                getattr(sys, name).flush()
        return finished, code

    def _run(self, run: RunProgram) -> object:
        value = self._interruptibly(run, f"<cell {run.request}>")
        linecache.cache.pop(f"<cell {run.request - _SOURCES}>", None)
        if value is not None:
            self._main.__dict__["_"] = value
        return value

    def _interruptibly(self, run: RunProgram, filename: str) -> object:
        program, file = Source(run.code, self._executor, run.filename or filename), None
        try:
            _signal.signal(_signal.SIGINT, self._handler)
            sys.stdin = io.TextIOWrapper(io.BytesIO(run.stdin), "utf-8")
            file = give(run, self._main, program.filename)
            self._toolbox.open(run, self._main)
            return program.run(self._main.__dict__)
        finally:
            if file:
                file.remove()
            self._handler = _signal.getsignal(_signal.SIGINT) or self._handler
            _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # raises what came just before
