"""Functions of the host as tools: they get the types that they ask for, and stay functions."""

import dataclasses
import datetime
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from cellwright import Broker, Caller, PolicyError, ToolFactory, tool
from cellwright.errors import ToolArgumentsInvalid, ToolFailed, ToolInvalid, ToolResultInvalid
from cellwright.harness.tools.tool import tool_of
from cellwright.tools import ToolState


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    when: datetime.date | None = None


@tool
def move(point: Point, by: int = 1, color: Color = Color.RED) -> Point:
    """Move a point."""
    assert isinstance(color, Color)
    return Point(point.x + by, point.when)


@pytest.fixture
def factory() -> Iterator[ToolFactory]:
    with ToolFactory() as factory:
        yield factory


def test_a_marked_function_stays_the_function_that_it_was(factory: ToolFactory) -> None:
    assert move(Point(1)) == Point(2)
    spec = factory.registry.register(move)
    assert (spec.name, spec.description, spec.state) == ("move", "Move a point.", ToolState.TRUSTED)


def test_two_different_functions_of_one_name_are_not_offered() -> None:
    def named_move(point: Point) -> None:
        """Do something else."""

    with pytest.raises(PolicyError, match="two different tools are named 'move'"):
        Broker([move, tool(name="move")(named_move)])
    Broker([move, move, tool_of(move)])


def test_arguments_come_as_their_types_and_results_leave_as_json(factory: ToolFactory) -> None:
    factory.registry.register(move)
    given = {"point": {"x": 1, "when": "2026-01-02"}, "color": "red"}
    assert factory.call("move", given) == {"x": 2, "when": "2026-01-02"}
    with pytest.raises(ToolArgumentsInvalid):
        factory.call("move", {"point": {"x": "1"}})


def test_what_json_schema_does_not_check_is_checked_by_the_type(factory: ToolFactory) -> None:
    factory.registry.register(move)
    with pytest.raises(ToolArgumentsInvalid, match="date"):
        factory.call("move", {"point": {"x": 1, "when": "soon"}})


def test_a_function_that_asks_for_the_caller_gets_it(factory: ToolFactory) -> None:
    def whose(n: int, caller: Caller) -> list[Any]:
        return [n, caller.depth]

    factory.registry.register(whose)
    assert factory.call("whose", {"n": 1}) == [1, 1]
    with pytest.raises(ToolArgumentsInvalid):
        factory.call("whose", {"n": 1, "caller": {}})


def test_a_coroutine_function_is_awaited(factory: ToolFactory) -> None:
    async def later(n: int) -> int:
        return n + 1

    factory.registry.register(later)
    assert factory.call("later", {"n": 1}) == 2


def test_what_it_raises_or_returns_wrongly_is_a_typed_error(factory: ToolFactory) -> None:
    def fails() -> None:
        raise OSError("out of order")

    def odd() -> object:
        return object()

    def lies() -> int:
        return "text"  # type: ignore[return-value]

    for function in (fails, odd, lies):
        factory.registry.register(function)
    with pytest.raises(ToolFailed, match="OSError: out of order"):
        factory.call("fails")
    for name in ("odd", "lies"):
        with pytest.raises(ToolResultInvalid):
            factory.call(name)


def test_arguments_of_the_decorator_go_into_the_spec() -> None:
    @tool(name="Send.Mail", description="Send it", risky=True, tags=["mail"])
    def send(to: Annotated[str, "whom"]) -> None: ...

    spec = tool_of(send).spec
    assert (spec.name, spec.description, spec.risky, spec.tags) == (
        "send.mail",
        "Send it",
        True,
        ("mail",),
    )
    assert spec.parameters["properties"]["to"]["description"] == "whom"


def test_what_cannot_be_a_tool_is_refused_where_it_is_marked() -> None:
    with pytest.raises(ToolInvalid):
        tool(lambda x: x)  # its name is <lambda>
    with pytest.raises(ToolInvalid):
        tool(print)


def test_generators_numpy_and_paths_come_out_as_json() -> None:
    import numpy as np

    def mixed() -> object:
        return {"all": (each for each in range(3)), "mean": np.float64(0.5), "where": Path("/x")}

    assert Broker([mixed]).call("mixed", {}) == {"all": [0, 1, 2], "mean": 0.5, "where": "/x"}

    def strange() -> object:
        return [1, object()]

    with pytest.raises(ToolResultInvalid, match="not JSON: .*an object of type object"):
        Broker([strange]).call("strange", {})
