"""Results that are too long for their caller: kept on the host, read in slices."""

import json
import os
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from ...policies.errors import ToolArgumentsInvalid

KEPT_BYTES = 64 * 1024 * 1024
_DEEPEST = 8
_FEW = 3  # items of an inner list that a head shows
_SHORT = 200  # characters of an inner text


class Kept(NamedTuple):
    owner: str  # the execution or session that may read it
    text: str


class Results:
    """The long results of one broker, the oldest of which go when they are too many."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._lock = threading.Lock()
        self._room = kept_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def fit(self, value: Any, text: str, limit: int, owner: str) -> Any:
        """Return `value`, whose JSON is `text`, or what stands for it: its head and a name."""
        if len(text) <= limit:
            return value
        name = self._keep(Kept(owner, text))
        frame = {
            "truncated": True, "characters": len(text), "result_id": name,
            "notice": "call_tool('results.read', {'result_id': ..., 'start': 0, 'characters': 10000})",
        }  # fmt: skip
        return {**frame, "head": head_of(value, limit - len(json.dumps(frame)) - 16)}

    def read(self, name: str, start: int, characters: int, owner: str) -> dict[str, Any]:
        """Return a slice of a kept result's JSON; raises ToolArgumentsInvalid if it is not kept."""
        with self._lock:
            kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            raise ToolArgumentsInvalid(f"result {name!r} is not kept, or not yours")
        text = kept.text[start : start + characters]
        end = start + len(text)
        return {"text": text, "start": start, "next": end if end < len(kept.text) else None}

    def _keep(self, kept: Kept) -> str:
        name = os.urandom(8).hex()
        with self._lock:
            self._kept[name] = kept
            self._room -= len(kept.text)
            while self._room < 0 and len(self._kept) > 1:
                self._room += len(self._kept.popitem(last=False)[1].text)
        return name


def head_of(value: Any, limit: int) -> Any:
    """Return the beginning of `value` as JSON of at most `limit` characters that is whole by itself."""
    if isinstance(value, str):
        return value[: max(0, limit // 6 - 2)]  # six characters each at worst: \\uXXXX
    if not isinstance(value, list | dict):
        return value if len(json.dumps(value)) <= limit else None
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    shown: list[tuple[Any, Any]] = []
    left = limit - 2
    for key, each in items:
        short = _shortened(each, _DEEPEST)
        left -= len(json.dumps(short)) + (
            len(json.dumps(key)) + 4 if isinstance(value, dict) else 2
        )
        if left < 0:
            break
        shown.append((key, short))
    return dict(shown) if isinstance(value, dict) else [each for _, each in shown]


def _shortened(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _SHORT else value[:_SHORT] + "..."
    if depth == 0 or not isinstance(value, list | dict):
        return value if not isinstance(value, list | dict) else "..."
    if isinstance(value, list):
        return [_shortened(each, depth - 1) for each in value[:_FEW]]
    return {key: _shortened(each, depth - 1) for key, each in list(value.items())[: 4 * _FEW]}
