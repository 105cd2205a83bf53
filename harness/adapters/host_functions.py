"""`HostFunctions`: functions of a framework that programs in cells call, through the broker."""

from collections.abc import Callable, Iterable
from typing import Any

from ...policies.errors import ToolNotFound
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..schemas.tool_names import normalised
from ..tools.caller import Caller, Tool


class HostFunctions:
    """A catalogue of functions that may change between two calls of a session."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._is_listed: dict[str, bool] = {}
        self._revision = 0

    def add(
        self, name: str, function: Callable[[dict[str, Any]], Any], *,
        description: str = "", parameters: dict[str, Any] | None = None, is_listed: bool = True,
    ) -> str:  # fmt: skip
        """Offer a function, which gets its arguments as one mapping; return the name of the tool.

        A program can find a tool by its name only, and not by a search, if it is not listed.
        Raises ToolInvalid for a name that a tool cannot have.
        """
        spec = ToolSpec(
            name=normalised(name), description=description, parameters=parameters or {},
            state=ToolState.TRUSTED, owner=ToolOwner.DEVELOPER,
        )  # fmt: skip

        def perform(arguments: dict[str, Any], caller: Caller) -> Any:
            return function(arguments)

        self._tools[spec.name] = Tool(spec, perform)
        self._is_listed[spec.name] = is_listed
        self._revision += is_listed
        return spec.name

    def remove(self, name: str) -> None:
        """Offer a function no longer."""
        self._revision += self._is_listed.pop(name)
        del self._tools[name]

    def clear(self) -> None:
        """Offer nothing."""
        for name in list(self._tools):
            self.remove(name)

    def get(self, name: str) -> Tool:
        found = self._tools.get(name)
        if found is None:
            raise ToolNotFound(f"there is no tool {name[:80]!r}", tool=name)
        return found

    def specs(self) -> Iterable[ToolSpec]:
        return [tool.spec for name, tool in self._tools.items() if self._is_listed[name]]

    def revision(self) -> int:
        return self._revision
