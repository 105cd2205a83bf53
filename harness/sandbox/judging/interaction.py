"""A program and an interactor that talk: each in a cell of its own, with pipes through this process."""

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial

from ....policies.policy import MIB
from ....runner.requests.request import Streams
from ....runner.requests.result import SandboxResult
from ..languages.compiled import Build
from .checkers import Checked, by_exit_code
from .rooms import Room
from .verdicts import Case, Verdict

_CHUNK = 65_536
_PROGRAM, _INTERACTOR = "program", "interactor"
_MUCH = MIB  # bytes of a program with which it can have caused its interactor's failure
# Reasons of a program that reached a limit.
LIMITS = frozenset(("memory", "cpu_time", "wall_time", "output"))


class _Talk:
    """The streams of the two; those of the first to come wait for the other, even if it has ended by
    then.  The program may write at most `most` bytes; `sent` counts them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._joined: dict[str, Streams] = {}
        self._pumps: list[threading.Thread] = []
        self._is_over = False
        self.sent = 0

    @property
    def is_flooded(self) -> bool:
        """Tell whether the program wrote more than it may."""
        return self.sent > self._most

    def join(self, side: str, streams: Streams) -> None:
        """Take the streams of one side, and pass on the output of both once both are there."""
        if streams.network:
            streams.network.close()  # nobody reaches its ports
        with self._lock:
            if self._is_over:
                _close(streams)
                return
            self._joined[side] = streams
            if len(self._joined) == 2:
                program, interactor = self._joined[_PROGRAM], self._joined[_INTERACTOR]
                self._begin(program.stdout, interactor.stdin, self._note)
                self._begin(interactor.stdout, program.stdin, lambda size: True)

    def _begin(self, source: int, target: int, may_pass: Callable[[int], bool]) -> None:
        pump = threading.Thread(target=_pump, args=(source, target, may_pass), daemon=True)
        self._pumps.append(pump)
        pump.start()

    def _note(self, size: int) -> bool:
        self.sent += size
        return not self.is_flooded

    def end(self, side: str) -> None:
        """End the wait for a side that never came.  The output of one that came is still passed on."""
        with self._lock:
            self._is_over = self._is_over or side not in self._joined
            if self._is_over:
                self._close_waiting()

    def _close_waiting(self) -> None:
        if not self._pumps:
            for streams in self._joined.values():
                _close(streams)
            self._joined.clear()

    def close(self) -> None:
        """Wait until all is passed on; both sides have ended."""
        for pump in self._pumps:
            pump.join()
        self._close_waiting()


def interact(
    run: Callable[[Case, Callable[[Streams], None]], SandboxResult], own: Room,
    interactor: Build | str, language: str | None, case: Case, most: int, cancel: int,
) -> tuple[SandboxResult, Checked]:  # fmt: skip
    """Return how the program ended, and the answer of the interactor, which runs in a cell of the
    sandbox `own`; `language` is that of an interactor that is not compiled.

    The program may write `most` bytes: an interactor has no limit of its own to what it reads.
    """
    talk = _Talk(most)
    judged: list[SandboxResult] = []
    failed: list[BaseException] = []
    files = {"input": case.input, "answer": case.expected or ""}
    join_interactor = partial(talk.join, _INTERACTOR)

    def judge() -> None:
        try:
            arguments = ("input", "output", "answer")
            said = own.execute_on_streams(
                interactor, language, join_interactor, files, arguments, cancel=cancel
            )
            judged.append(said)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            failed.append(error)
        finally:
            talk.end(_INTERACTOR)

    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    try:
        result = run(case, partial(talk.join, _PROGRAM))
    finally:
        talk.end(_PROGRAM)
        thread.join()
        talk.close()
    if failed:
        raise failed[0]
    (said,) = judged
    if talk.is_flooded:
        return result, Checked(Verdict.OUTPUT_LIMIT, f"more than {most} bytes to the interactor")
    if said.reason in LIMITS and talk.sent > _MUCH:
        words = f"{talk.sent} bytes, beyond which the interactor failed: {said.error}"
        return result, Checked(Verdict.OUTPUT_LIMIT, words)
    if said.reason not in ("exit", "exception"):
        return result, Checked(Verdict.INTERNAL_ERROR, f"the interactor failed: {said.error}")
    return result, by_exit_code(said.exit_code, said.stderr)


def _pump(source: int, target: int, may_pass: Callable[[int], bool]) -> None:
    """Pass on one side's output until it ends, is too long, or the other side stops reading."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
        closing.callback(os.close, source)
        closing.callback(os.close, target)
        while (data := os.read(source, _CHUNK)) and may_pass(len(data)):
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]


def _close(streams: Streams) -> None:
    os.close(streams.stdin)
    os.close(streams.stdout)
