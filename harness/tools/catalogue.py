"""`Catalogue`: the source in which a broker looks up tools; `Offer`: a catalogue of a fixed few."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from ...policies.errors import PolicyError, ToolNotFound
from ..schemas.spec import ToolSpec
from .caller import Tool
from .decorator import is_same, tool_of


@runtime_checkable
class Catalogue(Protocol):
    """A source of tools by name.

    If it has a method `revision` that returns another number after each change of the tools, the
    names are not looked up again for every program.
    """

    def get(self, name: str) -> Tool:
        """Return a tool; raises ToolNotFound."""

    def specs(self) -> Iterable[ToolSpec]:
        """Return the specs of the tools that may be offered to a program."""


class Offer:
    """A fixed collection of tools, by name.

    Raises PolicyError for two different tools of one name.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            name = tool.spec.name
            if not is_same(self._tools.setdefault(name, tool), tool):
                raise PolicyError(
                    f"tools: two different tools are named {name!r}",
                    "give one of them another name, as in @tool(name=...)",
                )

    def get(self, name: str) -> Tool:
        if name not in self._tools:
            raise ToolNotFound(f"there is no tool {name!r}", tool=name)
        return self._tools[name]

    def specs(self) -> Iterable[ToolSpec]:
        return [tool.spec for tool in self._tools.values()]

    def revision(self) -> int:
        return 0


class JoinedCatalogue:
    """Several catalogues as one; of two tools of one name the first one's is offered."""

    def __init__(self, *parts: Catalogue) -> None:
        self._parts = parts

    def get(self, name: str) -> Tool:
        for part in self._parts[:-1]:
            with contextlib.suppress(ToolNotFound):
                return part.get(name)
        return self._parts[-1].get(name)

    def specs(self) -> Iterable[ToolSpec]:
        found: dict[str, ToolSpec] = {}
        for part in self._parts:
            for spec in part.specs():
                found.setdefault(spec.name, spec)
        return found.values()


def catalogue_of(tools: object) -> Catalogue:
    """Return `tools` if it is a catalogue, else make one of a sequence of tools and functions.

    Raises PolicyError for anything else.
    """
    if isinstance(tools, Catalogue):
        return tools
    if callable(tools):
        raise PolicyError(f"tools: must be a list, got one tool: {tools!r}", "pass [tool]")
    if not isinstance(tools, Iterable) or isinstance(tools, str | bytes | dict):
        from .registry import ToolRegistry  # slow to import, and rarely passed

        if isinstance(tools, ToolRegistry):
            raise PolicyError(
                "tools: a ToolRegistry cannot execute its tools",
                "pass ToolFactory(registry=...), which executes them in cells",
            )
        raise PolicyError(
            "tools: must be a list of functions, a Broker, a ToolFactory or McpServers, "
            f"got {type(tools).__name__}"
        )
    return Offer(map(_tool, tools))


def _tool(given: Tool | Callable[..., Any]) -> Tool:
    if isinstance(given, Tool) or callable(given):
        return tool_of(given)
    raise PolicyError(
        f"tools: not a tool: {ascii(given)[:80]}", "pass functions, with or without @tool"
    )
