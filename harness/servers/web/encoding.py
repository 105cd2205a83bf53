"""JSON of answers, whatever a program made: it always can be encoded, and every client can parse it."""

from typing import Any

import msgspec


def encoded_json(value: Any) -> bytes:
    """Return a value as JSON; lone surrogates, which UTF-8 cannot express, become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(value)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return (
        [_without_surrogates(each) for each in value] if isinstance(value, list | tuple) else value
    )
