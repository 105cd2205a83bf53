"""Definitions of one server are checked within a budget, and do not delay other servers."""

import threading
from pathlib import Path
from typing import Any

import pytest

from cellwright.harness.mcp import tool_index as booking
from cellwright.harness.mcp.definitions import Definition, Pins, definition_of
from cellwright.harness.mcp.managed_server import Listing
from cellwright.harness.mcp.server_config import ServerConfig
from cellwright.harness.mcp.tool_index import ToolIndex
from cellwright.harness.tools.tool import Tool
from cellwright.policies.errors import BudgetExceeded
from cellwright.runner.concurrency import Budget

from .conftest import tool

SLOW = {
    "properties": {f"p{number}": {"type": "string", "pattern": "a{1999}"} for number in range(20)}
}
CONFIG = ServerConfig(name="evil", command="a")


def index_in(folder: Path) -> ToolIndex:
    return ToolIndex([CONFIG], Pins(folder / "pins.json"), lambda spec: Tool(spec, lambda *_: None))


def listing(*tools: dict[str, Any]) -> Listing:
    return Listing({each["name"]: definition_of(each) for each in tools})


def test_definitions_pay_for_being_compiled_out_of_one_budget(tmp_path: Path) -> None:
    slow = [tool(f"slow{n}", inputSchema={**SLOW, "description": str(n)}) for n in range(10)]
    budget = Budget("checking the tools of evil", 1_000)
    with pytest.raises(BudgetExceeded, match="the tools of evil takes more than 1000 steps"):
        index_in(tmp_path).update(CONFIG, listing(tool("first"), *slow), budget)


def test_others_are_asked_while_definitions_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_in(tmp_path)
    answered = []

    def check(definition: Definition, budget: Budget) -> None:
        other = threading.Thread(target=lambda: answered.append(index.specs()), daemon=True)
        other.start()
        other.join(60)

    monkeypatch.setattr(booking, "check", check)
    index.update(CONFIG, listing(tool("a")), Budget("checking", 1000))
    assert answered == [[]]
    index.pin(CONFIG, Budget("checking", 1000))
    assert [spec.name for spec in answered[1]] == ["evil.a"]
