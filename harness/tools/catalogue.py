"""Where a broker finds tools."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from ...policies.errors import PolicyError, ToolNotFound
from ..schemas.spec import ToolSpec
from .caller import Tool
from .decorator import tool_of


@runtime_checkable
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


def catalogue_of(tools: object) -> Catalogue:
    """Return a catalogue, or one of a sequence of tools and functions; raises PolicyError."""
    if isinstance(tools, Catalogue):
        return tools
    if callable(tools):
        raise PolicyError(f"tools: {tools!r} is one tool", "give a list of tools")
    if not isinstance(tools, Iterable) or isinstance(tools, str | bytes | dict):
        from .registry import ToolRegistry  # slow to import, and seldom given

        if isinstance(tools, ToolRegistry):
            raise PolicyError(
                "tools: a ToolRegistry has no cells in which its tools could run",
                "give ToolFactory(registry=...), which runs them",
            )
        raise PolicyError(
            "tools: must be a list of functions, a Broker, a ToolFactory or McpServers, "
            f"not {type(tools).__name__}"
        )
    return Offer(map(_tool, tools))


def _tool(given: Tool | Callable[..., Any]) -> Tool:
    if isinstance(given, Tool) or callable(given):
        return tool_of(given)
    raise PolicyError(
        f"tools: {ascii(given)[:80]} is not a tool", "give functions, marked with @tool or not"
    )
