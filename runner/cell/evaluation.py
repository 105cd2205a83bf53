"""Running a program in the guest's process, and saying what it came to."""

import _ast  # without what `ast` adds to it
import contextlib
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..messages import NOT_JSON, Finished
from .exchange import PROGRAM
from .pictures import pictures
from .values import SCALARS, TEXT, NotPlain, plain

_CO_COROUTINE = 128  # as in `inspect`, which would make the launcher larger and its start longer
_ERROR_BYTES = 1000
_TRACEBACK_BYTES = 50_000
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_WITHOUT_NAMES = SCALARS | {float}
_ENCLOSING: dict[int, object] = {}  # lists and mappings around a value, so that a cycle is noticed
# What `_JSON` makes for each value anew, which costs each cell 13 pages (measured); CPython's own.
_PIECES = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
    _ENCLOSING, _JSON.default, json.encoder.encode_basestring,
    None, ": ", ", ", False, False, False,
)  # fmt: skip
_OURS = os.path.dirname(__file__) + os.sep
# Between us and the program: our frames, and those of the event loop in which it awaits.
_NOT_THE_PROGRAMS = (
    _OURS,
    os.path.join(os.path.dirname(os.__file__), "asyncio", "base_events.py"),
)


def outcome(
    program: Callable[[], object], value_bytes: int, picture_bytes: int, *, is_plain: bool = False
) -> tuple[Finished, int]:
    """Call `program` and return what it came to and its exit code, as python(1) has it."""
    try:
        value = program()
    except SystemExit as leaving:
        return _exited(leaving)
    except BaseException as error:  # noqa: BLE001 - whatever a guest raises is its result
        return _raised(error), 1
    if is_plain:
        return _plain(value, value_bytes)
    finished = _value(value, value_bytes)
    drawn = pictures(value, picture_bytes)
    return (replace(finished, pictures=drawn) if drawn else finished), 0


class Executor:
    """Executes compiled source; what awaits at its top level runs in one event loop."""

    def __init__(self) -> None:
        self._loop: Any = None  # of asyncio, once something is awaited

    def execute(self, code: types.CodeType, namespace: dict[str, object]) -> object:
        value: Any = eval(code, namespace)  # noqa: S307
        return self._await(value) if code.co_flags & _CO_COROUTINE else value

    def _await(self, value: Any) -> object:
        import asyncio  # takes 40 ms: only where something is awaited

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(value)


class Source(NamedTuple):
    """Source, the name that tracebacks give it, and what executes its parts."""

    code: str
    executor: Executor
    filename: str = PROGRAM

    def run(self, namespace: dict[str, object]) -> object:
        """Execute it; return the value of its last statement if that is an expression."""
        if one_line := self._as_expression():
            return self.executor.execute(one_line, namespace)
        # The flag makes it parse only (ast.parse would leave a frame of its own in the traceback).
        tree: _ast.Module = self._compile(self.code, "exec", _ast.PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        if tree.body:
            self.executor.execute(self._compile(tree, "exec"), namespace)
        if not isinstance(last, _ast.Expr):
            return None
        return self.executor.execute(self._compile(_ast.Expression(last.value), "eval"), namespace)

    def _compile(self, source: str | _ast.AST, mode: str, flags: int = 0) -> Any:
        flags |= _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return compile(source, self.filename, mode, flags, dont_inherit=True)  # type: ignore[arg-type]

    def _as_expression(self) -> types.CodeType | None:
        """Compile one line that is an expression, in a third of the time that a syntax tree takes."""
        if "\n" in self.code or self.code[:1].isspace():
            return None
        try:
            return self._compile(self.code, "eval")  # type: ignore[no-any-return]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None  # met and told again as a program


def _value(value: object, limit: int) -> Finished:
    if value is None:
        return Finished(None, None, None, None)
    try:
        text = "".join(_PIECES(value, 0)).encode()
        if len(text) <= limit and not _has_equal_names(value):
            return Finished(text, None, None, None)
    except (TypeError, ValueError, RecursionError):
        pass
    finally:
        _ENCLOSING.clear()
    try:
        representation = repr(value)
    except BaseException as error:  # noqa: BLE001 - a guest's __repr__ may do anything
        return _raised(error)
    cut = _fit(representation, limit)
    dropped = 0 if len(cut) == len(representation) else _bytes_of(representation) - _bytes_of(cut)
    return Finished(None, cut, None, None, dropped_bytes=dropped)


def _has_equal_names(value: object) -> bool:
    """Tell whether two keys of a dictionary in `value`, such as 1 and "1", have one name in JSON."""
    if isinstance(value, dict):
        if not TEXT.issuperset(map(type, value)):
            names = {key if isinstance(key, str) else json.dumps(key) for key in value}
            if len(names) < len(value):
                return True
        value = list(value.values())
    if not isinstance(value, list | tuple) or _WITHOUT_NAMES.issuperset(map(type, value)):
        return False
    return any(map(_has_equal_names, value))


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "backslashreplace"))


def _plain(value: object, limit: int) -> tuple[Finished, int]:
    """Return the value as JSON, made plain if it is not, or what says why it cannot be."""
    try:
        text = json.dumps(plain(value), ensure_ascii=False).encode()
    except NotPlain as error:
        why = str(error)
    except BaseException as error:  # noqa: BLE001 - a guest's iterator may do anything
        return _raised(error), 1
    else:
        if len(text) <= limit:
            return Finished(text, None, None, None), 0
        why = f"it has {len(text)} bytes, more than limits.value_bytes of the policy, {limit}"
    return Finished(None, None, _fit(f"{NOT_JSON}{why}", _ERROR_BYTES), None), 1


def _fit(text: str, limit: int) -> str:
    """Return `text` as something that UTF-8 can hold, of at most `limit` bytes."""
    return text[:limit].encode("utf-8", "backslashreplace")[:limit].decode("utf-8", "ignore")


def _exited(leaving: SystemExit) -> tuple[Finished, int]:
    """Do what python(1) does with the argument of sys.exit."""
    code = leaving.code
    if code is None or isinstance(code, int):
        return Finished(None, None, None, None), (code or 0) & 0xFF
    print(code, file=sys.stderr)  # noqa: T201 - sys.exit("message")
    return Finished(None, None, _fit(str(code), _ERROR_BYTES), None), 1


def _raised(error: BaseException) -> Finished:
    """Print the traceback as python(1) does, without our own frames, and return it."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.startswith(_NOT_THE_PROGRAMS):
        frame = frame.tb_next
    try:
        lines = lines_of(error, frame)
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    except BaseException:  # noqa: BLE001 - formatting runs the guest's __str__
        lines = [summary := type(error).__name__]
    text = _fit("".join(lines), _TRACEBACK_BYTES)
    with contextlib.suppress(Exception):  # the guest's to close, replace or delete
        sys.stderr.write(text)
    return Finished(None, None, _fit(summary, _ERROR_BYTES), text)


def lines_of(error: BaseException, frame: types.TracebackType | None) -> list[str]:
    """Return the lines of a traceback without our own frames, wherever they stand: a tool is called
    through some of them, and their paths are the host's, which the program has no use for."""
    told = [traceback.TracebackException(type(error), error, frame)]
    lines = told[0]
    while told:
        each = told.pop()
        seen = [line for line in each.stack if not line.filename.startswith(_OURS)]
        each.stack = traceback.StackSummary.from_list(seen)
        told += [other for other in (each.__cause__, each.__context__) if other]
        told += each.exceptions or []
    return list(lines.format())
