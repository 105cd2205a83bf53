"""`Records`: what is to be told of one cell, for the supervisor to ask."""

from typing import Literal

import msgspec

from ..messages import Refusal, Relayed

_MOST_RECORDS = 1000  # in full, between two times that the supervisor asks for them

_Kind = Literal["resolve", "connect", "record"]


class Records:
    """What is to be told of a cell: a bounded number of records, then counts alone."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[_Kind, str, int, str], int] = {}
        self._relayed: list[Relayed] = []
        self._left_out = 0

    def refuse(self, kind: _Kind, name: str, port: int, reason: str) -> None:
        key = (kind, name[:253], port, reason[:300])
        if key not in self._refusals and len(self._refusals) >= _MOST_RECORDS:
            key = (kind, "", 0, "more names than are recorded")
        self._refusals[key] = self._refusals.get(key, 0) + 1

    def relay(self, relayed: Relayed) -> None:
        if len(self._relayed) < _MOST_RECORDS:
            self._relayed.append(relayed)
        else:
            self._left_out += 1

    def take(self) -> list[msgspec.Struct]:
        taken: list[msgspec.Struct] = [
            Refusal(*key, count) for key, count in self._refusals.items()
        ]
        taken += self._relayed
        if self._left_out:
            taken.append(
                Refusal("record", "", 0, "more connections than are recorded", self._left_out)
            )
        self._refusals, self._relayed, self._left_out = {}, [], 0
        return taken
