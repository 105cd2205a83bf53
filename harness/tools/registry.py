"""`ToolRegistry`: where tools are kept: those of the developer while the process lives, those that were
made in a file."""

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from ...policies.closing import Closing
from ...policies.errors import (
    ToolDenied,
    ToolExists,
    ToolInvalid,
    ToolNotFound,
)
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..schemas.tool_names import key_of, reference
from ..search.model import Model, model_of
from .caller import Tool
from .counts import VersionKey
from .decorator import tool_of
from .made_tools import MadeTools
from .similarity import most_alike, shape_of
from .store import Quota, ToolUsage

# The broker answers these itself.
RESERVED = ("results_read", "results_read_all", "tools_search", "tools_browse", "tools_describe")
RETIRED_AFTER = 10  # failures in a row
_ALIKE_LOOKED_AT = 1000


class ServerTools(Protocol):
    """Tools of servers, which come and go; a registry only knows where they are."""

    def revision(self) -> int:
        """Return a number that is another one after they changed."""

    def owns(self, name: str) -> bool:
        """Tell whether a name is, or would be, that of one of them."""

    def get(self, name: str) -> Tool:
        """Return one of them; raises a ToolError if it cannot be called."""

    def specs(self) -> list[ToolSpec]:
        """Return all that can be called."""


class ToolRegistry(Closing):
    """Tools by name.  Safe from many threads, and its file from many processes.

    Without `path` it is in memory.  A developer's tool is never shadowed: of two tools with one
    name his is meant, then a server's.  A made tool that fails `retired_after` times in a row, with
    no call between that went well, is retired; calls on behalf of other makers do neither.  Uses are
    written to the file now and then, failures at once.  The tools of one maker have at most
    `maker_versions` versions, whose records have at most `maker_bytes` together.  `model`, a folder
    with a sentence encoder, has the factories that use it search by meaning too (meaning.py).
    """

    def __init__(
        self, path: str | None = None, *, retired_after: int = RETIRED_AFTER,
        maker_bytes: int = Quota().bytes, maker_versions: int = Quota().versions,
        model: "Model | str | os.PathLike[str] | None" = None,
    ) -> None:  # fmt: skip
        """Open or make the file at `path`; raises RegistryError."""
        self.model = model_of(model)
        quota = Quota(maker_bytes, maker_versions)
        self._made = MadeTools(path, retired_after, quota)
        self._lock = threading.Lock()
        self._developers: dict[str, Tool] = {}
        self._served: list[ServerTools] = []
        self._revision = 0  # of what is not in the file

    def register(self, function: Callable[..., Any] | Tool) -> ToolSpec:
        """Add a tool of the developer's: a function, marked with `@tool` or not.

        Raises ToolExists if another function has the name, ToolInvalid for what is no tool.
        """
        tool = tool_of(function)
        with self._lock:
            known = self._developers.setdefault(key_of(tool.spec.name), tool)
            self._revision += 1
        if known.spec != tool.spec:
            raise _taken(tool.spec.name, known.spec.name, "which is the developer's")
        return tool.spec

    def developers(self, name: str) -> Tool | None:
        """Return the developer's tool of that name, if there is one."""
        return self._developers.get(key_of(reference(name).name))

    def attach(self, served: ServerTools) -> None:
        """Have the tools of servers among these until they are detached."""
        with self._lock:
            self._served.append(served)
            self._revision += 1

    def detach(self, served: ServerTools) -> None:
        """Have them no more."""
        with self._lock:
            self._served = [each for each in self._served if each is not served]
            self._revision += 1

    def served(self, name: str) -> Tool | None:
        """Return the tool of a server of that name, unless the name is a developer's.

        Raises what a server's catalogue does for one that it has and that cannot be called.
        """
        named = reference(name).name
        if key_of(named) not in self._developers:
            for each in tuple(self._served):
                if each.owns(named):
                    return each.get(named)
        return None

    def add(self, spec: ToolSpec) -> ToolSpec:
        """Keep a tool that was made, as the next version of its name, and return that.

        Raises ToolExists if the name is a developer's, a server's or another maker's,
        ToolQuotaExceeded if the maker has too many, RegistryError.
        """
        key = key_of(spec.name)
        if key in RESERVED:
            raise _taken(spec.name, spec.name, "which is the broker's")
        if known := self._developers.get(key):
            raise _taken(spec.name, known.spec.name, "which is the developer's")
        if any(each.owns(spec.name) for each in tuple(self._served)):
            raise _taken(spec.name, spec.name, "which is a server's")
        return self._made.add(key, spec)

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
        """Return a number that is another one after the tools have changed, here or elsewhere."""
        served = sum(each.revision() for each in tuple(self._served))
        return self._revision + self._made.revision() + served

    def list_tools(self, *, retired: bool = False) -> list[ToolSpec]:
        """Return the latest version of every tool, by name; `retired` ones only if asked for."""
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

    def alike(self, spec: ToolSpec) -> ToolSpec | None:
        """Return another tool that does the same, as far as shape, source and description tell."""
        shape, own = shape_of(spec.parameters), key_of(spec.name)
        others = [tool.spec for tool in self._developers.values()]
        others = [each for each in others if shape_of(each.parameters) == shape]
        others += self._made.of_shape(shape, _ALIKE_LOOKED_AT)
        live = [each for each in others if each.state is not ToolState.RETIRED]
        return most_alike(spec, [each for each in live if key_of(each.name) != own])

    def remove(self, name: str, maker: str | None = None) -> None:
        """Forget a made tool and all its versions; with `maker` only if it is his.

        Raises ToolNotFound, and ToolDenied if it is the developer's or another maker's.
        """
        spec = self.get(name)
        if not self.is_made(spec):
            raise ToolDenied(f"{spec.name} is {_whose(spec)}", tool=spec.name)
        if maker not in (None, spec.provenance.maker):
            raise ToolDenied(f"{spec.name} was made by another agent", tool=spec.name)
        self._made.remove(key_of(spec.name))

    def set_state(self, name: str, state: ToolState) -> ToolSpec:
        """Trust a made tool, retire it, or take that back; return it.  Raises ToolNotFound."""
        spec = self.get(name)
        if not self.is_made(spec):
            raise ToolDenied(f"{spec.name} is {_whose(spec)}", tool=spec.name)
        self._made.set_state(*_counted(spec), state)
        return replace(spec, state=state)

    # counting

    def note(self, spec: ToolSpec, *, well: bool, may_retire: bool = True) -> None:
        """Count a call of a made tool, which failed unless it went `well`.

        Without `may_retire` the failures in a row are left as they are: one maker must not retire the
        tools of another.
        What cannot be written now is written with the next: a call must not fail of that.
        """
        if self.is_made(spec):
            self._made.note(_counted(spec), well=well, may_retire=may_retire)

    def usage(self, name: str) -> ToolUsage:
        """Return how often a made tool was called and failed; raises ToolNotFound."""
        return self._made.usage(_counted(self.get(name)))

    def flush(self) -> None:
        """Write all counts now; raises RegistryError."""
        self._made.flush()

    def close(self) -> None:
        """Write the counts, if that can be, and close the file; closing twice is fine."""
        self._made.close()

    def is_made(self, spec: ToolSpec) -> bool:
        """Tell whether a tool is kept here, rather than being the developer's or a server's."""
        return key_of(spec.name) not in self._developers and spec.owner is not ToolOwner.SERVER


def _whose(spec: ToolSpec) -> str:
    return "a server's" if spec.owner is ToolOwner.SERVER else "the developer's, and trusted"


def _counted(spec: ToolSpec) -> VersionKey:
    return key_of(spec.name), spec.version


def _taken(name: str, existing: str, whose: str) -> ToolExists:
    hint = "choose another name"
    return ToolExists(f"{name}: there is {existing}, {whose}", hint, tool=name, existing=existing)
