"""`Catalogue`: the source in which a broker looks up tools; `Offer`: a catalogue of a fixed few.

`Discovery`: the broker's own tools to find others: search, browse, describe.

A program calls them like any tool.  They show a caller only the tools that it may call.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...policies.argument_checks import did_you_mean
from ...policies.errors import PolicyError, ToolNotFound
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from .tool import Caller, Tool, is_same, tool_of

if TYPE_CHECKING:
    from ..search.search import Model
    from .tool_search import ToolSearch


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


ToolsOf = Callable[[Caller], list[ToolSpec]]
_DETAIL = {"type": "string", "enum": ["name", "summary", "full"]}
_LANGUAGES = ("python", "typescript")
_LANGUAGE = {"type": "string", "enum": list(_LANGUAGES)}
_SERVER = {"type": "string"}
_MOST = 200


class Discovery:
    """Finds tools among those that `tools_of` returns for a caller.  Safe from many threads."""

    def __init__(self, tools_of: ToolsOf, model: "Model | None" = None) -> None:
        self._tools_of = tools_of
        self._model = model
        self._lock = threading.Lock()
        self._specs: list[ToolSpec] = []
        self._known: dict[str, ToolSpec] = {}
        self._paths: dict[str, dict[str, str]] = {}  # language -> name -> its path in programs
        self._revision = 0
        self._search: ToolSearch | None = None

    def tools(self) -> list[Tool]:
        page = {"limit": _integer(1, _MOST), "offset": _integer(0, 10_000)}
        form = {"detail": _DETAIL, "language": _LANGUAGE}
        asked = {"query": {"type": "string"}, "server": _SERVER, **form}
        named = {"name": {"type": "string"}, **form}
        return [
            Tool(_spec("search", "Find tools.", {**asked, **page}, ["query"]), self._find),
            Tool(_spec("browse", "List tools.", {"server": _SERVER, **page}, []), self._browse),
            Tool(_spec("describe", "Say how a tool is called.", named, ["name"]), self._describe),
        ]

    def revision(self) -> int:
        return self._revision

    def list_tools(self) -> list[ToolSpec]:
        return self._specs

    def _find(self, arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        from ..search.search import Filter
        from .tool_search import ToolSearch

        shown = self._follow(caller)
        with self._lock:
            search = self._search = self._search or ToolSearch(self, self._model)
        only = Filter(arguments.get("server"), ids=[spec.name for spec in shown])
        limit, offset = arguments.get("limit", 5), arguments.get("offset", 0)
        found = search.find(arguments["query"], only, limit, offset)
        specs = [self._known[match.document.id] for match in found.matches]
        detail, language = arguments.get("detail", "summary"), arguments.get("language", "python")
        told: dict[str, Any] = {"tools": [self._said(spec, detail, language) for spec in specs]}
        return told | {"more": found.more} | ({"hint": found.hint} if found.hint else {})

    def _browse(self, arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        from ..stubs.stub_tree import brief
        from .tool_search import server_of

        shown, server = self._follow(caller), arguments.get("server", "")
        servers: dict[str, int] = {}
        for spec in shown:
            servers[server_of(spec)] = servers.get(server_of(spec), 0) + 1
        if server not in servers and server:
            raise ToolNotFound(
                f"there is no server {server!r}; there are {', '.join(sorted(servers))}"
            )
        limit, offset = arguments.get("limit", 50), arguments.get("offset", 0)
        lines = sorted(brief(spec) for spec in shown if server_of(spec) == server)
        told: dict[str, Any] = {"tools": lines[offset : offset + limit]}
        told["more"] = len(lines) > offset + limit
        named = {name: count for name, count in sorted(servers.items()) if name}
        return told if server else {"servers": named} | told

    def _describe(self, arguments: dict[str, Any], caller: Caller) -> str:
        name, language = arguments["name"], arguments.get("language", "python")
        for spec in self._follow(caller):
            if name in (spec.name, self._paths[language][spec.name]):
                return self._said(spec, arguments.get("detail", "full"), language)
        known = (spec.name for spec in self._follow(caller))
        raise ToolNotFound(f"there is no tool {name!r}", did_you_mean(name, known), tool=name)

    def _said(self, spec: ToolSpec, detail: str, language: str) -> str:
        from ..stubs.stub_tree import say

        return say(spec, self._paths[language][spec.name], detail, language)

    def _follow(self, caller: Caller) -> list[ToolSpec]:
        """Return the tools that `caller` may call; update the names and paths of all tools."""
        from ..stubs.stub_tree import paths

        specs, shown = self._tools_of(Caller()), self._tools_of(caller)
        with self._lock:
            if specs != self._specs:
                self._specs, self._revision = specs, self._revision + 1
                self._paths = {}
            for language in _LANGUAGES:
                if not self._paths.get(language, {}).keys() >= {spec.name for spec in shown}:
                    self._paths[language] = paths([*specs, *shown], language)
            self._known = {spec.name: spec for spec in (*specs, *shown)}
        return shown


def _spec(
    name: str, description: str, properties: dict[str, Any], required: Iterable[str]
) -> ToolSpec:
    parameters = {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip
    return ToolSpec(
        name=f"tools.{name}", description=description, parameters=parameters,
        owner=ToolOwner.DEVELOPER, state=ToolState.TRUSTED, idempotent=True,
    )  # fmt: skip


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}
