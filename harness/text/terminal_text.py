"""Terminal output: text of guests with hidden characters escaped, and summaries of results.

`ProgressLine`: a line on stderr while a command works for more than a second.

Presentation of a call to the person who approves it: every argument whole, none hidden by another.

A program or a model writes the arguments, and may try to get something approved that the person does
not see: pushed out of view by padding, behind blanks that look like the end, or in hidden characters.
So the names come first; each argument has one line, the shortest first; runs of blanks and repetitions
are counted instead of shown; hidden characters are escaped.
"""

import contextlib
import itertools
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import msgspec

from ...policies.errors import ApprovalRequired
from ...runner.requests.result import SEVERAL, SandboxResult, Violation
from .hidden import replace_hidden

if TYPE_CHECKING:
    import threading

_SHOWN, _LONGEST = 10, 300  # shown violations, and characters of one


def harmless(text: str) -> str:
    """Return `text` with its hidden characters (hidden.py) written as escapes, such as `\\u200b`."""
    return replace_hidden(text, _escaped)


def harmless_line(text: str) -> str:
    """Return `text` as `harmless` does, with line ends and tabs as escapes, too: a name that a program
    chose cannot pass for a line of ours."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def result_line(result: SandboxResult) -> str:
    """Return status, reason, error, time and peak memory on one line."""
    ended = f"{result.status.value} ({result.reason})"
    parts = [coloured(ended, "green" if result.ok else "red", sys.stderr)]
    if result.error:
        parts.append(harmless(" ".join(result.error.splitlines())))
    if result.value is not None:
        parts.append(f"value {harmless(repr(result.value))[:200]}")
    parts.append(f"{result.execution_time * 1000:.1f} ms")
    parts.append(f"peak {result.usage.memory_peak_bytes / 1024 / 1024:.1f} MiB")
    return "cellwright: " + " · ".join((*parts, *dropped(result)))


def dropped(result: SandboxResult) -> list[str]:
    """Return texts about the dropped parts of the streams and of the value."""
    return [f"dropped {lost:,} bytes of {name}" for name, lost in result.truncated.items()]


def hint_lines(result: SandboxResult) -> list[str]:
    """Return the hints of a result, one a line."""
    return [f"hint: {harmless(hint)}" for hint in result.hints]


def notice_lines(result: SandboxResult) -> list[str]:
    """Return the notices of a result, one a line."""
    return [f"cellwright: {harmless(notice)}" for notice in result.notices]


def violation_lines(result: SandboxResult) -> list[str]:
    """Return the first ten violations of a program, one a line."""
    refused = coloured("refused", "yellow", sys.stderr)
    lines = [f"cellwright: {refused}: {_attempt(each)}" for each in result.violations[:_SHOWN]]
    if left_out := result.violations[_SHOWN:]:
        is_complete = all(each.process != SEVERAL for each in left_out)
        where = "has them all" if is_complete else "has the first in full, and counts the others"
        attempts = sum(each.count for each in left_out)
        lines.append(f"cellwright: and {attempts:,} more that were refused; --json {where}")
    return lines


def connection_lines(result: SandboxResult) -> list[str]:
    """Return the first ten connections of a program, one a line."""
    lines = [
        f"cellwright: connection: {harmless(each.name)} {each.port}"
        f" ({each.address or 'not dialled'}), sent {each.sent_bytes:,} bytes, received "
        f"{each.received_bytes:,}, {harmless(each.outcome)}"
        for each in result.connections[:_SHOWN]
    ]
    if left_out := len(result.connections) - len(lines):
        lines.append(f"cellwright: and {left_out:,} more connections; --json has them all")
    return lines


def _attempt(violation: Violation) -> str:
    words = harmless(" ".join((violation.syscall, *violation.arguments)))[:_LONGEST]
    times = f", {violation.count:,} times" if violation.count > 1 else ""
    return f"{words} ({violation.rule}){times}"


def print_header(text: str) -> None:
    """Print the header of a list on a terminal only: programs read rows without a header."""
    if sys.stdout.isatty():
        sys.stdout.write(coloured(text, "bold", sys.stdout) + "\n")


_COLOURS = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}  # ECMA-48, SGR


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return `text` in a colour if `stream` takes colours; no meaning depends on colour alone."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if has_colours(stream) else text


def has_colours(stream: TextIO) -> bool:
    """Tell whether output to `stream` is coloured: by default on a terminal.

    NO_COLOR (no-color.org) declines colours, and wins; FORCE_COLOR (force-color.org) asks for them
    also in a pipe or file, such as the log of a build.  An empty variable counts as none.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


_PATIENCE_SECONDS, _TICK_SECONDS = 1.0, 0.25
_ERASE = "\r\x1b[K"  # to the beginning of the line, and erase to its end (ECMA-48, EL)
_COLUMNS = 80  # width of a terminal that does not report it


class ProgressLine:
    """Shows on stderr the command's current work and its duration, after a second.

    Only a terminal gets it; a pipe or file gets nothing. A terminal that cannot erase, TERM=dumb, gets
    one line. Use it as a context manager around work that prints nothing, or that prints in `hidden`.
    At the end the line is erased.
    """

    def __init__(self, what: str) -> None:
        self._what = harmless(what)
        self._thread: threading.Thread | None = None
        self._is_drawn = False

    def __enter__(self) -> "ProgressLine":
        if sys.stderr is not None and sys.stderr.isatty():
            import threading  # only for a terminal

            self._ended, self._lock = threading.Event(), threading.Lock()
            self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._ended.set()
            self._thread.join()
            self._erase()

    def say(self, what: str) -> None:
        """Say from now on that the command does this."""
        self._what = harmless(what)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Show no line during a block, which can print."""
        if self._thread is None:
            yield
            return
        with self._lock:
            self._erase()
            yield

    def _draw(self) -> None:
        began = time.monotonic()
        is_dumb = os.environ.get("TERM") == "dumb"
        patience = _PATIENCE_SECONDS
        for turn in itertools.cycle("|/-\\"):
            if self._ended.wait(patience):
                return
            patience = _TICK_SECONDS
            with self._lock, contextlib.suppress(OSError, ValueError):  # the terminal is gone
                if is_dumb:
                    sys.stderr.write(f"cellwright: {self._what} ...\n")
                    return
                self._is_drawn = True
                line = f"cellwright: {turn} {self._what} ({time.monotonic() - began:.0f} s)"
                sys.stderr.write(f"{_ERASE}{line[: _columns() - 1]}")
                sys.stderr.flush()

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(_ERASE)
                sys.stderr.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


MOST_SHOWN = 8000  # characters of all arguments: as much as a person can be expected to read
MOST_LISTED = 400  # characters of one argument in a list
_MOST_NAMES = 64  # arguments of a call that can be approved
_DEEPEST = 8  # nested levels whose values get a line each
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_RUN = 16  # longest run of a repeated character; 3 for blanks
_LINE_END = r"[\n\r\x0b\x0c\x85\u2028\u2029]|\\[nr]"
_BLANK = r"[\s\u00ad\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]|\\[nrt]"
_RUN = re.compile(
    rf"(?P<backslash>\\\\)|(?P<blank>(?:{_BLANK}){{4,}})|(?P<same>(.)\4{{{_LONGEST_RUN},}})",
    re.DOTALL,
)
_TOKEN = re.compile(r"[^\s\"]+")
_LATIN = re.compile("[A-Za-z0-9]")
_UNSEEN = re.compile("[^\x20-\x7e]")
# Categories Mn and Me: marks over a character, variation selectors among them; Zs: blanks of other
# widths.
_WRITTEN_OUT = frozenset(("Mn", "Me", "Zs"))
# Letters and symbols by category that are invisible (Unicode: Default_Ignorable_Code_Point, and
# BRAILLE PATTERN BLANK), and the brackets of this module's notes, which an argument must not forge.
_OTHERS_UNSEEN = frozenset("\u115f\u1160\u2800\u3164\uffa0\u27e8\u27e9")


class Presented(NamedTuple):
    """The text of a call's arguments; `is_whole` if no part was cut."""

    text: str
    is_whole: bool
    characters: int  # number of characters of the uncut arguments


def present(arguments: Mapping[str, Any], most: int = MOST_SHOWN) -> Presented:
    """Return the arguments for a person: their names, then one line each, cut at `most` characters."""
    given = [(name, _readable(_encoded(value))) for name, value in _flat(arguments, "", 1)]
    names = [name for name, _ in given]
    lines = sorted(given, key=lambda line: len(line[1]))
    total = sum(len(name) + len(value) for name, value in lines)
    told = [
        f"{len(names)} arguments: {', '.join(names[:_MOST_NAMES])}" if names else "no arguments"
    ]
    is_whole = total <= MOST_SHOWN
    for name, value in lines[:_MOST_NAMES]:
        cut = _cut(value, most)
        is_whole &= cut is value
        told.append(f"  {name}: {cut}")
    if len(lines) > _MOST_NAMES:
        is_whole = False
        told.append(f"  ⟨{len(lines) - _MOST_NAMES} more⟩")
    return Presented("\n".join(told), is_whole, total)


def shortened(text: str, most: int = MOST_LISTED) -> str:
    """Return other untrusted text on one line, readable, and cut at `most` characters."""
    return _cut(_readable(_encoded(text)[1:-1]), most)


def presented_whole(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return the arguments as a person must see them to approve the call.

    Raises ApprovalRequired if they are too long to be shown whole: a person cannot approve what is not
    shown.
    """
    presented = present(arguments)
    if not presented.is_whole:
        raise ApprovalRequired(
            f"{tool} needs approval, and its arguments cannot be shown whole: {len(arguments)} "
            f"arguments, {presented.characters:,} characters of {MOST_SHOWN:,}",
            "pass shorter arguments, or let a program that checks them approve the call",
            tool=tool,
        )
    return presented.text


def _flat(values: Mapping[str, Any], above: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield each value with its path, such as `message.to`; objects yield their values."""
    for key, value in values.items():
        name = above + (key if _PLAIN_NAME.fullmatch(key) else _readable(_encoded(key)))
        if isinstance(value, dict) and value and depth < _DEEPEST:
            yield from _flat(value, f"{name}.", depth + 1)
        else:
            yield name, value


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else f"{value[:most]}⟨cut: {len(value):,} characters⟩"


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8", "replace")


def _readable(text: str) -> str:
    """Return JSON on one line, with hidden characters escaped and padding counted."""
    if not text.isascii():
        text = _TOKEN.sub(_without_lookalikes, text)
    kept, at = [], 0
    for run in _RUN.finditer(text):
        kept.append(_written_out(text[at : run.start()]))
        at = run.end()
        if run["backslash"]:  # an escaped backslash: no escape follows
            kept.append(run["backslash"])
        elif run["blank"]:
            kept.append(_counted(run["blank"]))
        else:
            kept.append(f"{_written_out(run['same'][0])}⟨{len(run['same']):,} times⟩")
    kept.append(_written_out(text[at:]))
    return harmless("".join(kept))


def _counted(blanks: str) -> str:
    """Return how many blanks there are, and how many of them end a line: a command may follow there."""
    count, ends = (len(re.findall(kind, blanks)) for kind in (_BLANK, _LINE_END))
    return f"⟨{count:,} blanks, {ends:,} of them line ends⟩" if ends else f"⟨{count:,} blanks⟩"


def _written_out(text: str) -> str:
    return _UNSEEN.sub(_escaped_match, text)


def _escaped_match(match: re.Match[str]) -> str:
    character = match[0]
    if character in _OTHERS_UNSEEN or unicodedata.category(character) in _WRITTEN_OUT:
        return _code_of(character)
    return character


def _without_lookalikes(token: re.Match[str]) -> str:
    """Escape the lookalikes in a word, address or path: characters that stand for ASCII ones (NFKC),
    and letters of other scripts beside Latin ones (UTS 39)."""
    word = token[0]
    if word.isascii():
        return word
    is_latin = bool(_LATIN.search(word))
    return "".join(
        _code_of(each) if not each.isascii() and _is_lookalike(each, is_latin=is_latin) else each
        for each in word
    )


@lru_cache(4096)
def _is_lookalike(character: str, *, is_latin: bool) -> bool:
    if character in _OTHERS_UNSEEN:  # `_escaped` writes these out
        return False
    same = unicodedata.normalize("NFKC", character)
    if len(same) == 1 and same.isascii():
        return True
    is_letter = unicodedata.category(character)[0] in "LN"
    return is_latin and is_letter and not unicodedata.name(character, "").startswith("LATIN ")


def _code_of(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
