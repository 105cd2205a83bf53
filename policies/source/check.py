"""`check`: the findings of a source check, cached by the digest of the source."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from ..digest import sha256
from .findings import MAX_FINDINGS, Finding, Rules
from .python_check import check_python

MAX_CHARACTERS = 256 * 1024  # longer sources are not checked: a check is advice, and takes time
_REMEMBERED = 1024
_PYTHON = ("python", "python3")
_DEFAULT = Rules()
_Key = tuple[bytes, str, Rules]


class _FindingsCache:
    """An LRU cache of findings by the digest of the source; the sources are not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[_Key, tuple[Finding, ...]] = OrderedDict()

    def get(self, key: _Key) -> tuple[Finding, ...] | None:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: _Key, found: tuple[Finding, ...]) -> None:
        with self._lock:
            self._found[key] = found
            if len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)

    def __len__(self) -> int:
        return len(self._found)


_cache = _FindingsCache()


def check(code: str, language: str = "python", rules: Rules = _DEFAULT) -> tuple[Finding, ...]:
    """Return the first MAX_FINDINGS findings in `code`, in the order of the text.

    A source that is too long is a finding itself: padding does not evade enforced checks.
    """
    if len(code) > MAX_CHARACTERS:
        reason = "too long to be checked"
        return (Finding("size", f"more than {MAX_CHARACTERS} characters", reason, 1, 0),)
    key = (sha256(code.encode(errors="surrogatepass")).digest(), language, rules)
    found = _cache.get(key)
    if found is None:
        found = _check(code, language, rules)
        _cache.put(key, found)
    return found


def _check(code: str, language: str, rules: Rules) -> tuple[Finding, ...]:
    if language in _PYTHON:
        return check_python(code, rules)
    return tuple(islice(check_patterns(code, language), MAX_FINDINGS))


def validate_code(code: str, language: str = "python") -> dict[str, Any]:
    """Return {"valid": True if there are no findings, "issues": [{"pattern", "reason", "line"}]}."""
    issues = [
        {"pattern": finding.what, "reason": finding.reason, "line": finding.line}
        for finding in check(code, language)
    ]
    return {"valid": not issues, "issues": issues}


_NAMES = {
    "sh": "bash", "shell": "bash", "js": "javascript", "node": "javascript", "typescript": "javascript",
}  # fmt: skip
_COMMENTS = {"bash": "#", "ruby": "#", "javascript": "//"}
_LINE_CHARACTERS = 2000
_FINDING_CHARACTERS = 80


@cache
def _compiled(language: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    import tomllib  # most programs are Python
    from pathlib import Path

    tables = tomllib.loads(Path(__file__).with_name("patterns.toml").read_text())
    return tuple((re.compile(each["pattern"]), each["reason"]) for each in tables[language])


def check_patterns(code: str, language: str) -> Iterator[Finding]:
    """Yield the first match of each pattern in each line; nothing for a language without patterns."""
    language = _NAMES.get(language, language)
    if language not in _COMMENTS:
        return
    patterns = _compiled(language)
    for number, line in enumerate(code.split("\n"), 1):
        if line.lstrip().startswith(_COMMENTS[language]):
            continue
        for pattern, reason in patterns:
            if match := pattern.search(line[:_LINE_CHARACTERS]):
                what = match[0].strip()[:_FINDING_CHARACTERS]
                yield Finding("pattern", what, reason, number, match.start())
