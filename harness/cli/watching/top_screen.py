"""`TopScreen`: one screen of `cellwright top`, by rich (extra `top`).

Names of sessions and hosts, and arguments of refused calls, come from programs: each is one line of
escaped text, never markup, and is cut where the terminal ends.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TextIO

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...dashboard.overview import CellView
from ...sandbox.remote.frames import DaemonStatus
from ...text.terminal_text import harmless_line
from .activity import ActivitySnapshot, CellRow

_MIB = 1024 * 1024
_LONGEST = 300  # characters of a text, before it is cut at the edge
_WIDEST = 1000
_SORTS: dict[str, Callable[[CellRow], float | str]] = {
    "cpu": lambda row: -(row.cpu_percent or 0.0),
    "memory": lambda row: -(row.view.memory_bytes or 0),
    "age": lambda row: -row.view.age_seconds,
    "idle": lambda row: -(row.view.idle_seconds or 0.0),
    "state": lambda row: row.view.state,
    "policy": lambda row: row.view.policy,
    "name": lambda row: row.view.session,
}
SORTS = tuple(_SORTS)
_NAMES = ("POLICY", "NAME", "HOST", "REFUSED", "TENANT")  # columns of texts of any length
_HELP = """\
q, Ctrl-C        quit
P M T N          sort by CPU, memory, age, name
< >              sort by the column before, after
r                reverse the order
/                show only lines with a text; Enter ends it, Esc drops it
up, down, PgUp, PgDn, Home   move in the list
space            look again now
h, ?             this help; any key leaves it"""


class TopView(NamedTuple):
    """The choices of the person: order, text, place in the list."""

    sort: str = SORTS[0]
    is_reversed: bool = False
    wanted: str = ""  # text that lines must have
    is_typing: bool = False  # the text is being typed
    first: int = 0  # line at the top of the list of cells
    shows_help: bool = False
    seconds: float = 2.0


class _LinesOfTop(NamedTuple):
    """A table: titles of columns, of which those in `right` are numbers, and rows of cells."""

    titles: tuple[str, ...]
    right: frozenset[int]
    rows: Sequence[tuple[Text, ...]]


class TopScreen:
    """Renders snapshots for one stream."""

    def __init__(self, stream: TextIO) -> None:
        is_terminal = stream.isatty()
        # Without a terminal nothing is cut but what is longer than any terminal.
        self.console = Console(
            file=stream, highlight=False, markup=False, emoji=False,
            width=None if is_terminal else _WIDEST, soft_wrap=False,
        )  # fmt: skip

    def whole(self, snapshot: ActivitySnapshot, view: TopView) -> None:
        """Print every line, for scripts."""
        for each in self._parts(snapshot, view, None):
            with self.console.capture() as captured:
                self.console.print(each)
            lines = [line.rstrip() for line in captured.get().splitlines()]
            self.console.file.write("".join(f"{line}\n" for line in lines))

    def of(
        self, snapshot: ActivitySnapshot, view: TopView, rows: int, columns: int
    ) -> RenderableType:
        """Return what fits in a terminal of that size."""
        self.console.size = ConsoleDimensions(columns, rows)  # else COLUMNS would count
        return Group(*self._parts(snapshot, view, rows))

    def _parts(
        self, snapshot: ActivitySnapshot, view: TopView, height: int | None
    ) -> Iterable[RenderableType]:
        head = [_head(snapshot), *(_text(f"! {each}", "red") for each in snapshot.problems[:3])]
        if snapshot.daemon:
            head.append(_daemon_line(snapshot.daemon))
        yield from head
        if view.shows_help:
            yield _text(_HELP, lines=True)
            return
        others = [each for each in _others(snapshot) if each.rows]
        cells = _cells(snapshot, view)
        if height is None:
            yield from (_table(each, len(each.rows)) for each in (cells, *others))
            return
        room = max(0, height - len(head) - 1)  # the last line has the keys
        shares = _shares(room, others)
        of_cells = max(0, room - sum(shares) - 1)
        first = min(view.first, max(0, len(cells.rows) - of_cells))
        yield _table(cells._replace(rows=cells.rows[first:]), of_cells, fills=True)
        for each, share in zip(others, shares, strict=True):
            if share > 1:
                yield _table(each, share - 1)
        yield _keys(view)


def _shares(room: int, others: Sequence[_LinesOfTop]) -> list[int]:
    """Return how many lines each section below the cells has: together at most half of the room."""
    most = room // 2 // max(1, len(others))
    return [min(len(each.rows) + 1, most) for each in others]


def _table(section: _LinesOfTop, most: int, *, fills: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(section.titles):
        # Where the terminal is narrow, rich takes the room from columns that may wrap; no cell does.
        may_wrap = title in _NAMES
        table.add_column(
            title, justify="right" if number in section.right else "left", no_wrap=not may_wrap
        )
    for row in section.rows[:most]:
        table.add_row(*row)
    for _ in range(most - len(section.rows) if fills else 0):
        table.add_row(*[""] * len(section.titles))
    return table


def _text(text: str, style: str = "", *, lines: bool = False) -> Text:
    """Return untrusted text as one line."""
    shown = text if lines else harmless_line(text[:_LONGEST])
    return Text(shown, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _cell(text: str, style: str = "") -> Text:
    return _text(text, style)


def _head(snapshot: ActivitySnapshot) -> Text:
    views = [each.view for each in snapshot.cells]
    sessions = [each for each in views if each.kind == "session"]
    frozen = sum(each.state == "frozen" for each in sessions)
    memory = sum(each.memory_bytes or 0 for each in views if each.kind != "session")
    cpu = sum(each.cpu_percent or 0.0 for each in snapshot.cells if each.view.kind != "session")
    more = f", {snapshot.left_out} not shown" if snapshot.left_out else ""
    return _text(
        f"cellwright {time.strftime('%H:%M:%S', time.localtime(snapshot.at))}  "
        f"{len(views) - len(sessions)} sandboxes, {len(sessions)} sessions ({frozen} frozen){more}  "
        f"{memory / _MIB:.1f} MiB  CPU {cpu:.1f}%",
        "bold",
    )


def _daemon_line(status: DaemonStatus) -> Text:
    refused = sum(count for *_, count in status.refused)
    return _text(
        f"daemon {status.pid}, up {_duration(status.uptime_seconds)}, "
        f"{refused} requests refused by limits"
        + (f", not reloaded: {status.reload_error}" if status.reload_error else "")
    )


def _cells(snapshot: ActivitySnapshot, view: TopView) -> _LinesOfTop:
    wanted = view.wanted.lower()
    rows = [each for each in snapshot.cells if wanted in _searched(each.view)]
    rows.sort(key=lambda row: row.view.id)
    rows.sort(key=_SORTS[view.sort], reverse=view.is_reversed)
    titles = ("ID", "KIND", "STATE", "MIB", "CPU%", "CPU", "AGE", "IDLE", "POLICY", "LANG", "NAME")
    return _LinesOfTop(titles, frozenset(range(3, 8)), [_cell_row(each) for each in rows])


def _searched(view: CellView) -> str:
    words = (view.id, view.kind, view.state, view.policy, view.language, view.session)
    return " ".join(words).lower()


def _cell_row(row: CellRow) -> tuple[Text, ...]:
    view = row.view
    style = {"orphan": "red", "frozen": "cyan"}.get(view.state, "")
    memory = "-" if view.memory_bytes is None else f"{view.memory_bytes / _MIB:.1f}"
    percent = "-" if row.cpu_percent is None else f"{row.cpu_percent:.1f}"
    texts = (
        view.id, view.kind, view.state, memory, percent, _duration(view.cpu_seconds),
        _duration(view.age_seconds), _duration(view.idle_seconds), view.policy, view.language,
        view.session,
    )  # fmt: skip
    return tuple(_cell(each, style) for each in texts)


def _others(snapshot: ActivitySnapshot) -> Iterable[_LinesOfTop]:
    if snapshot.daemon:
        yield _tenants(snapshot.daemon)
    names = sorted(snapshot.hosts, key=lambda each: -each.asked)
    yield _LinesOfTop(
        ("ASKED", "OUTCOME", "SANDBOX", "HOST"),
        frozenset((0,)),
        [
            (_cell(f"{each.asked}"), _outcome(each.outcome), _cell(each.where), _cell(each.name))
            for each in names
        ],
    )
    yield _LinesOfTop(
        ("TIME", "RULE", "REFUSED"),
        frozenset(),
        [
            (
                _cell(time.strftime("%H:%M:%S", time.localtime(each.time))),
                _cell(str(each.details.get("rule", each.category)).partition(":")[0], "yellow"),
                _cell(f"{each.action} {each.target}{_times(each.details.get('count'))}"),
            )
            for each in reversed(snapshot.refusals or ())
        ],
    )


def _tenants(status: DaemonStatus) -> _LinesOfTop:
    titles = ("TENANT", "CLIENTS", "CALLS", "WAITING", "SESSIONS", "CPU LEFT")
    return _LinesOfTop(titles, frozenset(range(1, 6)), [
        (
            _cell(each.name), _cell(f"{each.connections}"), _of(each.calls, each.most_calls),
            _cell(f"{each.waiting}"), _of(each.sessions, each.most_sessions),
            _cell("-" if each.cpu_seconds_left is None else f"{each.cpu_seconds_left:.1f} s"),
        )
        for each in status.tenants
    ])  # fmt: skip


def _of(used: int, most: int | None) -> Text:
    return _cell(f"{used}" if most is None else f"{used}/{most}")


def _outcome(outcome: str) -> Text:
    return _cell(outcome, "yellow" if outcome == "refused" else "")


def _times(count: object) -> str:
    return f", {count:,} times" if isinstance(count, int) and count > 1 else ""


def _keys(view: TopView) -> Text:
    if view.is_typing:
        return _text(f"only lines with: {view.wanted}_", "reverse")
    order = f"{view.sort}{' reversed' if view.is_reversed else ''}"
    wanted = f"  only {view.wanted!r}" if view.wanted else ""
    text = f"q quit  h help  < > sort by {order}  r reverse  / filter{wanted}"
    line = _text(f"{text}  every {view.seconds:g} s", "reverse")
    line.end = ""  # a line end in the last line would scroll
    return line


def _duration(seconds: float | None) -> str:
    """Return a duration in at most six characters."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"
