"""Where a broker finds tools."""

from collections.abc import Iterable
from typing import Protocol

from ...policies.errors import ToolNotFound
from .spec import Tool, ToolSpec


class Catalogue(Protocol):
    """Where tools are found.

    If it has a method `revision`, that returns another number once the tools have changed, names are
    not looked up anew for every program.
    """

    def get(self, name: str) -> Tool:
        """Return a tool; raises ToolNotFound."""

    def specs(self) -> Iterable[ToolSpec]:
        """Return those that may be offered to a program."""


class Offer:
    """A few tools, by name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}

    def get(self, name: str) -> Tool:
        if name not in self._tools:
            raise ToolNotFound(f"there is no tool {name!r}", tool=name)
        return self._tools[name]

    def specs(self) -> Iterable[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]

    def revision(self) -> int:
        return 0
