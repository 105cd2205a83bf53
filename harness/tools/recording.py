"""Answering the calls of a run: again what came of them before, or anew, on record.

That a call is about to be made is on the disk before it is (write-ahead).  So whatever becomes of the
disk, or of this process, a call that has no answer on record is known to be one that nobody knows the
outcome of, and is not made twice unseen.
"""

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...policies.errors import RegistryError, ToolOutcomeUnknown
from ...runner.messages import Answer, Call
from .approval import digest
from .replay import Recorded, Replay
from .run_store import RunStore

PAUSED = "paused"
_SITE_CHARACTERS = 200
Anew = Callable[[Callable[[], None]], Answer]  # its argument is to be called before a tool is


class Recorder:
    """Answers the calls of one attempt; `stop` is readable once its program is to be stopped."""

    def __init__(self, store: RunStore, run: str) -> None:
        self.run = run
        self.stop = os.eventfd(0, os.EFD_CLOEXEC)
        self.is_paused = False
        self._lock = threading.Lock()
        self._store = store
        recorded = store.calls(run)
        self._turns = itertools.count(len(recorded))
        self.replay = Replay(recorded)

    def answer(
        self, call: Call, arguments: dict[str, Any], anew: Anew, *, may_be_repeated: bool
    ) -> Answer | None:
        """Return the answer to a call; None if the program is being stopped, and shall not have one.

        Raises ToolDiverged, ToolOutcomeUnknown for a call that had begun and may not be made again,
        and RegistryError if it cannot be recorded, and so was not made.
        """
        key, site = digest(call.name, arguments), call.site[:_SITE_CHARACTERS]
        known = self.replay.take(site, key, call.name)
        if self.is_paused:
            return None
        if known and known.answer:
            return replace(known.answer, number=call.number)
        if known and known.begun and not may_be_repeated:
            raise _unknown(call.name, "it had begun when the run was interrupted")
        record = _Record(self._store, self.run, next(self._turns), (site, key, call.name), known)
        answer = anew(record.begin)
        if answer.kind == PAUSED:
            record.noted(answer)
            self._pause()
            return None
        return record.noted(answer)

    def _pause(self) -> None:
        """Have the program stopped, unless it has ended: `stop` may be another file's by then."""
        with self._lock:
            if self.stop >= 0:
                self.is_paused = True
                os.eventfd_write(self.stop, 1)

    def close(self) -> None:
        with self._lock:
            os.close(self.stop)
            self.stop = -1


class _Record:
    """What is written of one call: that it waits, that it is about to be made, what came of it."""

    def __init__(
        self, store: RunStore, run: str, turn: int, call: tuple[str, str, str],
        known: Recorded | None,
    ) -> None:  # fmt: skip
        self._store = store
        self._run, self._turn, self._call = run, turn, call
        self._number = known.number if known else 0
        self._begun = False

    def begin(self) -> None:
        """Note that the call is about to be made; raises RegistryError, and then it must not be."""
        self._write(begun=True, answer=None)
        self._begun = True

    def noted(self, answer: Answer) -> Answer:
        """Note what came of it, and return that; if it was made and that cannot be noted, what the
        program will be told once it is resumed.  Raises RegistryError if it was not made."""
        try:
            self._write(begun=self._begun, answer=None if answer.kind == PAUSED else answer)
        except RegistryError as error:
            if not self._begun:
                raise
            unknown = _unknown(self._call[2], error.what)
            return Answer(answer.number, None, unknown.kind, unknown.what)
        return answer

    def _write(self, *, begun: bool, answer: Answer | None) -> None:
        if self._number:
            self._store.change_call(self._number, begun=begun, answer=answer)
        else:
            self._number = self._store.add_call(
                self._run, self._turn, self._call, begun=begun, answer=answer
            )


def _unknown(tool: str, why: str) -> ToolOutcomeUnknown:
    return ToolOutcomeUnknown(
        f"{tool} may have been called already, and nobody knows what came of it: {why}",
        "find out by other means whether it was, before it is called again",
        tool=tool,
    )
