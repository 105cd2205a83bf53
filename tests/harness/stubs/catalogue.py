"""The tools of real servers, as a registry has them."""

import json
from functools import cache
from pathlib import Path

from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.stubs.stub_tree import described
from cellwright.harness.stubs.stub_types import ToolSignature
from tests.conftest import SHARED

CATALOGUE = SHARED / "data" / "mcp-catalogue"


@cache
def catalogue() -> tuple[ToolSpec, ...]:
    """Return every tool of the catalogue, `server.tool`."""
    return tuple(spec for path in sorted(CATALOGUE.glob("*.json")) for spec in _specs(path))


def _specs(path: Path) -> list[ToolSpec]:
    return [
        ToolSpec(
            name=f"{path.stem}.{tool['name']}", description=tool.get("description", ""),
            parameters=tool["inputSchema"], output_schema=tool.get("outputSchema"),
            server=path.stem, owner=ToolOwner.SERVER,
        )
        for tool in json.loads(path.read_text())["tools"]
    ]  # fmt: skip


@cache
def described_all() -> tuple[ToolSignature, ...]:
    return tuple(described(spec) for spec in catalogue())
