"""`tools`: the host's tools as a program sees them, functions that happen to run elsewhere.

Any thread may call one.  In a coroutine a call is awaited, elsewhere it returns the value.
"""

import keyword
import linecache
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from ..channel import Channel, Receiver
from ..messages import RunProgram
from .import_finders import PLACE, Package, install
from .tool_caller import FILES, GuestToolError, ToolCaller


# Names of the module `tools` besides the tools: search, and the mark of an absent argument.
class _Unset:
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
        """Find tools by name or purpose; detail is name, summary or full."""
        asked = {"query": query, "detail": detail, "limit": limit, "offset": offset}
        return call_tool("tools.search", asked | ({"server": server} if server else {}))

    def browse(server: str | None = None, limit: int = 50, offset: int = 0) -> Any:
        """List servers and how many tools each has; or the tools of one, each in a line."""
        asked: dict[str, Any] = {"limit": limit, "offset": offset}
        return call_tool("tools.browse", asked | ({"server": server} if server else {}))

    def describe(name: str, detail: str = "full") -> Any:
        """Describe how to call a tool: its signature, and in full also its types and their meaning."""
        return call_tool("tools.describe", {"name": name, "detail": detail})

    functions = (search_tools, browse, describe)
    for function in functions:
        function.__module__ = "tools"
    return {function.__name__: function for function in functions}


class GuestTool:
    """A tool, or the first part of names of tools."""

    def __init__(self, caller: ToolCaller, name: str) -> None:
        self._caller = caller
        self._name = name
        self._parameters: tuple[str, ...] | None = None
        self._names: frozenset[str] = frozenset()

    def take(self, parameters: tuple[str, ...]) -> None:
        """Let it be called, with arguments of these names."""
        self._parameters = parameters
        self._names = frozenset(parameters)

    def __call__(self, *positional: Any, **arguments: Any) -> Any:
        if not positional and self._names.issuperset(arguments) and arguments:
            return self._caller.call(self._name, arguments)
        if self._parameters is None:
            raise TypeError(f"{self._name} is not a tool; there are {', '.join(dir(self))}")
        if len(positional) > len(self._parameters):
            raise TypeError(f"{self._name}() takes {', '.join(self._parameters) or 'no arguments'}")
        arguments = {self._named(word): value for word, value in arguments.items()}
        given = dict(zip(self._parameters, positional, strict=False))
        if twice := given.keys() & arguments.keys():
            raise TypeError(f"{self._name}() got two values for {', '.join(sorted(twice))}")
        return self._caller.call(self._name, given | arguments)

    def _named(self, word: str) -> str:
        """Return the parameter that Python has to write as `word`; any other word is returned
        unchanged."""
        parameters = self._parameters or ()
        meant = [each for each in parameters if _identifier(each) == word]
        return meant[0] if len(meant) == 1 and word not in parameters else word

    def __dir__(self) -> list[str]:
        return [name for name in self.__dict__ if not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        if name[:1] == "_":  # copy and pickle ask an object that has no attributes yet
            raise AttributeError(name)
        names = f"; there are {', '.join(dir(self))}" if dir(self) else ""
        # Python 3.14 would add "Did you mean" to an error with a name.
        raise AttributeError(f"{self._name} has no {name!r}{names}", name=None)

    def __repr__(self) -> str:
        return f"<tool {self._name}({', '.join(self._parameters or ('...',))})>"


class Toolbox:
    """The module `tools` of one guest: made in the launcher, filled anew for every request."""

    def __init__(self, sock: Channel, control: int, receiver: Receiver) -> None:
        self._caller = ToolCaller(sock, control, receiver)
        self._module = self._made()
        self._is_importable = False
        self._named: dict[str, tuple[str, ...]] = {}

    def open(self, run: RunProgram, main: types.ModuleType) -> None:
        """Let the program of `run` import and call its tools."""
        if not run.tools:
            return
        if not self._is_importable:
            self._make_importable()
        self._name(self._module, run.tools)
        main.__dict__["call_tool"] = self._module.__dict__["call_tool"]
        self._caller.open(sites=run.sites)

    def close(self) -> None:
        """End what still waits; the next word on the control socket is not theirs."""
        if self._caller.is_ours():
            self._caller.close()

    def _make_importable(self) -> None:
        self._is_importable = True
        sys.modules["tools"] = self._module
        install(self._caller.suggestion_for)
        for file in FILES:
            linecache.cache[file] = (0, None, [], file)  # else tracebacks would open it

    def _made(self) -> types.ModuleType:
        module = Package("tools", __doc__)
        module.__path__ = [PLACE]

        def call_tool(name: str, args: Mapping[str, Any] | None = None) -> Any:
            """Call a tool by its name; in a coroutine, await it."""
            return self._caller.call(name, args or {})

        module.__dict__.update(ToolError=GuestToolError, call_tool=call_tool)
        module.__dict__.update(UNSET=UNSET, given=given)
        module.__dict__.update(finding(call_tool))
        return module

    def _name(self, module: types.ModuleType, tools: Mapping[str, tuple[str, ...]]) -> None:
        """Give tools their names in the module; those of the request before are others, maybe."""
        if tools == self._named:
            return
        for name in self._named:
            word = _identifier(name.partition(".")[0])
            if isinstance(module.__dict__.get(word), GuestTool):
                delattr(module, word)
        for name, parameters in tools.items():
            self._place(module, name, parameters)
        self._named = dict(tools)

    def _place(self, at: Any, name: str, parameters: tuple[str, ...]) -> None:
        steps = name.split(".")
        for count, step in enumerate(steps, 1):
            word = _identifier(step)
            if word not in at.__dict__:
                at.__dict__[word] = GuestTool(self._caller, ".".join(steps[:count]))
            at = at.__dict__[word]
        if isinstance(at, GuestTool):  # not one of this module's own names
            at.take(tuple(parameters))


def _identifier(word: str) -> str:
    plain = "".join(letter if letter.isalnum() else "_" for letter in word)
    plain = f"_{plain}" if plain[:1].isdigit() else plain
    return f"{plain}_" if keyword.iskeyword(plain) else plain
