"""The page of the dashboard, and the records of a trail that it shows.

`Timeline`: records sorted into runs, sessions and calls of tools; `LiveTimeline`: as they are written.

The page has no external part.  Its only script and its only style are allowed by their hashes, data
is in a script element of the type application/json, which no browser executes, and the script writes
texts by `textContent` alone; Trusted Types refuse any other way.  Every text is bounded and escaped.
"""

import base64
import collections
import functools
import hashlib
import re
import threading
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Literal

import msgspec

from ...runner.audit.record import AuditEntry
from ...runner.requests.result import Phases
from ..text.terminal_text import harmless
from .overview import CalledTool, Event, Overview, RunView, SessionView

MOST_RUNS = 500
MOST_EVENTS = 200  # shown events of one run or session
MOST_OTHERS = 200
_MOST_TOOLS = 1000
_MOST_KINDS = 1000
_MOST_OPEN = 10_000  # calls of tools
_PHASES = Phases.__struct_fields__
_ENDS = ("returned", "failed", "refused")  # ends of a call that was begun
_COUNTED = {"call": "calls", "failed": "failed", "refused": "refused", "waiting": "waited"}


class Timeline:
    """Takes records one after the other and keeps the latest of each kind; the rest is counted."""

    def __init__(self, most_runs: int = MOST_RUNS, most_events: int = MOST_EVENTS) -> None:
        """Keep at most `most_runs` runs and sessions, and `most_events` records of each."""
        self._most_runs = most_runs
        self._most_events = most_events
        self._counts: collections.Counter[str] = collections.Counter()
        self._runs: dict[str, RunView] = {}  # by span
        self._spans: dict[str, str] = {}  # span -> span of the run that caused it
        self._caused: dict[str, set[str]] = {}  # the reverse mapping, so that both can be dropped
        self._calls: dict[str, Event] = {}  # running tool calls by span
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
        """Put the collected events into an overview, the latest runs and sessions first."""
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


_MOST_RUNS = 200
_MOST_EVENTS = 100
_MOST_EARLY = 1000


class LiveTimeline:
    """A Timeline for `AuditLog(on_entry=...)`, which calls it from many threads.

    Two threads may deliver their records in the wrong order, so a record waits for earlier ones.
    """

    def __init__(self) -> None:
        self._timeline = Timeline(_MOST_RUNS, _MOST_EVENTS)
        self._lock = threading.Lock()
        self._early: dict[int, AuditEntry] = {}
        self._next = 0  # the number of the next record; 0 before the first

    def add(self, entry: AuditEntry) -> None:
        """Take a record.  One that could not be written has no number, and takes no turn."""
        with self._lock:
            if not entry.seq:
                self._timeline.add(entry)
                return
            self._next = self._next or entry.seq
            self._early[entry.seq] = entry
            if len(self._early) > _MOST_EARLY:  # one is missing
                self._next = min(self._early)
            while found := self._early.pop(self._next, None):
                self._timeline.add(found)
                self._next += 1

    def fill(self, overview: Overview) -> None:
        """Put the records so far into an overview."""
        with self._lock:
            self._timeline.fill(overview)


Connections = Literal["'none'", "'self'"]
_NOTHING = b"null"
_PLACE = re.compile(rb"\{(?:policy|style|script|data)\}")


def static_page(overview: Overview) -> bytes:
    """Return the page with an overview inside; it connects to nothing."""
    return _page(encoded(overview), "'none'")


@functools.cache
def live_page() -> bytes:
    """Return the page without data; it asks the server that it came from."""
    return _page(_NOTHING, "'self'")


def policy(connections: Connections) -> str:
    """Return the Content-Security-Policy of the page, for a header.

    A browser heeds `frame-ancestors` in a header only, so the page itself does not have it.
    """
    return f"{_policy(connections)}; frame-ancestors 'none'"


def _policy(connections: Connections) -> str:
    return (
        f"default-src 'none'; script-src '{_hash('page.js')}'; style-src '{_hash('page.css')}'; "
        f"connect-src {connections}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _page(data: bytes, connections: Connections) -> bytes:
    parts = {
        b"{policy}": _policy(connections).encode(), b"{style}": _part("page.css"),
        b"{script}": _part("page.js"), b"{data}": data,
    }  # fmt: skip
    return _PLACE.sub(lambda place: parts[place[0]], _part("page.html"))


def _hash(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_part(name)).digest()).decode()


@functools.cache
def _part(name: str) -> bytes:
    return files(__package__).joinpath(name).read_bytes()


MOST_TEXT = 20_000  # characters of one text; texts to approve are shorter
MOST_NAME = 300
MOST_CHARACTERS = 4_000_000  # characters of all texts together
# HTML ends a script element at `</script` and changes its parser state at `<!--`. `&` is escaped so
# that the text stays the same wherever it is pasted.
_IN_A_PAGE = ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026"))


def encoded(overview: Overview) -> bytes:
    """Return the overview as JSON.

    Every text and name is escaped by `harmless`, so that no character hides or reorders others; it is
    cut at `MOST_TEXT`, and once all texts have `MOST_CHARACTERS`, it is left out.  No `<` is in the
    JSON: it can stand in a script element.
    """
    data = msgspec.json.encode(_Bounded().value(msgspec.to_builtins(overview)))
    for character, escape in _IN_A_PAGE:
        data = data.replace(character, escape)
    return data


class _Bounded:
    """Makes values safe to show, within one budget of characters."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value, MOST_TEXT)
        if isinstance(value, dict):
            return {self._text(name, MOST_NAME): self.value(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def _text(self, text: str, most: int) -> str:
        most = max(0, min(most, self._left))
        if len(text) <= most and text.isascii() and text.isprintable():  # most are
            self._left -= len(text)
            return text
        shown = harmless(text[:most])
        self._left -= len(shown)
        return shown if len(text) <= most else f"{shown}⟨cut: {len(text):,} characters⟩"
