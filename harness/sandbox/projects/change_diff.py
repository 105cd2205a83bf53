"""Changes as a unified diff for a person: no name and no content can hide or forge a line of it.

A program chose both versions, so comparing them has a budget (difflib has none: it takes cubic time),
and what is left out is named: binary files, long lines, large files, and the end of a long diff.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ....policies.errors import BudgetExceeded
from ....runner.concurrency import Budget
from ...text.terminal_text import harmless, harmless_line
from .upper import PathVersion, ProjectChange, open_file

_MOST_BYTES = 1 << 20  # a larger file is only named
_MOST_CHARACTERS = 2000  # a longer line is cut
_STEPS = 4_000_000  # about two seconds for all files together
_STEPS_OF_FILE = 1_000_000
_MOST_EDITS = 500  # memory grows with the square of the edits of a file
_CONTEXT = 3
_PLAIN = re.compile(r"[\w./+@=,~^%:#-]+")
_TYPES = {"link": "link", "directory": "directory", "other": "special file", "file": "file"}

_Edit = tuple[str, str]  # " ", "-" or "+", and a line


def diff_text(
    changes: Sequence[ProjectChange], project: int, upper: int, limit_bytes: int
) -> str:  # fmt: skip
    """Return the diff of `changes` between the two open directories.

    No line of a file can pass for one of ours: it begins with a space, + or -.
    """
    budget = Budget("comparing files", _STEPS)
    parts: list[str] = []
    left = limit_bytes
    for number, change in enumerate(changes):
        part = "".join(f"{line}\n" for line in _lines(change, project, upper, budget))
        size = len(part.encode())
        if size > left:
            rest = len(changes) - number
            parts.append(
                f"{rest:,} of {len(changes):,} changes are not shown, since the text would be longer "
                f"than {limit_bytes:,} bytes: name their paths to see them\n"
            )
            break
        parts.append(part)
        left -= size
    return "".join(parts)


def harmless_name(path: str) -> str:
    """Return a path on one line with hidden characters as escapes; in quotes, if it has anything that
    could pass for words about it."""
    if harmless(path) == path and _PLAIN.fullmatch(path):
        return path
    quoted = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{harmless_line(quoted)}"'


def described(version: PathVersion | None) -> str:
    """Return a version in words, such as "file, 12 bytes, executable"."""
    if version is None:
        return "nothing"
    if version.type == "link":
        return f"link to {harmless_name(version.target)}"
    if version.type != "file":
        return _TYPES[version.type]
    return f"file, {version.size_bytes:,} bytes" + (", executable" if version.executable else "")


def leads_out(change: ProjectChange) -> bool:
    """Tell whether a change makes a link that leads out of the project."""
    if change.after is None or change.after.type != "link":
        return False
    target = os.path.normpath(os.path.join("/", "x", change.path, "..", change.after.target))
    return os.path.isabs(change.after.target) or not target.startswith("/x/")


def _lines(change: ProjectChange, project: int, upper: int, budget: Budget) -> Iterator[str]:
    name = harmless_name(change.path)
    before, after = change.before, change.after
    yield f"{change.kind} {name}"
    if change.left_out:
        yield f"note: left out: {harmless(change.left_out)}"
    are_files = all(each is None or each.type == "file" for each in (before, after))
    if not are_files:
        yield f"note: from {described(before)} to {described(after)}"
        if leads_out(change):
            yield "note: this link leads out of the project"
        return
    if before and after and before.executable != after.executable:
        yield "note: now executable" if after.executable else "note: no longer executable"
    elif after and not before and after.executable:
        yield "note: executable"
    texts = []
    for root, version in ((project, before), (upper, after)):
        text, why = _text(root, change.path, version, is_upper=root == upper)
        if text is None:
            yield f"note: {why}: from {described(before)} to {described(after)}"
            return
        texts.append(text)
    if texts[0] != texts[1]:
        yield f"--- {harmless_name(f'a/{change.path}') if before else '/dev/null'}"
        yield f"+++ {harmless_name(f'b/{change.path}') if after else '/dev/null'}"
        yield from _unified(texts[0], texts[1], budget)


def _text(
    root: int, path: str, version: PathVersion | None, *, is_upper: bool
) -> tuple[list[str] | None, str]:
    """Return the lines of a file, the last one with a mark if it has no line end; or why not."""
    if version is None:
        return [], ""
    if version.size_bytes > _MOST_BYTES:
        return None, f"more than {_MOST_BYTES:,} bytes"
    try:
        file = open_file(root, path, allow=is_upper)
        try:
            data = b"".join(iter(lambda: os.read(file, _MOST_BYTES), b""))
        finally:
            os.close(file)
        text = data.decode()
    except UnicodeDecodeError:
        return None, "binary"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    if "\0" in text:
        return None, "binary"
    lines = text.split("\n")
    last = lines.pop()
    return ([*lines, f"{last}\n"] if last else lines), ""


def _unified(before: list[str], after: list[str], budget: Budget) -> Iterator[str]:
    """Yield the hunks of a unified diff."""
    edits = list(_edits(before, after, budget))
    shown = bytearray(len(edits))
    for index, (sign, _) in enumerate(edits):
        if sign != " ":
            first = max(0, index - _CONTEXT)
            shown[first : index + _CONTEXT + 1] = b"\1" * len(shown[first : index + _CONTEXT + 1])
    one = other = 1
    for is_shown, group in groupby(enumerate(edits), lambda each: shown[each[0]]):
        hunk = [edit for _, edit in group]
        old = sum(sign != "+" for sign, _ in hunk)
        new = sum(sign != "-" for sign, _ in hunk)
        if is_shown:
            yield f"@@ -{one if old else one - 1},{old} +{other if new else other - 1},{new} @@"
            for sign, line in hunk:
                yield from _shown_line(sign, line)
        one, other = one + old, other + new


def _shown_line(sign: str, line: str) -> Iterator[str]:
    text, has_no_end, _ = line.partition("\n")
    cut = text[:_MOST_CHARACTERS]
    more = len(text) - len(cut)
    yield sign + harmless(cut) + (f" [and {more:,} more characters]" if more else "")
    if has_no_end:
        yield "\\ No newline at end of file"


def _edits(before: list[str], after: list[str], budget: Budget) -> Iterator[_Edit]:
    """Yield lines that are in both, removed or added; after a common beginning and before a common end
    the shortest such list, or if that is too long, all removed lines and then all added ones."""
    first, shorter = 0, min(len(before), len(after))
    while first < shorter and before[first] == after[first]:
        first += 1
    last = 0
    while last < shorter - first and before[-1 - last] == after[-1 - last]:
        last += 1
    yield from ((" ", line) for line in before[:first])
    old, new = before[first : len(before) - last], after[first : len(after) - last]
    try:
        yield from _shortest(old, new, budget.part("comparing a file", _STEPS_OF_FILE))
    except BudgetExceeded:
        yield from (("-", line) for line in old)
        yield from (("+", line) for line in new)
    yield from ((" ", line) for line in before[len(before) - last :])


def _shortest(old: list[str], new: list[str], budget: Budget) -> list[_Edit]:
    """Return the shortest list of edits: Myers, An O(ND) Difference Algorithm, 1986.

    Raises BudgetExceeded.
    """
    furthest = {1: 0}  # by diagonal: the furthest line of `old`
    history = []
    for edits in range(min(len(old) + len(new), _MOST_EDITS) + 1):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            x = _begin(furthest, diagonal, edits)
            start, y = x, x - diagonal
            while x < len(old) and y < len(new) and old[x] == new[y]:
                x, y = x + 1, y + 1
            budget.spend(1 + x - start)
            furthest[diagonal] = x
            if x >= len(old) and y >= len(new):
                return _walk_back(old, new, history)
    raise BudgetExceeded(f"the files differ by more than {_MOST_EDITS} lines")


def _begin(furthest: dict[int, int], diagonal: int, edits: int) -> int:
    """Return the line of `old` at which the longest path on a diagonal begins: one more removal or one
    more addition than the paths beside it."""
    is_down = diagonal == -edits or (
        diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]
    )
    return furthest[diagonal + 1] if is_down else furthest[diagonal - 1] + 1


def _walk_back(old: list[str], new: list[str], history: list[dict[int, int]]) -> list[_Edit]:
    found: list[_Edit] = []
    x, y = len(old), len(new)
    for edits in range(len(history) - 1, -1, -1):
        furthest, diagonal = history[edits], x - y
        begin = _begin(furthest, diagonal, edits)
        while x > begin and x > 0 and y > 0:
            x, y = x - 1, y - 1
            found.append((" ", old[x]))
        if edits == 0:
            break
        if diagonal == -edits or (
            diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]
        ):
            y -= 1
            found.append(("+", new[y]))
        else:
            x -= 1
            found.append(("-", old[x]))
    return found[::-1]
