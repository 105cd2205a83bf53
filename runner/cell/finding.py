"""Names of the module `tools` besides the tools: search, and the mark of an absent argument."""

from collections.abc import Callable, Mapping
from typing import Any


class _Unset:
    """Stands for an argument that is not given."""

    def __repr__(self) -> str:
        return "..."


UNSET: Any = _Unset()
_Unset.__module__ = "tools"


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not UNSET."""
    return {name: value for name, value in arguments.items() if value is not UNSET}


def finding(call_tool: Callable[[str, Mapping[str, Any]], Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions that find tools; like all calls, in a coroutine they are awaited."""

    def search_tools(
        query: str,
        detail: str = "summary",
        server: str | None = None,
        limit: int = 5,
        offset: int = 0,
    ) -> Any:
        """Find tools by name or by what they are for; detail is name, summary or full."""
        asked = {"query": query, "detail": detail, "limit": limit, "offset": offset}
        return call_tool("tools.search", asked | ({"server": server} if server else {}))

    def browse(server: str | None = None, limit: int = 50, offset: int = 0) -> Any:
        """List servers and how many tools each has; or the tools of one, each in a line."""
        asked: dict[str, Any] = {"limit": limit, "offset": offset}
        return call_tool("tools.browse", asked | ({"server": server} if server else {}))

    def describe(name: str, detail: str = "full") -> Any:
        """Say how a tool is called: its signature, and in full its types and what they mean."""
        return call_tool("tools.describe", {"name": name, "detail": detail})

    functions = (search_tools, browse, describe)
    for function in functions:
        function.__module__ = "tools"
    return {function.__name__: function for function in functions}
