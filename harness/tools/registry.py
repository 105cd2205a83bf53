"""`ToolRegistry`: the tools by name: the developer's and servers' in memory, made ones in a file.

`MadeTools`: the tools of a registry's file, cached until it changes, and their counts.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from ...policies.closing import Closing
from ...policies.errors import RegistryError, ToolDenied, ToolExists, ToolInvalid, ToolNotFound
from ..schemas.spec import ToolOwner, ToolSpec, ToolState, key_of, reference
from ..search.search import Model, model_of
from .tool import Tool, is_same, tool_of
from .tool_store import Quota, ToolStore, ToolUsage, UsageCounts, VersionKey, most_alike, shape_of

# Names of the broker's own tools.
RESERVED = ("results_read", "results_read_all", "tools_search", "tools_browse", "tools_describe")
RETIRED_AFTER = 10  # failures in a row
_ALIKE_LOOKED_AT = 1000


class ServerTools(Protocol):
    """The tools of MCP servers, which come and go; a registry asks for them each time."""

    def revision(self) -> int:
        """Return a number that changes with each change of these tools."""

    def owns(self, name: str) -> bool:
        """Tell whether a name belongs to these servers, even if no tool has it now."""

    def get(self, name: str) -> Tool:
        """Return a tool; raises a ToolError if it cannot be called."""

    def specs(self) -> list[ToolSpec]:
        """Return the tools that can be called."""


class ToolRegistry(Closing):
    """Tools by name.  Safe from many threads, and its file from many processes.

    Without `path` it is in memory.  A developer's tool is never shadowed: a name means the
    developer's tool first, then a server's.  A made tool that fails `retired_after` times in a row is
    retired; calls by other makers do not count for this.  Failures are written to the file at once,
    uses in batches.  The tools of one maker have at most `maker_versions` versions, whose records have
    at most `maker_bytes` together.  `model`, a folder with a sentence encoder, lets the factories of
    this registry search by meaning too.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, retired_after: int = RETIRED_AFTER,
        maker_bytes: int = Quota().bytes, maker_versions: int = Quota().versions,
        model: "Model | str | os.PathLike[str] | None" = None, must_exist: bool = False,
    ) -> None:  # fmt: skip
        """Open or make the file at `path`.

        Raises RegistryError, with `must_exist` for a missing file too.
        """
        self.model = model_of(model)
        quota = Quota(maker_bytes, maker_versions)
        self._made = MadeTools(path, retired_after, quota, must_exist=must_exist)
        self._lock = threading.Lock()
        self._developers: dict[str, Tool] = {}
        self._served: list[ServerTools] = []
        self._revision = 0  # revision of the tools that are not in the file

    def register(self, function: Callable[..., Any] | Tool) -> ToolSpec:
        """Add a tool of the developer: a function, with or without `@tool`.

        Raises ToolExists if another function has the name, and ToolInvalid if it cannot be a tool.
        """
        tool = tool_of(function)
        with self._lock:
            known = self._developers.setdefault(key_of(tool.spec.name), tool)
            self._revision += 1
        if not is_same(known, tool):
            raise _taken(tool.spec.name, known.spec.name, "which is the developer's")
        return tool.spec

    def developers(self, name: str) -> Tool | None:
        """Return the developer's tool of that name, None if there is none."""
        return self._developers.get(key_of(reference(name).name))

    def attach(self, served: ServerTools) -> None:
        """Add the tools of servers until they are detached."""
        with self._lock:
            self._served.append(served)
            self._revision += 1

    def detach(self, served: ServerTools) -> None:
        """Remove the tools of servers."""
        with self._lock:
            self._served = [each for each in self._served if each is not served]
            self._revision += 1

    def served(self, name: str) -> Tool | None:
        """Return the server's tool of that name; None if there is none, or the developer has the name.

        Raises a ToolError if the server's tool cannot be called.
        """
        named = reference(name).name
        if key_of(named) not in self._developers:
            for each in tuple(self._served):
                if each.owns(named):
                    return each.get(named)
        return None

    def add(self, spec: ToolSpec, *, is_new: bool = False) -> ToolSpec:
        """Store a made tool as the next version of its name, and return that version.

        Raises ToolExists if the developer, a server or another maker has the name, with `is_new` also
        if a tool has it that is not retired, ToolQuotaExceeded if the maker has too many tools, and
        RegistryError.
        """
        key = key_of(spec.name)
        if key in RESERVED:
            raise _taken(spec.name, spec.name, "which is the broker's")
        if known := self._developers.get(key):
            raise _taken(spec.name, known.spec.name, "which is the developer's")
        if any(each.owns(spec.name) for each in tuple(self._served)):
            raise _taken(spec.name, spec.name, "which is a server's")
        return self._made.add(key, spec, is_new=is_new)

    def get(self, name: str) -> ToolSpec:
        """Return a tool by its name, or one version of it by `name@version`; raises ToolNotFound."""
        try:
            wanted = reference(name)
        except ToolInvalid as error:
            raise ToolNotFound(f"there is no such tool: {error.what}") from None
        key = key_of(wanted.name)
        developers = self._developers.get(key)
        if developers and wanted.version in (None, developers.spec.version):
            return developers.spec
        if served := self.served(name):
            return served.spec
        found = None if developers else self._made.get(key, wanted.version)
        if found is None:
            raise ToolNotFound(f"there is no tool {wanted}", tool=wanted.name)
        return found

    def revision(self) -> int:
        """Return a number that changes with each change of the tools, also by another process."""
        served = sum(each.revision() for each in tuple(self._served))
        return self._revision + self._made.revision() + served

    def list_tools(self, *, retired: bool = False) -> list[ToolSpec]:
        """Return the latest version of every tool, by name; retired tools only with `retired`."""
        made = {key_of(spec.name): spec for spec in self._made.latest()}
        for each in tuple(self._served):
            made |= {key_of(spec.name): spec for spec in each.specs()}
        made |= {key: tool.spec for key, tool in self._developers.items()}
        wanted = (spec for spec in made.values() if retired or spec.state is not ToolState.RETIRED)
        return sorted(wanted, key=lambda spec: spec.name)

    def versions(self, name: str) -> list[ToolSpec]:
        """Return every version of a tool, the oldest first; raises ToolNotFound."""
        spec = self.get(name)
        return self._made.versions(key_of(spec.name)) if self.is_made(spec) else [spec]

    def successor(self, name: str) -> ToolSpec | None:
        """Return the tool with which a tool of that name was merged; None if there is none."""
        key = key_of(name)
        found = (each for each in self.list_tools() if key in map(key_of, each.replaces))
        return next(found, None)

    def alike(self, spec: ToolSpec) -> ToolSpec | None:
        """Return another tool that does the same, judged by parameters, source and description."""
        shape, own = shape_of(spec.parameters), key_of(spec.name)
        others = [tool.spec for tool in self._developers.values()]
        others = [each for each in others if shape_of(each.parameters) == shape]
        others += self._made.of_shape(shape, _ALIKE_LOOKED_AT)
        live = [each for each in others if each.state is not ToolState.RETIRED]
        return most_alike(spec, [each for each in live if key_of(each.name) != own])

    def remove(self, name: str, maker: str | None = None) -> None:
        """Remove a made tool and all its versions; with `maker` only if that maker made it.

        Raises ToolNotFound, and ToolDenied if it belongs to the developer, a server or another maker.
        """
        spec = self.get(name)
        if not self.is_made(spec):
            raise ToolDenied(f"{spec.name} is {_whose(spec)}", tool=spec.name)
        if maker not in (None, spec.provenance.maker):
            raise ToolDenied(f"{spec.name} was made by another agent", tool=spec.name)
        self._made.remove(key_of(spec.name))

    def set_state(self, name: str, state: ToolState) -> ToolSpec:
        """Set the state of a made tool, and return the tool; raises ToolNotFound and ToolDenied."""
        spec = self.get(name)
        if not self.is_made(spec):
            raise ToolDenied(f"{spec.name} is {_whose(spec)}", tool=spec.name)
        self._made.set_state(*_key_of(spec), state)
        return replace(spec, state=state)

    # counting

    def note(self, spec: ToolSpec, *, well: bool, may_retire: bool = True) -> None:
        """Count a call of a made tool, which failed unless `well`.

        Without `may_retire` it leaves the failures in a row as they are: one maker must not retire the
        tools of another.  Counts that cannot be written now are written with the next call, so that
        the call itself does not fail.
        """
        if self.is_made(spec):
            self._made.note(_key_of(spec), well=well, may_retire=may_retire)

    def usage(self, name: str) -> ToolUsage:
        """Return how often a made tool was called and failed; raises ToolNotFound."""
        return self._made.usage(_key_of(self.get(name)))

    def flush(self) -> None:
        """Write all counts now; raises RegistryError."""
        self._made.flush()

    def close(self) -> None:
        """Write the counts if possible, and close the file; closing twice is fine."""
        self._made.close()

    def is_made(self, spec: ToolSpec) -> bool:
        """Tell whether a tool was made and is stored here, and is not the developer's or a server's."""
        return key_of(spec.name) not in self._developers and spec.owner is not ToolOwner.SERVER


def _whose(spec: ToolSpec) -> str:
    return "a server's" if spec.owner is ToolOwner.SERVER else "the developer's, and trusted"


def _key_of(spec: ToolSpec) -> VersionKey:
    return key_of(spec.name), spec.version


def _taken(name: str, existing: str, whose: str) -> ToolExists:
    hint = "choose another name"
    return ToolExists(f"{name}: there is {existing}, {whose}", hint, tool=name, existing=existing)


class MadeTools(Closing):
    """Versions of tools by key (tool_names.key_of).  Safe from many threads and processes.

    The methods raise RegistryError while the file is closed or damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, retired_after: int, quota: Quota,
        *, must_exist: bool = False,
    ) -> None:  # fmt: skip
        self._store = ToolStore(path, quota, must_exist=must_exist)
        self._counts = UsageCounts(self._store, retired_after)
        self._lock = threading.RLock()
        self._known: dict[tuple[str, int | None], ToolSpec] = {}
        self._latest: list[ToolSpec] | None = None
        self._changes = -1
        self._revision = 0

    def revision(self) -> int:
        """Return a number that changes with each change of the tools, also by another process."""
        with self._lock:
            self._refresh()
            return self._revision

    def get(self, key: str, version: int | None) -> ToolSpec | None:
        """Return a version of a tool, by default the latest; None if it does not exist."""
        with self._lock:
            self._refresh()
            if (found := self._known.get((key, version))) is None:
                found = self._store.get(key, version)
                if found:
                    self._known[key, version] = found
            return found

    def latest(self) -> list[ToolSpec]:
        """Return the latest version of every tool."""
        with self._lock:
            self._refresh()
            if self._latest is None:
                self._latest = self._store.latest()
            return self._latest

    def versions(self, key: str) -> list[ToolSpec]:
        """Return every version of a tool, the oldest first."""
        return self._store.versions(key)

    def of_shape(self, shape: str, most: int) -> list[ToolSpec]:
        """Return at most `most` latest versions with parameters of a shape (tool_store.py)."""
        return self._store.of_shape(shape, most)

    # changing

    def add(self, key: str, spec: ToolSpec, *, is_new: bool) -> ToolSpec:
        """Store a tool as the next version of its name, and return that version.

        Raises ToolExists if another maker has the name, or with `is_new` a tool that is not retired,
        and ToolQuotaExceeded.
        """
        with self._lock:
            self._clear()
            return self._store.add(
                key, shape_of(spec.parameters), spec, lambda version: replace(spec, version=version),
                is_new=is_new,
            )  # fmt: skip

    def remove(self, key: str) -> None:
        """Remove a tool and all its versions."""
        with self._lock:
            self._clear()
            self._store.remove(key)

    def set_state(self, key: str, version: int, state: ToolState) -> None:
        """Set the state of a version, and reset its failures in a row."""
        with self._lock:
            self._clear()
            self._store.set_state(key, version, state)

    # counting

    def note(self, counted: VersionKey, *, well: bool, may_retire: bool = True) -> None:
        """Count a call, which failed unless `well`; retire a version that fails too often."""
        with self._lock:
            if self._counts.note(counted, well=well, may_retire=may_retire):
                self._clear()

    def usage(self, counted: VersionKey) -> ToolUsage:
        """Return how often a version was called and failed."""
        with self._lock:
            return self._counts.usage(counted)

    def flush(self) -> None:
        """Write all counts now."""
        with self._lock:
            if self._counts.write_all():
                self._clear()

    def close(self) -> None:
        """Write the counts if possible, and close the file; closing twice is fine."""
        with self._lock:
            with contextlib.suppress(RegistryError):
                self.flush()
            self._store.close()

    # the cache

    def _refresh(self) -> None:
        changes = self._store.changes()
        if changes != self._changes:
            self._clear()
            self._changes = changes

    def _clear(self) -> None:
        self._revision += 1
        self._known.clear()
        self._latest = None
