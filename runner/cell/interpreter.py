"""The guest's process: receive one program, run it as `__main__`, say what it came to, exit.

Everything before `_execute` is ours and runs behind every layer already; from there on nothing in
this process can be trusted, least of all the Finished frame it sends.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import json
import linecache
import os
import random  # noqa: F401 - loaded here, it seeds itself anew after every fork
import signal
import socket
import sys
import threading
import traceback
import types
from typing import NoReturn

from msgspec.structs import replace

from ...policies.plan import Plan
from ..channel import Channel, Receiver, packets
from ..messages import Finished, InputFile, Run, decode, encode

FILENAME = "<cell>"
_RUN_BYTES = 256 * 1024 * 1024
_ERROR_BYTES = 1000
_TRACEBACK_BYTES = 50_000
_REHEARSALS = (
    Run("1 + 1", b"{}", (), {}, 100),
    Run("x = [1]\nfor y in x:\n    print(end='')\nx + [y]", b"{}", (), {}, 100),
)


def prepare(plan: Plan) -> None:
    """Do in the launcher, once, what every guest would have to do: what a cell need not touch, it
    need not copy.  Afterwards nothing can be imported from cellwright any more.

    Raises ImportError if a module that the plan preloads cannot be.
    """
    sys.path_importer_cache.clear()
    sys.argv = [FILENAME]
    os.environ.clear()  # Python itself put LC_CTYPE there (PEP 538)
    os.environ.update(plan.environment)
    threading.excepthook = _raised_in_thread
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rehearse()  # what settles in the interpreter once need not settle in every cell
    _forget_ourselves()
    _preload(plan.python_path, plan.preload)
    gc.collect()
    gc.disable()  # a collection would touch, and so copy, every page (bpo-31558)
    gc.freeze()


def _preload(path: tuple[str, ...], names: tuple[str, ...]) -> None:
    sys.path.extend(path)
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - whatever a module raises
            raise ImportError(f"cannot preload {name}: {type(error).__name__}: {error}") from None
        if len(os.listdir("/proc/self/task")) > 1:  # a fork would have none of them
            raise ImportError(f"cannot preload {name}: it starts a thread")


def rehearse() -> None:
    """Run a program that does nothing, and leave no trace of it but memory that is this process's
    own: a page that a program is going to touch costs three microseconds then (measured)."""
    before = sys.modules["__main__"]
    for program in _REHEARSALS:
        stage = _Stage(b"\0" + encode(program))
        run = decode(Receiver(stage, _RUN_BYTES).receive_whole(), Run)
        _report(_execute(run, _fresh_main(run)), stage)
        _flush()
    gc.disable()
    sys.modules["__main__"] = before
    linecache.cache.clear()


class _Stage:
    """A control channel that leads nowhere."""

    def __init__(self, packet: bytes) -> None:
        self._packet = packet

    def recv(self, size: int) -> bytes:
        return self._packet[:size]

    def send(self, packet: bytes) -> int:
        return len(packet)


def serve(control: int) -> NoReturn:
    """Run the one program that arrives on `control`; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as python(1) has it
        sock = socket.socket(fileno=control)
        frame = Receiver(sock, _RUN_BYTES).receive_whole()
        _be_random()
        if frame:
            code = _run(decode(frame, Run), sock)
    finally:
        os._exit(code)


def _be_random() -> None:
    """Seed what was loaded ahead: all cells of a launcher have a copy of the same state.  `random`
    does so by itself in every fork; `secrets` and uuid4 ask the kernel."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if uuid := sys.modules.get("uuid"):  # uuid1
        uuid.__dict__.update(_node=None, _last_timestamp=None)


def _run(run: Run, sock: socket.socket) -> int:
    main = _fresh_main(run)
    for file in run.files:
        _write_file(file)
    finished, code = _execute(run, main)
    code = _leave(code)
    _report((finished, code), sock)
    return code


def _report(end: tuple[Finished, int], sock: Channel) -> None:
    finished, code = end
    with contextlib.suppress(OSError):  # the guest may have closed it
        for packet in packets(encode(replace(finished, ends_well=code == 0))):
            sock.send(packet)


def _fresh_main(run: Run) -> types.ModuleType:
    os.environ.update(run.environment)
    main = types.ModuleType("__main__")
    main.__dict__.update(json.loads(run.inputs), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    lines = (run.code + "\n").splitlines(keepends=True)  # as linecache has them: all end in one
    linecache.cache[FILENAME] = (len(run.code), None, lines, FILENAME)
    return main


def _forget_ourselves() -> None:
    """Take out of the guest's sight what is not the interpreter's: ours, and what ours needs."""
    stdlib = os.path.dirname(os.__file__) + os.sep
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if module is None or (file and not file.startswith(stdlib)):
            del sys.modules[name]


def _write_file(file: InputFile) -> None:
    """Write an input below /workspace; the supervisor has checked the path."""
    path = os.path.join("/workspace", file.path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as opened:
        opened.write(file.data)


def _execute(run: Run, main: types.ModuleType) -> tuple[Finished, int]:
    """Run the program and return what it came to and its exit code, as python(1) has it."""
    gc.enable()
    try:
        value = _evaluate(run.code, main.__dict__)
    except SystemExit as leaving:
        return _exited(leaving)
    except BaseException as error:  # noqa: BLE001 - whatever a guest raises is its result
        return _raised(error), 1
    return _value(value, run.value_bytes), 0


def _evaluate(code: str, namespace: dict[str, object]) -> object:
    """Execute `code`; return the value of its last statement if that is an expression."""
    if one_line := _as_expression(code):
        return eval(one_line, namespace)  # noqa: S307
    # The flag makes it parse only (ast.parse would leave a frame of its own in the traceback).
    tree: ast.Module = compile(code, FILENAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if tree.body:
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), namespace)  # noqa: S102
    if not isinstance(last, ast.Expr):
        return None
    expression = ast.Expression(last.value)
    return eval(compile(expression, FILENAME, "eval", dont_inherit=True), namespace)  # noqa: S307


def _as_expression(code: str) -> types.CodeType | None:
    """Compile one line that is an expression, in a third of the time that a syntax tree takes."""
    if "\n" in code or code[:1].isspace():
        return None
    try:
        return compile(code, FILENAME, "eval", dont_inherit=True)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # met and told again as a program
        return None


def _value(value: object, limit: int) -> Finished:
    if value is None:
        return Finished(None, None, None, None)
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        if len(text) <= limit:
            return Finished(text, None, None, None)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        representation = repr(value)
    except BaseException as error:  # noqa: BLE001 - a guest's __repr__ may do anything
        return _raised(error)
    return Finished(None, _fit(representation, limit), None, None)


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
    while frame and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    try:
        lines = traceback.format_exception(type(error), error, frame)
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    except BaseException:  # noqa: BLE001 - formatting runs the guest's __str__
        lines = [summary := type(error).__name__]
    text = _fit("".join(lines), _TRACEBACK_BYTES)
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # the guest's to close or replace
        sys.stderr.write(text)
    return Finished(None, None, _fit(summary, _ERROR_BYTES), text)


def _raised_in_thread(failure: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, with the guest's source lines, which the default cannot find."""
    if failure.exc_type is SystemExit:
        return
    name = failure.thread.name if failure.thread else "?"
    lines = traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    sys.stderr.write(f"Exception in thread {name}:\n{''.join(lines)}")


def _flush() -> None:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _leave(code: int) -> int:
    """Do what python(1) does at its end: wait for threads, run atexit, flush."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        _flush()
    except BaseException:  # noqa: BLE001 - as python(1): 120 if the last flush fails
        return code or 120
    return code
