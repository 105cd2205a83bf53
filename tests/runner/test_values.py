"""Plain values: everything that JSON can hold becomes JSON, and everything else a reason."""

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.runner.cell.plain_values import NotPlain, plain, quick_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    names: set[str]


class Rude(int):
    def __int__(self) -> int:
        raise ValueError

    __str__ = __int__  # type: ignore[assignment]


@given(JSON)
def test_json_is_left_as_it_is(value: Any) -> None:
    assert plain(value) == value


@given(
    st.datetimes() | st.dates() | st.times() | st.timedeltas() | st.decimals(allow_nan=False)
    | st.uuids() | st.binary() | st.frozensets(st.integers())
)  # fmt: skip
def test_what_msgspec_knows_comes_back_as_it_was(value: Any) -> None:
    kind = type(value)
    made = plain(value)
    assert isinstance(made, str | list)
    assert msgspec.convert(made, kind) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Colour.RED, 1),
        (Point(1, {"b", "a"}), {"x": 1, "names": ["a", "b"]}),
        (pathlib.Path("/x"), "/x"),
        (collections.deque([1, (2,)]), [1, [2]]),
        ((each for each in "ab"), ["a", "b"]),
        ({1: 2}.items(), [[1, 2]]),
        (range(2), [0, 1]),
        (
            {1: 1, None: 2, 2.5: 3, True and Colour.RED.name: 4},
            {"1": 1, "null": 2, "2.5": 3, "RED": 4},
        ),
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.datetime64("2026-11-22"), "2026-11-22"),
        pytest.param(Rude(5), 5, id="an int of its own"),
    ],
)
def test_what_programs_return_becomes_json(value: Any, expected: Any) -> None:
    made = plain(value)
    assert made == expected
    assert type(made) is type(expected)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "$.a[0]: nan is not a number of JSON"),
        (np.float64("inf"), "$.a[0]: inf is not a number of JSON"),
        (decimal.Decimal, "$.a[0]: an object of type type"),
        (1j, "$.a[0]: an object of type complex"),
        ({(1,): 2}, "$.a[0]: a key of type tuple"),
        ({1: 1, "1": 2}, "$.a[0]: two keys are '1'"),
        ("\ud800", "$.a[0]: a lone surrogate at character 0"),
        ({"\ud800": 1}, "$.a[0]: a lone surrogate at character 0"),
        (LOOP, "nested more than 64 deep, or it holds itself"),
        (iter(int, 1), "$.a[0]: an iterator of more than 1000000 items"),
        (msgspec, "$.a[0]: an object of type module"),
    ],
)
def test_what_json_cannot_hold_is_named_with_its_place(value: Any, why: str) -> None:
    with pytest.raises(NotPlain) as caught:
        plain({"a": [value]})
    assert str(caught.value).endswith(why)


FLAT = st.text(st.characters()) | st.integers() | st.booleans() | st.none()


@given(FLAT | st.dictionaries(st.text(), FLAT))
def test_quick_json_is_the_same_value_or_none(value: Any) -> None:
    made = quick_json(value)
    if made is not None:
        assert json.loads(made) == value
        assert json.dumps(json.loads(made)) == json.dumps(value)


@pytest.mark.parametrize(
    "value",
    [1.5, float("nan"), [1], {"a": 1.5}, {"a": [1]}, {1: 1}, {"a": float("nan")}, "\ud800",
     {"\ud800": 1}, collections.Counter("a"), enum.IntEnum("Colour", "RED").RED],
)  # fmt: skip
def test_quick_json_leaves_other_values_to_json(value: Any) -> None:
    assert quick_json(value) is None


def test_a_uuid_and_a_date_are_text() -> None:
    assert plain([uuid.UUID(int=1), datetime.date(2026, 11, 22)]) == [
        "00000000-0000-0000-0000-000000000001", "2026-11-22",
    ]  # fmt: skip
