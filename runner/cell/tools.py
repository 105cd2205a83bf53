"""`tools`: the host's tools as a program sees them, functions that happen to run elsewhere.

Any thread may call one.  In a coroutine a call is awaited, elsewhere it returns the value.
"""

import keyword
import linecache
import sys
import types
from collections.abc import Mapping
from typing import Any

from ..channel import Channel, Receiver
from ..messages import RunProgram
from .caller import FILES, GuestToolError, ToolCaller
from .finding import UNSET, finding, given
from .stubs import PLACE, Package, install


class GuestTool:
    """A tool, or what names of tools begin with."""

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
        """Return the parameter that Python can only say as `word`; else what was said."""
        parameters = self._parameters or ()
        meant = [each for each in parameters if _identifier(each) == word]
        return meant[0] if len(meant) == 1 and word not in parameters else word

    def __dir__(self) -> list[str]:
        return [name for name in self.__dict__ if not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        if name[:1] == "_":  # asked by copy and pickle, of one that has no attributes yet
            raise AttributeError(name)
        names = f"; there are {', '.join(dir(self))}" if dir(self) else ""
        raise AttributeError(f"{self._name} has no {name!r}{names}")

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
        install(self._caller.what_was_meant)
        for file in FILES:
            linecache.cache[file] = (0, None, [], file)  # or tracebacks would try to open it

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
        if isinstance(at, GuestTool):  # not a name of our own
            at.take(tuple(parameters))


def _identifier(word: str) -> str:
    """Return the name by which Python can say `word`."""
    plain = "".join(letter if letter.isalnum() else "_" for letter in word)
    plain = f"_{plain}" if plain[:1].isdigit() else plain
    return f"{plain}_" if keyword.iskeyword(plain) else plain
