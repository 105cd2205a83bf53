"""`check`: a program's findings, remembered."""

from functools import lru_cache
from typing import Any

from .findings import Finding, Rules
from .patterns import check_patterns
from .python import check_python

MAX_CHARACTERS = 256 * 1024  # what is longer is not looked at: a check is advice, and costs time
_REMEMBERED = 128
_REMEMBERED_CHARACTERS = 32 * 1024
_PYTHON = ("python", "python3")
_DEFAULT = Rules()


def check(code: str, language: str = "python", rules: Rules = _DEFAULT) -> tuple[Finding, ...]:
    """Return what is found in `code`."""
    if len(code) > MAX_CHARACTERS:
        return ()
    if len(code) > _REMEMBERED_CHARACTERS:
        return _check(code, language, rules)
    return _remembered(code, language, rules)


def _check(code: str, language: str, rules: Rules) -> tuple[Finding, ...]:
    return check_python(code, rules) if language in _PYTHON else check_patterns(code, language)


_remembered = lru_cache(_REMEMBERED)(_check)


def validate_code(code: str, language: str = "python") -> dict[str, Any]:
    """Return {"valid": whether nothing was found, "issues": [{"pattern", "reason", "line"}]}."""
    issues = [
        {"pattern": finding.what, "reason": finding.reason, "line": finding.line}
        for finding in check(code, language)
    ]
    return {"valid": not issues, "issues": issues}
