"""`ToolSearch`: a search index over the tools of one registry, kept up to date."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..search.documents import Document, Kind, document_of, shown
from ..search.search import Filter, Model, SearchIndex, SearchPage

_KINDS = {ToolOwner.AGENT: "made", ToolOwner.DEVELOPER: "host", ToolOwner.SERVER: "mcp"}


class ToolSource(Protocol):
    """Tools that can be searched, such as a ToolRegistry."""

    def revision(self) -> int:
        """Return a number that changes with each change of the tools."""

    def list_tools(self) -> Sequence[ToolSpec]:
        """Return the tools that may be found; their names differ."""


class ToolSearch:
    """Finds tools of a registry; retired tools are left out.

    Safe from many threads; other processes may change the registry's file.
    """

    def __init__(self, registry: ToolSource, model: Model | None = None) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._index = SearchIndex(meaning=model.meaning() if model else None)
        self._indexed: dict[str, ToolSpec] = {}
        self._revision = -1

    def search(
        self, query: str, limit: int = 5, offset: int = 0, *, detail: str = "summary",
        tags: Collection[str] = (), states: Collection[ToolState] = (),
        kinds: Collection[Kind] = (), server: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the tools that match a query, the best first, in the form that agents read.

        `kinds` are made, host and mcp; `server` limits the search to the tools of one server.
        `detail` is name, summary or full.  In the answer `more` tells whether there is another page,
        and `hint` why nothing was found.  Raises PolicyError for an unknown detail.
        """
        only = Filter(
            server=server, tags=tags, states=[state.value for state in states], kinds=kinds
        )
        found = self.find(query, only, limit, offset)
        told: dict[str, Any] = {"tools": [shown(each.document, detail) for each in found.matches]}
        return told | {"more": found.more} | ({"hint": found.hint} if found.hint else {})

    def find(self, query: str, only: Filter, limit: int, offset: int = 0) -> SearchPage:
        """Return the matches of a query; `id` is the name of the tool."""
        self._follow()
        return self._index.search(query, only, limit, offset)

    def _follow(self) -> None:
        with self._lock:
            revision = self._registry.revision()
            if revision == self._revision:
                return
            now = {spec.name: spec for spec in self._registry.list_tools()}
            for name in self._indexed.keys() - now.keys():
                self._index.remove(name)
            changed = [spec for name, spec in now.items() if self._indexed.get(name) is not spec]
            self._index.add(*map(document_of_tool, changed))
            self._indexed, self._revision = now, revision


def document_of_tool(spec: ToolSpec) -> Document:
    """Return a tool as search knows it."""
    server = server_of(spec)
    return document_of(
        spec.name, spec.name.removeprefix(f"{server}."), spec.description, spec.parameters,
        server=server, tags=spec.tags, state=spec.state.value,
        kind=_KINDS[spec.owner],  # type: ignore[arg-type]
    )  # fmt: skip


def server_of(spec: ToolSpec) -> str:
    """Return the server in the name of a tool: `github` of github.create_issue."""
    return spec.name.partition(".")[0] if "." in spec.name else ""
