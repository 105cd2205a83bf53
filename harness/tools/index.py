"""Search over the tools of one registry: the index follows what is made, changed and removed."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..search.documents import Document, Kind, document_of, shown
from ..search.model import Model
from ..search.search import Filter, SearchIndex, SearchPage

_KINDS = {ToolOwner.AGENT: "made", ToolOwner.DEVELOPER: "host", ToolOwner.SERVER: "mcp"}


class ToolSource(Protocol):
    """What is searched; a ToolRegistry, for one."""

    def revision(self) -> int:
        """Return a number that is another one after the tools have changed."""

    def list_tools(self) -> Sequence[ToolSpec]:
        """Return what may be found, each with a name of its own."""


class ToolSearch:
    """Finds tools that a program may be told of: retired ones are not among them.

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
        """Return what answers a query, the best first, as an agent reads it.

        `kinds` are made, host and mcp; `server` is one whose tools alone are looked at.
        `detail` is name, summary or full.  `more` tells whether there is another page, `hint` why
        nothing was found.  Raises PolicyError for another detail.
        """
        only = Filter(
            server=server, tags=tags, states=[state.value for state in states], kinds=kinds
        )
        found = self.find(query, only, limit, offset)
        told: dict[str, Any] = {"tools": [shown(each.document, detail) for each in found.matches]}
        return told | {"more": found.more} | ({"hint": found.hint} if found.hint else {})

    def find(self, query: str, only: Filter, limit: int, offset: int = 0) -> SearchPage:
        """Return what answers a query, by its name in `id`."""
        self._follow()
        return self._index.search(query, only, limit, offset)

    def _follow(self) -> None:
        """Bring the index up to what the registry has now."""
        with self._lock:
            revision = self._registry.revision()
            if revision == self._revision:
                return
            now = {spec.name: spec for spec in self._registry.list_tools()}
            for name in self._indexed.keys() - now.keys():
                self._index.remove(name)
            changed = [spec for name, spec in now.items() if self._indexed.get(name) is not spec]
            self._index.add(*map(_document, changed))
            self._indexed, self._revision = now, revision


def _document(spec: ToolSpec) -> Document:
    server = server_of(spec)
    return document_of(
        spec.name, spec.name.removeprefix(f"{server}."), spec.description, spec.parameters,
        server=server, tags=spec.tags, state=spec.state.value,
        kind=_KINDS[spec.owner],  # type: ignore[arg-type]
    )  # fmt: skip


def server_of(spec: ToolSpec) -> str:
    """Return whose a tool is, as its name says: `github` of github.create_issue."""
    return spec.name.partition(".")[0] if "." in spec.name else ""
