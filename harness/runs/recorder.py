"""The calls of one attempt of a run: answered from the record, or made and recorded.

Each call is on disk before it is made, and its answer before the program gets it (write-ahead).  A
call without an answer on record is therefore known to have an unknown outcome, and is not made twice
unseen.

Calls that are open together arrive in any order, and a kill leaves any part of them on record.  So a
new call waits while a recorded one that was made is still missing at its site, and answers are given
in the order in which they were given before.  Waiting ends when the missing call arrives, or when
the program visibly stands still: then the program has diverged, and is stopped before the new call
is made.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace

from ...policies.errors import RegistryError, ToolOutcomeUnknown
from ...runner.messages import Answer, Call
from ..tools.approval import digest
from .replay import RecordedCall, Replay
from .store import NewCall, RunStore, StoredRun

PAUSED = "paused"
# A program with several threads or tasks stands still after so long without a call and an answer.
# While calls wait for approval: it is stopped then, and what it would have asked later it asks
# when it is resumed.
SETTLE_SECONDS = 0.2
# While the record and the program disagree: a call may only be late, on a busy host or behind a
# timer.
PATIENCE_SECONDS = 5.0
_SITE_CHARACTERS = 200


class LiveCall:
    """One call that is being made; `call` is its identity within the run."""

    def __init__(
        self, store: RunStore, new: NewCall, number: int, working: "CallsInProgress",
        may_begin: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.call = new.call
        self._store = store
        self._new = new
        self._number = number
        self._working = working
        self._may_begin = may_begin
        self.is_begun = False

    def begin(self) -> None:
        """Record that the call is about to be made, and that its approval is used; raises
        RegistryError, and then it must not be made."""
        with self._may_begin():
            self._number = self._store.begin_call(self._new, self._number)
            self.is_begun = True
            self._working.add(self._number)

    def park(self) -> None:
        """Record that the call waits for approval; raises RegistryError."""
        if not self._number:
            self._number = self._store.add_call(self._new)

    def end(self, answer: Answer) -> tuple[Answer, int]:
        """Record the answer, and return it with its place.

        If the call was made and the answer cannot be recorded, return what the program is told when
        it is resumed.  Raises RegistryError if the call was not made.
        """
        try:
            self._number, place = self._store.end_call(
                self._new, self._number, answer, is_begun=self.is_begun
            )
        except RegistryError as error:
            if not self.is_begun:
                raise
            unknown = outcome_unknown(self._new.tool, error.what)
            return Answer(answer.number, None, unknown.kind, unknown.what), 0
        return answer, place

    def close(self) -> None:
        """Let an attempt that waits for this call go on."""
        self._working.remove(self._number)


class CallsInProgress:
    """The calls that this process is making, by number.  A tool may outlive the attempt that called
    it; when the run is resumed, the call waits for that tool's answer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers: set[int] = set()

    def add(self, number: int) -> None:
        with self._changed:
            self._numbers.add(number)

    def remove(self, number: int) -> None:
        with self._changed:
            self._numbers.discard(number)
            self._changed.notify_all()

    def wait(self, number: int, is_over: Callable[[], bool]) -> None:
        """Wait until the call has ended, or the waiting attempt is over."""
        with self._changed:
            while number in self._numbers and not is_over():
                self._changed.wait(SETTLE_SECONDS)


MakeCall = Callable[[LiveCall], Answer]
Deliver = Callable[[Answer], None]


class RunRecorder:
    """Answers the calls of one attempt; `stop` is readable once its program is to be stopped."""

    def __init__(
        self, store: RunStore, stored: StoredRun, working: CallsInProgress, *,
        allow_divergence: bool = False,
    ) -> None:  # fmt: skip
        self.run = stored.run
        self._attempt = stored.attempt
        self.stop = os.eventfd(0, os.EFD_CLOEXEC)
        self.diverged = ""  # what the program did instead of what is on record
        self.parked = 0  # calls that wait for approval
        self._store = store
        self._working = working
        self._allow_divergence = allow_divergence
        recorded = store.calls(stored.run)
        self._replay = Replay(recorded)
        self._calls = {each.call for each in recorded}
        self._equals: Counter[tuple[str, str]] = Counter()
        self._changed = threading.Condition()
        self._is_over = False
        self._in_order = True
        self._turns: set[int] = set()  # places whose answers wait for their turn
        self._held = 0  # new calls that wait for missing ones
        self._works = 0  # calls that are being made
        self._moved = 0.0  # when the last call arrived, or the last answer was given
        self._given = 0  # the highest place that was given

    def answer(
        self,
        call: Call,
        arguments: dict[str, Any],
        anew: MakeCall,
        tell: Deliver,
        *,
        may_be_repeated: bool,
    ) -> None:
        """Pass the answer to a call to `tell`; nothing if the program is being stopped.

        Raises ToolOutcomeUnknown for a call that had begun and may not be made again, and
        RegistryError if it cannot be recorded, and so was not made.
        """
        site, key = call.site[:_SITE_CHARACTERS], digest(call.name, arguments)
        with self._changed:
            if self._is_over:
                return
            known = self._replay.take(site, key)
            name = known.call if known else self._name(site, key)
            after = self._given
            self._move()
            if known is None and not self._may_be_new(site, call):
                return
            if known and known.answer:
                self._give(known, known.answer, call, tell)
                return
            self._works += 1
        new = NewCall(
            self.run, self._attempt, name, site, key, call.name, arguments, after, may_be_repeated
        )
        has_ended = True
        try:
            if known and known.begun:
                known = self._outcome(known, may_be_repeated=may_be_repeated)
            if known is None or known.answer is None:
                number = known.number if known else 0
                making = LiveCall(self._store, new, number, self._working, self._living)
                has_ended = self._make(making, anew, tell)
        finally:
            with self._changed:
                self._works -= 1
                self._move()
        with self._changed:
            if known and known.answer:
                self._give(known, known.answer, call, tell)
            elif not has_ended:
                self._park(call)

    def left(self) -> tuple[str, ...]:
        """Return the recorded calls that were not made in this attempt."""
        with self._changed:
            return self._replay.left()

    def close(self) -> None:
        """Answer nothing any more.  Late answers of tools are recorded all the same."""
        with self._changed:
            self._is_over = True
            if self.stop >= 0:
                os.close(self.stop)
                self.stop = -1
            self._changed.notify_all()

    # making

    def _name(self, site: str, key: str) -> str:
        """Return a name for a new call: equal ones are numbered, from the lowest that is free."""
        while True:
            name = f"{site} {key} {self._equals[site, key]}"
            self._equals[site, key] += 1
            if name not in self._calls:
                return name

    def _make(self, making: LiveCall, anew: MakeCall, tell: Deliver) -> bool:
        """Make a call and pass on its answer; False if it waits for approval instead."""
        try:
            answer = anew(making)
            with self._changed:
                if self._is_over and not making.is_begun:
                    return True  # nothing was done: the next attempt asks, or makes it
                if answer.kind == PAUSED:
                    making.park()
                    return False
                answer, place = making.end(answer)
                self._given = max(self._given, place)
                tell(answer)
            return True
        finally:
            making.close()

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        """Keep the attempt from ending; raises RegistryError if it has: a stopped program begins no
        call."""
        with self._changed:
            if self._is_over:
                raise RegistryError(f"run {self.run} was stopped")
            yield

    def _outcome(self, known: RecordedCall, *, may_be_repeated: bool) -> RecordedCall:
        """Return a call that had begun as it is on record once no tool of this process works on it;
        raises ToolOutcomeUnknown."""
        self._working.wait(known.number, lambda: self._is_over)
        now = self._store.call(known.number) or known
        if now.answer is None and not may_be_repeated:
            raise outcome_unknown(known.tool, "it had begun when the run was interrupted")
        return now

    # waiting; the lock is held, and let go of while it waits

    def _give(self, known: RecordedCall, answer: Answer, call: Call, tell: Deliver) -> None:
        """Give the recorded answer of a call in its turn."""
        if self._wait_for_turn(known.place, alone=call.alone):
            self._given = max(self._given, known.place)
            tell(replace(answer, number=call.number))
            self._move()

    def _wait_for_turn(self, place: int, *, alone: bool) -> bool:
        """Wait until all that came before an answer has come again; False if the attempt is over."""
        self._turns.add(place)
        try:
            while not self._is_over and self._in_order and not self._is_next(place):
                if self._stands_still(PATIENCE_SECONDS, alone=alone):
                    self._in_order = False  # the program takes another order now
                    break
                self._wait(PATIENCE_SECONDS)
        finally:
            self._turns.discard(place)
            self._changed.notify_all()
        return not self._is_over

    def _is_next(self, place: int) -> bool:
        return place <= self._replay.releasable() and place == min(self._turns)

    def _may_be_new(self, site: str, call: Call) -> bool:
        """Wait until no recorded call is missing that a new one could repeat; False if the program is
        being stopped."""
        self._held += 1
        try:
            while not self._is_over and not self._allow_divergence:
                missing = self._replay.in_the_way(site)
                if not missing:
                    break
                if self._stands_still(PATIENCE_SECONDS, alone=call.alone):
                    self._diverge(site, call, missing)
                    return False
                self._wait(PATIENCE_SECONDS)
        finally:
            self._held -= 1
            self._changed.notify_all()
        return not self._is_over

    def _diverge(self, site: str, call: Call, missing: list[RecordedCall]) -> None:
        expected = ", ".join(sorted({each.tool for each in missing}))
        self.diverged = f"{site}: {call.name} is called where before it was {expected}"
        self._stop()

    def _park(self, call: Call) -> None:
        """Stop the program once nothing of it but calls that wait for approval goes on."""
        self.parked += 1
        while not self._is_over:
            if self._held or self._turns:
                self._changed.wait()
            elif self._stands_still(SETTLE_SECONDS, alone=call.alone):
                self._stop()
            else:
                self._wait(SETTLE_SECONDS)

    def _stands_still(self, seconds: float, *, alone: bool) -> bool:
        if alone:
            return True
        return self._works == 0 and time.monotonic() - self._moved >= seconds

    def _move(self) -> None:
        self._moved = time.monotonic()
        self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        """Wait until something happens, or nothing has for `seconds`."""
        left = self._moved + seconds - time.monotonic()
        self._changed.wait(None if self._works else max(0.001, left))

    def _stop(self) -> None:
        self._is_over = True
        if self.stop >= 0:
            os.eventfd_write(self.stop, 1)
        self._changed.notify_all()


def outcome_unknown(tool: str, why: str) -> ToolOutcomeUnknown:
    """Return the exception for a call that may have been made."""
    return ToolOutcomeUnknown(
        f"{tool} may have been called already, and its outcome is unknown: {why}",
        "find out by other means whether it was, before it is called again",
        tool=tool,
    )
