"""Long results that are kept: whose they are, and whose make room."""

from typing import Any

import pytest

from cellwright.errors import ToolArgumentsInvalid
from cellwright.harness.tools.results import Results


def keep(results: Results, owner: str, length: int = 400) -> str:
    """Keep a text of ASCII, which takes 49 bytes more than it has characters."""
    return str(results.fit("x" * length, "x" * length, 300, owner)["result_id"])


def is_kept(results: Results, name: str, owner: str) -> bool:
    try:
        return bool(results.read({"result_id": name}, owner, 1000)["text"])
    except ToolArgumentsInvalid:
        return False


def test_the_oldest_make_room() -> None:
    results = Results(kept_bytes=1000, of_one_bytes=1000)
    names = [keep(results, owner) for owner in ("ann", "bob", "cid", "dan")]
    kept = [
        is_kept(results, *each) for each in zip(names, ("ann", "bob", "cid", "dan"), strict=True)
    ]
    assert kept == [False, False, True, True]


def test_one_owner_takes_no_room_from_the_others() -> None:
    results = Results(kept_bytes=4000, of_one_bytes=1000)
    anns = keep(results, "ann")
    bobs = [keep(results, "bob") for _ in range(100)]
    assert is_kept(results, anns, "ann")
    assert [is_kept(results, name, "bob") for name in bobs] == [False] * 98 + [True] * 2


def test_a_result_too_long_to_be_kept_takes_no_room() -> None:
    results = Results(kept_bytes=4000, of_one_bytes=1000)
    name = keep(results, "ann")
    short: dict[str, Any] = results.fit("x" * 2000, "x" * 2000, 300, "ann")
    assert "result_id" not in short
    assert "too long to keep" in short["notice"]
    assert is_kept(results, name, "ann")


def test_wide_characters_count_with_their_size_in_memory() -> None:
    results = Results(kept_bytes=4000, of_one_bytes=1000)
    assert "result_id" not in results.fit("x", "\N{GRINNING FACE}" * 300, 300, "ann")


def test_an_owner_cannot_read_the_results_of_another() -> None:
    results = Results()
    name = keep(results, "ann")
    with pytest.raises(ToolArgumentsInvalid, match="not yours"):
        results.read({"result_id": name}, "bob", 1000)
    assert results.read({"result_id": name, "start": 1, "characters": 2}, "ann", 1000) == {
        "text": "xx", "start": 1, "next": 3,
    }  # fmt: skip


def test_counts_come_out_even() -> None:
    results = Results(kept_bytes=3000, of_one_bytes=1000)
    for number in range(200):
        keep(results, f"owner {number % 7}", 100 + number)
    sizes: dict[str, int] = {}
    for kept in results._kept.values():
        sizes[kept.owner] = sizes.get(kept.owner, 0) + kept.size
    assert results._used_by == sizes
    assert results._used == sum(sizes.values()) <= 3000
