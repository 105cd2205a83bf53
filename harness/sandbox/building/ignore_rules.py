"""`IgnoreRules`: the patterns of a .dockerignore, which keep files of a context out of a build."""

import posixpath
import re
from typing import NamedTuple

_MOST_PATTERNS = 2000


class _IgnoreRule(NamedTuple):
    pattern: re.Pattern[str]
    keeps: bool


class IgnoreRules:
    """Tells which paths below a context are left out; the last pattern that fits decides.

    A pattern fits a path and all that lies below it.  Raises ValueError for an invalid pattern.
    """

    def __init__(self, text: str) -> None:
        self._rules: list[_IgnoreRule] = []
        for line in text.removeprefix("\ufeff").splitlines():
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            keeps = pattern.startswith("!")
            pattern = posixpath.normpath(pattern[1:].strip() if keeps else pattern).lstrip("/")
            if pattern == "":
                continue
            self._rules.append(_IgnoreRule(_compiled(pattern), keeps))
            if len(self._rules) > _MOST_PATTERNS:
                raise ValueError(f"more than {_MOST_PATTERNS} patterns")
        self._may_keep = any(each.keeps for each in self._rules)

    def leaves_out(self, path: str) -> bool:
        """Tell whether a path, relative to the context, is left out."""
        is_out = False
        for rule in self._rules:
            if rule.keeps == is_out and rule.pattern.match(path):
                is_out = not rule.keeps
        return is_out

    def leaves_out_tree(self, path: str) -> bool:
        """Tell whether a directory and all below it are left out; an exception could lie below."""
        return not self._may_keep and self.leaves_out(path)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"{translated(pattern)}(?:/.*)?\\Z", re.DOTALL)


def translated(pattern: str) -> str:
    """Return the regular expression of a pattern: `*` and `?` within a name, `**` across names, and
    sets of characters, as in Go's filepath.Match.  Raises ValueError."""
    found, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**", at):
            at = len(pattern) - len(pattern[at:].lstrip("*"))
            if pattern.startswith("/", at):
                found, at = found + "(?:.*/)?", at + 1
            else:
                found += ".*"
            continue
        at += 1
        if char == "*":
            found += "[^/]*"
        elif char == "?":
            found += "[^/]"
        elif char == "[":
            end = pattern.find("]", at + 1 + pattern.startswith("^", at))
            if end < 0:
                raise ValueError(f"a closing ] is missing in {pattern!a}")
            inside, at = pattern[at:end], end + 1
            body = re.sub(r"([\[\]&~|\\])", r"\\\1", inside.removeprefix("^"))
            found += f"[^/{body}]" if inside.startswith("^") else f"[{body}]"
        else:
            if char == "\\" and at < len(pattern):
                char, at = pattern[at], at + 1
            found += re.escape(char)
    try:
        re.compile(found)
    except re.error:
        raise ValueError(f"invalid pattern {pattern!a}") from None
    return found
