"""Evaluation of a program as the module `__main__` of the guest, and the report of its outcome."""

import _ast  # without the Python classes of `ast`
import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import contextlib
import errno
import io
import json
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..channel import Channel, Receiver
from ..messages import NOT_JSON, Become, Finished, RunProgram, Start
from .guest_frames import PROGRAM, give, path_of, receive, report
from .pictures import pictures
from .plain_values import SCALARS, TEXT, NotPlain, plain
from .tool_module import Toolbox

# as in `inspect`, which is not imported because it makes the launcher larger and slower
_CO_COROUTINE = 128
_ERROR_BYTES = 1000
_TRACEBACK_BYTES = 50_000
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_WITHOUT_NAMES = SCALARS | {float}
_ENCLOSING: dict[int, object] = {}  # lists and mappings around a value, so that a cycle is noticed
# CPython's own function. `_JSON` would make it anew for each value, which costs each cell 13 pages
# (measured).
_PIECES = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
    _ENCLOSING, _JSON.default, json.encoder.encode_basestring,
    None, ": ", ", ", False, False, False,
)  # fmt: skip
# interpreter.py renames the files of frames below the program, so that no path of the host shows.
NAMED = "<cellwright."
_OURS = (os.path.dirname(__file__) + os.sep, NAMED)
# Frames between the interpreter and the program: cellwright's, and those of the event loop.
_NOT_THE_PROGRAMS = (
    *_OURS,
    os.path.join(os.path.dirname(os.__file__), "asyncio", "base_events.py"),
)


def outcome(
    program: Callable[[], object], value_bytes: int, picture_bytes: int, *, is_plain: bool = False
) -> tuple[Finished, int]:
    """Call `program` and return its outcome, and its exit code as python(1) has it."""
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
    """Executes compiled source; awaits at the top level run in one event loop."""

    def __init__(self) -> None:
        self._loop: Any = None  # the event loop, once the program awaits something

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
    """Source, its name in tracebacks, and the executor of its parts."""

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
            return None  # compiling it as a program raises the same error


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
    """Return the value as JSON, converted to plain values if needed, or the reason why it cannot be."""
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
    if not _reported_by_hook(error, frame):
        with contextlib.suppress(Exception):  # the guest may have closed, replaced or deleted it
            sys.stderr.write(text)
    return Finished(None, None, _fit(summary, _ERROR_BYTES), text)


def _reported_by_hook(error: BaseException, frame: types.TracebackType | None) -> bool:
    """Call the program's own sys.excepthook, if it set one; tell whether that reported the error."""
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    if hook is sys.__excepthook__:
        return False
    try:
        hook(type(error), error, frame)
    except BaseException:  # noqa: BLE001 - the guest's hook may do anything
        return False
    return True


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


_SOURCE = "/tmp/cell.py"  # noqa: S108 - the cell's own


class _Main(types.ModuleType):
    """The module as which programs run.  A program that is no file becomes one outside /workspace when
    something asks for its path, as `multiprocessing` does: a child that is spawned runs it again."""

    def __getattr__(self, name: str) -> str:
        source = _source_for_children() if name == "__file__" else ""
        if not source:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        with open(_SOURCE, "w", encoding="utf-8") as file:
            file.write(source)
        return _SOURCE


def _source_for_children() -> str:
    """Return the source that a spawned child runs. A program of the session that guards its main
    part by `__name__` is included whole. Of others only imports, definitions and constants are, so
    that a child starts no children."""
    programs = ("".join(each[2]) for name, each in linecache.cache.items() if name[:5] == "<cell")  # type: ignore[misc]
    return "\n".join(
        source if "__name__" in source else _definitions(source) for source in programs
    )


def _definitions(source: str) -> str:
    import ast  # only where children are spawned

    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    try:
        tree = compile(source, PROGRAM, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return ""
    tree.body = [
        each for each in tree.body
        if isinstance(each, kept)
        or (isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant))
    ]  # fmt: skip
    return ast.unparse(tree)


def fresh_main() -> types.ModuleType:
    """Make the module as which programs run, the only one of that name that they see."""
    main = _Main("__main__")
    sys.modules["__main__"] = main
    return main


_SOURCES = 200  # tracebacks can show lines of so many past programs


def converse(
    run: RunProgram, receiver: Receiver, sock: Channel, main: types.ModuleType, toolbox: Toolbox
) -> int:
    """Run one request after another, beginning with `run`, until the host closes the channel; return an
    exit code.

    A child that a program forked, and that came to that program's end, ends: the next program, and
    the word on this one, are its parent's.
    """
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    session, itself = _Session(main, toolbox), os.getpid()
    following: RunProgram | Start | Become | None = run
    while isinstance(following, RunProgram):
        finished, code = session.answer(following)
        if os.getpid() != itself:
            return code
        report((finished, code), sock, following.nonce)
        following = receive(receiver)
    return 0


class _Session:
    def __init__(self, main: types.ModuleType, toolbox: Toolbox) -> None:
        self._main = main
        self._toolbox = toolbox
        self._handler: Any = _signal.default_int_handler  # or a handler that a program installed
        self._executor = Executor()
        self._no_input, self._without_input = sys.stdin, -1

    def answer(self, run: RunProgram) -> tuple[Finished, int]:
        finished, code = outcome(
            lambda: self._run(run), run.value_bytes, run.picture_bytes, is_plain=run.plain
        )
        self._toolbox.close()
        for name in ("stdout", "stderr"):
            with contextlib.suppress(
                Exception
            ):  # the guest may have replaced, closed or deleted it
                getattr(sys, name).flush()
        return finished, code

    def _run(self, run: RunProgram) -> object:
        value = self._interruptibly(run, f"<cell {run.request}>")
        linecache.cache.pop(f"<cell {run.request - _SOURCES}>", None)
        if value is not None:
            self._main.__dict__["_"] = value
        return value

    def _give_input(self, data: bytes) -> None:
        """Have sys.stdin and descriptor 0, which children inherit, read `data`."""
        sys.stdin = self._no_input
        if not data:
            return
        try:  # an unnamed file, because without a memory cgroup memfd_create is refused
            with open(os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600), "w+b", buffering=0) as file:  # noqa: S108
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                file.seek(0)
                self._without_input = os.dup(0)
                os.dup2(file.fileno(), 0)
        except OSError:  # no space: children get no input
            sys.stdin = io.TextIOWrapper(io.BytesIO(data), "utf-8")
        else:
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115

    def _take_input(self) -> None:
        """Restore descriptor 0: only then can the session be branched."""
        if self._without_input >= 0:
            os.dup2(self._without_input, 0)
            os.close(self._without_input)
            self._without_input = -1

    def _interruptibly(self, run: RunProgram, filename: str) -> object:
        program, file = (
            Source(run.code, self._executor, path_of(run) if run.filename else filename),
            None,
        )
        try:
            _signal.signal(_signal.SIGINT, self._handler)
            self._give_input(run.stdin)
            file = give(run, self._main, program.filename)
            self._toolbox.open(run, self._main)
            return program.run(self._main.__dict__)
        finally:
            self._take_input()
            if file:
                file.remove()
            self._handler = _signal.getsignal(_signal.SIGINT) or self._handler
            _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # raises one that came just before
