"""Sizes and durations with units: "512M" and "2GB" are bytes, "90s" and "10m" seconds.  Pure."""

import re
from typing import Any

from .errors import PolicyError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(?:i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|min|h)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def bytes_of(text: str) -> int | None:
    """Return the bytes of a size such as "2G", "2GB" or "2GiB", units of 1024; None for other text."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * 1024 ** _POWERS[found[2].lower()]) if found else None


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as "10m"; None for other text."""
    found = _DURATION.fullmatch(text.strip())
    return float(found[1]) * _SECONDS[found[2].lower()] if found else None


def with_units(data: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return the data of a TOML file with numbers in place of sizes and durations with units, which are
    the texts of fields that end in `_bytes` and `_seconds`; raises PolicyError for other text there."""
    made = dict(data)
    for key, value in data.items():
        if isinstance(value, dict):
            made[key] = with_units(value, f"{where}{key}.")
        elif isinstance(value, str) and key.endswith(("_bytes", "_seconds")):
            made[key] = _number(f"{where}{key}", value)
    return made


def _number(field: str, text: str) -> float:
    is_size = field.endswith("_bytes")
    number = bytes_of(text) if is_size else seconds_of(text)
    if number is None:
        example = '512M" or "2GB' if is_size else '90s" or "10m'
        raise PolicyError(f'{field}: must be a number, or text such as "{example}", got {text!r}')
    return number
