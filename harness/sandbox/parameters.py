"""The parameters of public methods: for each, a frozen struct that all code behind it passes on.

Where several methods take the same options, a TypedDict beside the struct names their types: a new
option is added to these two and to the code that uses it.  A test compares the two.  `requirements` is
another name for `packages`, and no struct has it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    overload,
)

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...runner.concurrency import NEVER
from ...runner.requests.request import OnOutput, Streams
from .checks import unknown_parameter

if TYPE_CHECKING:
    from inspect import Signature

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")
_R = TypeVar("_R")

_NO_OPTIONS = frozenset(
    {"on_output", "on_streams", "cancel"}
)  # options that methods name themselves if they take them
_FILES = ("files", "sources")
FileContent = str | bytes | os.PathLike[str]  # the last: a file or folder of the host


def _with_content(files: Mapping[str, FileContent]) -> Mapping[str, FileContent]:
    """Return `files` with the content of the host's files in place of their paths."""
    if not any(isinstance(each, os.PathLike) for each in files.values()):
        return files
    from .workspaces.archive import content_of_paths  # seldom needed

    return content_of_paths(files)


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one public method."""

    @classmethod
    def of(cls, method: str, **given: Any) -> Self:
        """Return the parameters that a caller of `method` gave, files of the host as their content.

        Raises PolicyError for `packages` by two names, and TypeError for an unknown parameter.
        """
        if requirements := given.pop("requirements", ()):
            if given.get("packages"):
                raise PolicyError("requirements: another name for packages, give one of the two")
            given["packages"] = requirements
        for name in _FILES:
            if (files := given.get(name)) and isinstance(files, Mapping):
                given[name] = _with_content(files)
        try:
            if given.keys() & _NO_OPTIONS:
                raise TypeError
            return cls(**given)
        except TypeError:
            known = [each for each in cls.__struct_fields__ if each not in _NO_OPTIONS]
            raise unknown_parameter(method, given, known) from None


class ProgramOptions(TypedDict, total=False):
    """The options of `execute`, which documents them, that any host of a fleet takes too."""

    stdin: str | bytes | None
    inputs: Mapping[str, Any] | None
    files: Mapping[str, FileContent] | None
    env: Mapping[str, str] | None
    timeout: float | None
    cpu_seconds: float | None
    collect: Sequence[str]
    trace_id: str | None
    plain: bool
    arguments: Sequence[str]
    filename: str | None
    packages: Sequence[str]
    requirements: Sequence[str]
    flags: Sequence[str]
    sources: Mapping[str, FileContent] | None
    compile_timeout: float | None


class CallOptions(ProgramOptions, total=False):
    """The options of all methods that execute a program, in a named workspace if they are given one."""

    workspace: str | None
    clean: bool


class CallArguments(Parameters, frozen=True, kw_only=True):
    """One call from the caller to the request: the program, the options of `execute`, the listener of
    its output, and the descriptor that cancels it.

    Sandboxes, sessions, durable runs, the daemon and the MCP server all pass this struct on.
    """

    code: str | bytes
    language: str = PYTHON
    on_output: OnOutput | None = None
    # Set for a program that talks to an interactor.
    on_streams: Callable[[Streams], None] | None = None
    cancel: int = NEVER
    stdin: str | bytes | None = None
    inputs: Mapping[str, Any] | None = None
    files: Mapping[str, FileContent] | None = None
    env: Mapping[str, str] | None = None
    timeout: float | None = None
    cpu_seconds: float | None = None
    collect: Sequence[str] = ()
    workspace: str | None = None
    clean: bool = False
    trace_id: str | None = None
    plain: bool = False
    arguments: Sequence[str] = ()
    filename: str | None = None
    packages: Sequence[str] = ()
    flags: Sequence[str] = ()
    sources: Mapping[str, FileContent] | None = None
    compile_timeout: float | None = None


class SourceOptions(TypedDict, total=False):
    """The options of a compiler that `judge` takes."""

    flags: Sequence[str]
    sources: Mapping[str, str | bytes] | None
    compile_timeout: float | None


class CompileOptions(TypedDict, total=False):
    """The options of `compile`, which documents them, that any host of a fleet takes too."""

    files: Mapping[str, FileContent] | None
    flags: Sequence[str]
    compile_timeout: float | None


class CompileArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `compile` and `acompile`."""

    source: str | bytes | None = None
    language: str
    files: Mapping[str, FileContent] | None = None
    flags: Sequence[str] = ()
    compile_timeout: float | None = None
    cancel: int = NEVER


class CommandOptions(TypedDict, total=False):
    """The options of `run`, which documents them, and of `arun`."""

    shell: bool
    cwd: str | None
    user: str | None
    env: Mapping[str, str] | None
    stdin: str | bytes | None
    timeout: float | None
    trace_id: str | None
    packages: Sequence[str]
    requirements: Sequence[str]


class CommandArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `run` and `arun`."""

    command: Sequence[str] | str
    shell: bool = False
    cwd: str | None = None
    user: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | bytes | None = None
    timeout: float | None = None
    trace_id: str | None = None
    packages: Sequence[str] = ()


class TerminalOptions(TypedDict, total=False):
    """The options of `terminal`, which documents them, and of `aterminal`."""

    cwd: str | None
    user: str | None
    env: Mapping[str, str] | None
    rows: int
    columns: int
    trace_id: str | None


class TerminalArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Session.terminal` and `Session.aterminal`."""

    command: Sequence[str] | None = None
    cwd: str | None = None
    user: str | None = None
    env: Mapping[str, str] | None = None
    rows: int = 24
    columns: int = 80
    trace_id: str | None = None


class SessionArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox.session`."""

    id: str | None = None
    language: str = PYTHON
    workspace: str | None = None
    clean: bool = False
    packages: Sequence[str] = ()


class ProgramArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox.program`."""

    argv: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    user: str | None = None
    files: Mapping[str, FileContent] | None = None
    trace_id: str | None = None
    terminal: tuple[int, int] | None = None
    on_output: OnOutput | None = None


class takes(Generic[_P, _S]):  # noqa: N801 - a decorator
    """Decorates a function whose last parameter is one struct or dataclass, to be called with the
    fields of that.  An unknown keyword raises a TypeError that names the parameter that was probably
    meant.  `read` makes the struct of the arguments, by default `fields` itself."""

    def __init__(self, fields: Callable[_P, _S], read: Callable[..., _S] | None = None) -> None:
        self._fields: Any = fields
        self._read = read or fields

    @overload
    def __call__(self, function: Callable[[_S], _R]) -> Callable[_P, _R]: ...
    @overload
    def __call__(self, function: Callable[[_T, _S], _R]) -> Callable[Concatenate[_T, _P], _R]: ...

    def __call__(self, function: Callable[..., _R]) -> Callable[..., _R]:
        fields, read = self._fields, self._read
        own = function.__code__.co_argcount - 1  # `self` or `cls`
        known = getattr(fields, "__struct_fields__", None) or tuple(fields.__dataclass_fields__)

        @wraps(function)
        def taking(*arguments: Any, **named: Any) -> _R:
            try:
                given = read(*arguments[own:], **named)
            except TypeError:
                if named.keys() <= {*known}:
                    raise
                what = function.__qualname__.removesuffix(".__init__")
                raise unknown_parameter(what, named, known) from None
            return function(*arguments[:own], given)

        taking.__dict__["__wrapped__"] = _Signed(function, fields, known)
        return taking


class _Signed:
    """The signature of a decorated function, made on demand: `inspect` takes long to import."""

    def __init__(self, function: Callable[..., object], fields: Any, names: Sequence[str]) -> None:
        self._of = function, fields, names
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any, **named: Any) -> object:
        return self._of[0](*arguments, **named)

    @property
    def __signature__(self) -> "Signature":
        from inspect import Parameter, get_annotations, signature

        function, fields, names = self._of
        defaults = fields()
        types: dict[str, Any] = {}
        for each in reversed(fields.__mro__):
            types |= get_annotations(each)
        parameters = [
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD if name in fields.__match_args__
                else Parameter.KEYWORD_ONLY,
                default=_shown(getattr(defaults, name)), annotation=types[name],
            )
            for name in names
        ]  # fmt: skip
        parameters.sort(key=lambda each: each.kind)
        own = signature(function)
        return own.replace(parameters=[*[*own.parameters.values()][:-1], *parameters])


def _shown(default: object) -> object:
    """Return a default as a signature has it: all fields of settings would be too long."""
    is_settings = isinstance(default, tuple) and default
    return _Settings(f"{type(default).__name__}()") if is_settings else default


class _Settings(str):
    __repr__ = str.__str__
