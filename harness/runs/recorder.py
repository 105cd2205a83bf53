"""`RunRecorder`: answers the calls of one attempt of a run from the record, or makes and records them.

Each call is on disk before it is made, and its answer before the program gets it (write-ahead).  A
recorded call without an answer therefore has an unknown outcome, and is not silently made twice.

Calls that are open together arrive in any order, and a kill leaves any part of them on record.  So a
new call waits while a recorded one that was made is still missing at its site, and answers are given
in the order in which they were given before.  The wait ends when the missing call arrives, or when
the program is visibly idle: then the program has diverged, and is stopped before the new call is made.
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
from .run_store import NewCall, RunStore, StoredRun

PAUSED = "paused"
# A program with several threads or tasks counts as idle after this time without a call or an answer.
# While calls wait for approval, an idle program is stopped; it makes its further calls when resumed.
SETTLE_SECONDS = 0.2
# The same time while record and program disagree, because a missing call may be late on a busy host or
# behind a timer.
PATIENCE_SECONDS = 5.0
_SITE_CHARACTERS = 200


class LiveCall:
    """One call that is being made, a `tools.caller.PendingCall`; `call` identifies it in the run."""

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

    def begin(self, tool_digest: str) -> None:
        """Record that a tool with this digest is about to be called, and that the approval is used.

        On RegistryError the call must not be made.
        """
        with self._may_begin():
            self._number = self._store.begin_call(self._new, self._number, tool_digest)
            self.is_begun = True
            self._working.add(self._number)

    def suspend(self) -> None:
        """Record that the call waits for approval; raises RegistryError."""
        if not self._number:
            self._number = self._store.add_call(self._new)

    def end(self, answer: Answer) -> tuple[Answer, int]:
        """Record the answer, and return it with its place.

        If the call was made and its answer cannot be recorded, return the ToolOutcomeUnknown that a
        resumed program gets.  Raises RegistryError if the call was not made.
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
        """Wake an attempt that waits for this call."""
        self._working.remove(self._number)


class CallsInProgress:
    """The numbers of the calls that this process is making.

    A tool may outlive the attempt that called it; when the run is resumed, the call waits for the
    answer of that tool.
    """

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
        """Wait until the call has ended, or the attempt that waits is over."""
        with self._changed:
            while number in self._numbers and not is_over():
                self._changed.wait(SETTLE_SECONDS)


MakeCall = Callable[[LiveCall], Answer]
Deliver = Callable[[Answer], None]


class RunRecorder:
    """Answers the calls of one attempt, as a `tools.caller.CallRecorder`.

    `stop` becomes readable when the program must be stopped.
    """

    def __init__(
        self, store: RunStore, stored: StoredRun, working: CallsInProgress, *,
        allow_divergence: bool = False, is_repeat: bool = False,
    ) -> None:  # fmt: skip
        self.run = stored.run
        self._attempt = stored.attempt
        self.stop = os.eventfd(0, os.EFD_CLOEXEC)
        self.diverged = ""  # how the program differs from the record
        self.suspended = 0  # calls that wait for approval
        self._store = store
        self._working = working
        self._allow_divergence = allow_divergence
        self._is_repeat = is_repeat  # replays a run that is over: no call is made
        recorded = store.calls(stored.run)
        self._replay = Replay(recorded)
        self._calls = {each.call for each in recorded}
        self._equals: Counter[tuple[str, str]] = Counter()
        self._changed = threading.Condition()
        self._is_over = False
        self._in_order = True
        self._turns: set[int] = set()  # positions of answers that wait for their turn
        self._held = 0  # new calls that wait for missing recorded ones
        self._being_made = 0  # calls
        self._active_at = 0.0  # when the last call arrived, or the last answer was given
        self._given = 0  # highest position whose answer was given

    def answer(
        self,
        call: Call,
        arguments: dict[str, Any],
        anew: MakeCall,
        tell: Deliver,
        *,
        may_be_repeated: bool,
    ) -> None:
        """Pass the answer to a call to `tell`; do nothing if the program is being stopped.

        Raises ToolOutcomeUnknown for a recorded call that had begun and may not be made again, and
        RegistryError for a call that cannot be recorded, and so is not made.
        """
        site, key = call.site[:_SITE_CHARACTERS], digest(call.name, arguments)
        with self._changed:
            if self._is_over:
                return
            known = self._replay.take(site, key)
            name = known.call if known else self._name(site, key)
            after = self._given
            self._mark_active()
            if self._is_repeat and (known is None or known.answer is None):
                self._diverge(site, call, [known] if known else [])
                return
            if known is None and not self._may_be_new(site, call):
                return
            if known and known.answer:
                self._give(known, known.answer, call, tell)
                return
            self._being_made += 1
        new = NewCall(
            self.run, self._attempt, name, site, key, call.name, arguments, after, may_be_repeated
        )
        has_ended = True
        try:
            if known and known.begun:
                known = self._outcome(known, may_be_repeated=may_be_repeated)
            if known is None or known.answer is None:
                number = known.number if known else 0
                making = LiveCall(self._store, new, number, self._working, self._keep_alive)
                has_ended = self._make(making, anew, tell)
        finally:
            with self._changed:
                self._being_made -= 1
                self._mark_active()
        with self._changed:
            if known and known.answer:
                self._give(known, known.answer, call, tell)
            elif not has_ended:
                self._suspend(call)

    def left(self) -> tuple[str, ...]:
        """Return the recorded calls that this attempt did not make."""
        with self._changed:
            return self._replay.left()

    def close(self) -> None:
        """Stop answering; late answers of tools are still recorded."""
        with self._changed:
            self._is_over = True
            if self.stop >= 0:
                os.close(self.stop)
                self.stop = -1
            self._changed.notify_all()

    # making

    def _name(self, site: str, key: str) -> str:
        """Return a name for a new call; equal calls get the lowest free number."""
        while True:
            name = f"{site} {key} {self._equals[site, key]}"
            self._equals[site, key] += 1
            if name not in self._calls:
                return name

    def _make(self, making: LiveCall, anew: MakeCall, tell: Deliver) -> bool:
        """Make a call and pass on its answer; return False if it waits for approval instead."""
        try:
            answer = anew(making)
            with self._changed:
                if self._is_over and not making.is_begun:
                    return True  # nothing was done; the next attempt asks again or makes the call
                if answer.kind == PAUSED:
                    making.suspend()
                    return False
                answer, place = making.end(answer)
                self._given = max(self._given, place)
                tell(answer)
            return True
        finally:
            making.close()

    @contextlib.contextmanager
    def _keep_alive(self) -> Iterator[None]:
        """Keep the attempt from ending within the block.

        Raises RegistryError if it has ended: a stopped program begins no call.
        """
        with self._changed:
            if self._is_over:
                raise RegistryError(f"run {self.run} was stopped")
            yield

    def _outcome(self, known: RecordedCall, *, may_be_repeated: bool) -> RecordedCall:
        """Return the record of a call that had begun, once no tool of this process is executing it.

        Raises ToolOutcomeUnknown.
        """
        self._working.wait(known.number, lambda: self._is_over)
        now = self._store.call(known.number) or known
        if now.answer is None and not may_be_repeated:
            raise outcome_unknown(known.tool, "it had begun when the run was interrupted")
        return now

    # waiting: the caller holds the lock, which is released during each wait

    def _give(self, known: RecordedCall, answer: Answer, call: Call, tell: Deliver) -> None:
        """Pass on the recorded answer of a call when it is its turn."""
        if self._wait_for_turn(known.place, alone=call.alone):
            self._given = max(self._given, known.place)
            tell(replace(answer, number=call.number))
            self._mark_active()

    def _wait_for_turn(self, place: int, *, alone: bool) -> bool:
        """Wait until every call before an answer has arrived again; False if the attempt is over."""
        self._turns.add(place)
        try:
            while not self._is_over and self._in_order and not self._is_next(place):
                if self._is_idle(PATIENCE_SECONDS, alone=alone):
                    self._in_order = False  # the program now has another order
                    break
                self._wait(PATIENCE_SECONDS)
        finally:
            self._turns.discard(place)
            self._changed.notify_all()
        return not self._is_over

    def _is_next(self, place: int) -> bool:
        return place <= self._replay.releasable() and place == min(self._turns)

    def _may_be_new(self, site: str, call: Call) -> bool:
        """Wait until no missing recorded call is left whose effect a new call could repeat.

        Return False if the program is being stopped.
        """
        self._held += 1
        try:
            while not self._is_over and not self._allow_divergence:
                missing = self._replay.conflicts(site)
                if not missing:
                    break
                if self._is_idle(PATIENCE_SECONDS, alone=call.alone):
                    self._diverge(site, call, missing)
                    return False
                self._wait(PATIENCE_SECONDS)
        finally:
            self._held -= 1
            self._changed.notify_all()
        return not self._is_over

    def _diverge(self, site: str, call: Call, missing: list[RecordedCall]) -> None:
        expected = ", ".join(sorted({each.tool for each in missing})) or "no such call"
        self.diverged = f"{site}: the program calls {call.name}, the record has {expected}"
        self._stop()

    def _suspend(self, call: Call) -> None:
        self.suspended += 1
        while not self._is_over:
            if self._held or self._turns:
                self._changed.wait()
            elif self._is_idle(SETTLE_SECONDS, alone=call.alone):
                self._stop()
            else:
                self._wait(SETTLE_SECONDS)

    def _is_idle(self, seconds: float, *, alone: bool) -> bool:
        if alone:
            return True
        return self._being_made == 0 and time.monotonic() - self._active_at >= seconds

    def _mark_active(self) -> None:
        self._active_at = time.monotonic()
        self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        """Wait until something changes, or `seconds` have passed without activity."""
        left = self._active_at + seconds - time.monotonic()
        self._changed.wait(None if self._being_made else max(0.001, left))

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
