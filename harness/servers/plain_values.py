"""Values of programs, as JSON that every client can parse."""

import json
from typing import Any

_MAX_DEPTH = 64  # serializers and parsers fail somewhere beyond


def plain(value: Any) -> Any:
    """Return a value unchanged if every client can parse it, else as text."""
    try:
        if _is_flat(value):
            json.dumps(value, allow_nan=False)
            return value
        return json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return ascii(type(value).__name__)


def _is_flat(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inside += each.values()
            elif isinstance(each, list | tuple):
                inside += each
        if not inside:
            return True
        level = inside
    return False
