"""Patterns for Bash, JavaScript and Ruby, each with its reason.

Lines that are comments are skipped; otherwise strings and comments are not told apart.  The source may
be written to make a search slow, so every repetition that could overlap with the next part of its
pattern is bounded.
"""

import re
from collections.abc import Iterator
from functools import cache

from .findings import Finding

_FETCH = "reaches for a network; a cell has none"
_EVAL = "runs text as code"
_START = "starts another program"
_MODULES = "(?:child_process|fs|net|http|https|dgram|tls|dns)"
_PATTERNS: dict[str, dict[str, str]] = {
    "bash": {
        r"\b(?:curl|wget|nc|ncat|ssh|scp|telnet)\b": _FETCH,
        r"/dev/(?:tcp|udp)/": _FETCH,
        r"\beval\b": _EVAL,
        r"\brm\s+-[a-zA-Z]*[rf]": "removes trees of files",
        r"\b(?:sudo|su|chroot|mount|umount|mkfs\S*|dd)\b": "asks for privilege",
        r"/etc/(?:passwd|shadow|sudoers)": "reads accounts",
        r":\s{0,9}\(\s{0,9}\)\s{0,9}\{[^|]{0,80}\|[^&]{0,80}&\s{0,9};?\s{0,9}\}": "a fork bomb",
        r"\bbase64\s+(?:-d|--decode)\b": "hides what runs",
    },
    "javascript": {
        r"\brequire\s*\(\s*['\"](?:node:)?(?:child_process|cluster|worker_threads)": _START,
        rf"\brequire\s*\(\s*['\"](?:node:)?{_MODULES}\b": "files or network",
        rf"\bfrom\s+['\"](?:node:)?{_MODULES}\b": "files or network",
        r"\bimport\s*\(": "imports a name built at run time",
        r"\beval\s*\(": _EVAL,
        r"\bnew\s+Function\s*\(": _EVAL,
        r"\bprocess\.(?:binding|dlopen|kill|env)\b": "reaches beyond the program",
        r"\bfetch\s*\(": _FETCH,
    },
    "ruby": {
        r"\b(?:system|exec|spawn|fork)\b\s*[(\s'\"]": _START,
        r"`[^`]*`|%x[{(\[]": _START,
        r"\b(?:eval|instance_eval|class_eval)\b": _EVAL,
        r"\brequire\s+['\"](?:socket|net/http|open-uri|open3|fiddle)": "network, programs or memory",
        r"\b(?:File|IO|Dir|FileUtils)\.": "files",
        r"\bIO\.popen\b|\bOpen3\b": _START,
        r"\bObjectSpace\b": "lists every object",
    },
}
_NAMES = {
    "sh": "bash", "shell": "bash", "js": "javascript", "node": "javascript", "typescript": "javascript",
}  # fmt: skip
_COMMENTS = {"bash": "#", "ruby": "#", "javascript": "//"}
_LINE_CHARACTERS = 2000
_FINDING_CHARACTERS = 80


@cache
def _compiled(language: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(each), reason) for each, reason in _PATTERNS[language].items())


def check_patterns(code: str, language: str) -> Iterator[Finding]:
    """Yield the first match of each pattern in each line; nothing for a language without patterns."""
    language = _NAMES.get(language, language)
    if language not in _PATTERNS:
        return
    patterns = _compiled(language)
    for number, line in enumerate(code.split("\n"), 1):
        if line.lstrip().startswith(_COMMENTS[language]):
            continue
        for pattern, reason in patterns:
            if match := pattern.search(line[:_LINE_CHARACTERS]):
                what = match[0].strip()[:_FINDING_CHARACTERS]
                yield Finding("pattern", what, reason, number, match.start())
