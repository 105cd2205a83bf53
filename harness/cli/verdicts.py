"""What doctor found out about one layer."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    layer: str
    verdict: Literal["PASS", "WARN", "FAIL"]
    proof: str
    repair: str
