"""Globs of host paths to the paths that they match now."""

import glob
import os
from collections.abc import Sequence

from ..policies.errors import PolicyError
from ..policies.policy import lies_in


def expand(name: str, patterns: Sequence[str], *, must_match: bool = True) -> tuple[str, ...]:
    """Return what `patterns` match, links resolved.

    A link that a wildcard matches and that leads out of the pattern's own directory gives nothing: who
    may write there must not choose what is shown.  Raises PolicyError, naming the field `name`.
    """
    found: list[str] = []
    for pattern in patterns:
        if not os.path.isabs(pattern) or "\0" in pattern:
            raise PolicyError(f"{name}: {pattern!r} is not an absolute path")
        matches = _matches(pattern)
        if must_match and not matches:
            raise PolicyError(f"{name}: {pattern!r} matches nothing on this host")
        found += matches
    return tuple(dict.fromkeys(found))


def _matches(pattern: str) -> list[str]:
    base = pattern
    while glob.has_magic(base):
        base = os.path.dirname(base)
    real = [os.path.realpath(path) for path in sorted(glob.glob(pattern))]
    if base == pattern:
        return real
    return [path for path in real if lies_in(path, (os.path.realpath(base),))]
