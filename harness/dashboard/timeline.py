"""`Timeline`: the records of an audit trail, sorted into runs, sessions and calls of tools."""

import collections
from collections.abc import Iterable
from typing import Any

from ...runner.audit.record import AuditEntry
from ...runner.result import Phases
from .overview import CalledTool, Event, Overview, RunView, SessionView

MOST_RUNS = 500
MOST_EVENTS = 200  # of one run or session
MOST_OTHERS = 200
_MOST_TOOLS = 1000
_MOST_KINDS = 1000
_MOST_OPEN = 10_000  # calls of tools
_PHASES = Phases.__struct_fields__
_ENDS = ("returned", "failed", "refused")  # of a call that was begun
_COUNTED = {"call": "calls", "failed": "failed", "refused": "refused", "waiting": "waited"}


class Timeline:
    """Takes records one after the other and keeps the latest of each kind; the rest is counted."""

    def __init__(self, most_runs: int = MOST_RUNS, most_events: int = MOST_EVENTS) -> None:
        """Keep at most `most_runs` runs and sessions, and `most_events` records of each."""
        self._most_runs = most_runs
        self._most_events = most_events
        self._counts: collections.Counter[str] = collections.Counter()
        self._runs: dict[str, RunView] = {}  # by span
        self._spans: dict[str, str] = {}  # a span -> that of the run which caused it
        self._caused: dict[str, set[str]] = {}  # the other way round, to forget both
        self._calls: dict[str, Event] = {}  # of tools that have not ended, by span
        self._sessions: dict[str, SessionView] = {}
        self._tools: dict[str, CalledTool] = {}
        self._others: collections.deque[Event] = collections.deque(maxlen=MOST_OTHERS)
        self._left_out: collections.Counter[str] = collections.Counter()

    def add_all(self, entries: Iterable[AuditEntry]) -> "Timeline":
        for entry in entries:
            self.add(entry)
        return self

    def add(self, entry: AuditEntry) -> None:
        """Take the next record."""
        self._count_kind(f"{entry.category}.{entry.action}")
        if entry.category == "tool":
            self._count_call(entry)
        if entry.category == "session":
            self._note_session(entry)
        elif (entry.category, entry.action) == ("execution", "start"):
            self._begin(entry)
        elif run := self._run_of(entry):
            self._note(run, entry)
        elif (entry.category, entry.action) == ("validation", "refused"):
            self._begin(entry, "refused")
        elif session := self._sessions.get(_text(entry, "session_id")):
            self._append(session, entry, session.opened)
        else:
            self._left_out["other records"] += len(self._others) == MOST_OTHERS
            self._others.append(_event(entry, 0.0))

    def fill(self, overview: Overview) -> None:
        """Put what was kept into an overview, the latest runs and sessions first."""
        overview.runs = list(reversed(self._runs.values()))
        overview.sessions = list(reversed(self._sessions.values()))
        overview.called_tools = sorted(self._tools.values(), key=lambda each: -each.calls)
        overview.other = list(self._others)
        overview.counts = dict(self._counts)
        overview.left_out |= self._left_out

    def _begin(self, entry: AuditEntry, state: str = "running") -> None:
        above = self._runs.get(self._spans.get(entry.parent_id, ""))
        span = entry.span_id or f"record {entry.seq}"
        self._runs[span] = RunView(
            id=_text(entry, "execution_id") or span, trace_id=entry.trace_id,
            language=entry.target if state == "running" else "", began=entry.time,
            sandbox_id=entry.sandbox_id, session_id=_text(entry, "session_id"),
            parent=above.id if above else "", source_sha256=_text(entry, "source_sha256"),
            source_bytes=_number(entry, "source_bytes"), state=state,
            reason="" if state == "running" else entry.target,
        )  # fmt: skip
        self._link(span, span)
        if above:
            self._append(above, entry, above.began)
        if session := self._sessions.get(_text(entry, "session_id")):
            session.runs += 1
        if len(self._runs) > self._most_runs:
            self._forget(next(iter(self._runs)))

    def _forget(self, span: str) -> None:
        del self._runs[span]
        for each in self._caused.pop(span, ()):
            self._spans.pop(each, None)
        self._left_out["runs"] += 1

    def _link(self, span: str, run: str) -> None:
        caused = self._caused.setdefault(run, set())
        if span and len(caused) < 2 * self._most_events:
            caused.add(span)
            self._spans[span] = run

    def _run_of(self, entry: AuditEntry) -> RunView | None:
        """Return the run that a record belongs to, by its span or by that of its cause."""
        for span in (entry.span_id, entry.parent_id):
            if span and (found := self._spans.get(span)):
                self._link(entry.span_id, found)
                return self._runs.get(found)
        return None

    def _note(self, run: RunView, entry: AuditEntry) -> None:
        if entry.category == "execution" and _text(entry, "execution_id") in ("", run.id):
            _end(run, entry)
        is_end = entry.category == "tool" and entry.action in _ENDS
        if is_end and (call := self._calls.pop(entry.span_id, None)):
            call.ended, call.seconds = entry.action, entry.time - run.began - call.at
            call.allowed, call.about = entry.allowed, {**call.about, **entry.details}
            return
        event = self._append(run, entry, run.began)
        if event and (entry.category, entry.action) == ("tool", "call"):
            self._calls[entry.span_id] = event
            if len(self._calls) > _MOST_OPEN:
                del self._calls[next(iter(self._calls))]

    def _note_session(self, entry: AuditEntry) -> None:
        id = _text(entry, "session_id")
        session = self._sessions.get(id)
        if session is None:
            session = SessionView(id=id, sandbox_id=entry.sandbox_id, opened=entry.time, events=[])
            self._sessions[id] = session
        if entry.action != "opened":
            session.ended = entry.time
            session.ending = f"{entry.action}: {entry.target}" if entry.target else entry.action
        if len(self._sessions) > self._most_runs:
            del self._sessions[next(iter(self._sessions))]
            self._left_out["sessions"] += 1

    def _append(self, to: RunView | SessionView, entry: AuditEntry, began: float) -> Event | None:
        if len(to.events) >= self._most_events:
            to.events_left_out += 1
            return None
        event = _event(entry, began)
        to.events.append(event)
        return event

    def _count_kind(self, kind: str) -> None:
        is_known = kind in self._counts or len(self._counts) < _MOST_KINDS
        self._counts[kind if is_known else "others"] += 1

    def _count_call(self, entry: AuditEntry) -> None:
        kind = _COUNTED.get(entry.action)
        if kind is None:
            return
        if entry.target not in self._tools and len(self._tools) >= _MOST_TOOLS:
            self._left_out["names of called tools"] += 1
            return
        called = self._tools.setdefault(entry.target, CalledTool(name=entry.target))
        setattr(called, kind, getattr(called, kind) + 1)


def _end(run: RunView, entry: AuditEntry) -> None:
    run.state = entry.action
    run.reason = _text(entry, "reason") or entry.target
    run.wall_seconds = _measure(entry, "wall_seconds")
    run.memory_peak_bytes = _number(entry, "memory_peak_bytes")
    run.output_bytes = _number(entry, "output_bytes")
    run.exit_code = _number(entry, "exit_code")
    run.signal = _number(entry, "signal")
    phases = {name: _measure(entry, f"{name}_seconds") for name in _PHASES}
    run.phases = {name: seconds for name, seconds in phases.items() if seconds is not None}


def _event(entry: AuditEntry, began: float) -> Event:
    return Event(
        seq=entry.seq, at=entry.time - began, category=entry.category, action=entry.action,
        target=entry.target, allowed=entry.allowed, about=entry.details,
    )  # fmt: skip


def _text(entry: AuditEntry, name: str) -> str:
    value = entry.details.get(name)
    return value if isinstance(value, str) else ""


def _number(entry: AuditEntry, name: str) -> int | None:
    value = entry.details.get(name)
    return value if type(value) is int else None


def _measure(entry: AuditEntry, name: str) -> float | None:
    value: Any = entry.details.get(name)
    return float(value) if type(value) in (int, float) else None
