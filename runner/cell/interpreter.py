"""The guest's process: receive one program, run it as `__main__`, say what it came to, exit.

Everything before `outcome` is ours and runs behind every layer already; from there on nothing in
this process can be trusted, least of all the Finished frame it sends.
"""

import _random
import _signal  # type: ignore[import-not-found]  # has no stub
import _sitebuiltins
import _socket
import atexit
import builtins
import gc
import importlib
import linecache
import os
import random
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import NoReturn

from ...policies.plan import Plan
from ..channel import Channel
from ..messages import Become, Finished, RunProgram, encode
from .evaluation import Executor, Source, lines_of, outcome
from .exchange import PROGRAM, WORKSPACE, give, receive, receiver_of, report
from .pictures import display
from .programs import Interpreter, become_program
from .repl import converse
from .tools import Toolbox

# While modules are preloaded there is no /tmp to write to.
_WRITTEN_TO = {"TMPDIR", "MPLCONFIGDIR"}
_REHEARSALS = (
    RunProgram("1 + 1", b"{}", (), {}, 100),
    RunProgram("x = [1]\nfor y in x:\n    print(end='')\nx + [y]", b"{}", (), {}, 100),
)


_other: Interpreter | None = None  # where the plan is for another language
_hooks: list[object] = []  # that preloaded modules registered, to be called after a fork


def has_hooks() -> bool:
    """Tell whether a preloaded module registered functions that a fork has to call."""
    return bool(_hooks)


def prepare(plan: Plan) -> None:
    """Do in the launcher, once, what every guest would have to do: what a cell need not touch, it
    need not copy.  Afterwards nothing can be imported from cellwright any more.

    Raises ImportError if a module that the plan preloads cannot be.
    """
    global _other  # noqa: PLW0603 - set once, before any fork
    _other = Interpreter(plan) if plan.program else None
    sys.path_importer_cache.clear()
    sys.argv = [PROGRAM]
    os.environ.clear()  # Python itself put LC_CTYPE there (PEP 538)
    os.environ.update(plan.environment)
    threading.excepthook = _raised_in_thread
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rehearse()  # what settles in the interpreter once need not settle in every cell
    _forget_ourselves()
    _preload(plan.python_path, plan.preload)
    _add_what_people_expect()
    gc.collect()
    gc.disable()  # a collection would touch, and so copy, every page (bpo-31558)
    gc.freeze()


def _preload(path: tuple[str, ...], names: tuple[str, ...]) -> None:
    sys.path.extend(path)
    environment = dict(os.environ)
    os.environ.update(dict.fromkeys(_WRITTEN_TO & os.environ.keys(), "/workspace"))
    register = os.register_at_fork

    def note(**hooks: Callable[[], object]) -> None:
        register(**hooks)
        _hooks.append(hooks)

    os.register_at_fork = note  # type: ignore[assignment]
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - whatever a module raises
            raise PreloadError(f"cannot preload {name}: {type(error).__name__}: {error}") from None
        if len(os.listdir("/proc/self/task")) > 1:  # a fork would have none of them
            raise PreloadError(f"cannot preload {name}: it starts a thread")
    os.register_at_fork = register
    os.environ.update(environment)


def _add_what_people_expect() -> None:
    """Let programs import files of their own, and give them what the module site gives to python(1)
    and a notebook to its cells.

    /workspace comes last: a file that another program left there never takes the place of a module
    of the standard library or of a package.
    """
    sys.path.append(WORKSPACE)
    sys.dont_write_bytecode = True  # else each import would leave a file among the program's own
    builtins.__dict__.update(
        exit=_sitebuiltins.Quitter("exit", "the end of the program"),
        quit=_sitebuiltins.Quitter("quit", "the end of the program"),
        help=_sitebuiltins._Helper(),
        display=display,
    )


class PreloadError(Exception):
    """A module that the policy names cannot be imported ahead of the programs."""


def rehearse() -> None:
    """Run a program that does nothing, and leave no trace of it but memory that is this process's
    own: a page that a program is going to touch costs three microseconds then (measured)."""
    before = sys.modules["__main__"]
    for program in _REHEARSALS:
        stage = _Stage(b"\0" + encode(program))
        receiver = receiver_of(stage)
        run = receive(receiver)
        if isinstance(run, RunProgram):
            report(_execute(run, Toolbox(stage, 0, receiver)), stage)
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
    """Run the one program that arrives on `control`, or all that do if it is the first of a session;
    never returns."""
    code = 1
    try:
        code = _serve(control)
    finally:
        os._exit(code)


def _serve(control: int) -> int:
    # The C functions: the enumerations of their Python faces cost 70 pages (measured).
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # as python(1) has it
    sock = _socket.socket(fileno=control)
    receiver = receiver_of(sock)
    run = receive(receiver)
    if isinstance(run, Become):
        become_program(run, control)
    if run and _other:
        _other.become(run, control)
    threading.main_thread()._native_id = os.getpid()  # type: ignore[attr-defined]  # set at start only
    _be_random()
    if isinstance(run, RunProgram) and run.request:
        toolbox = Toolbox(sock, control, receiver)
        return _leave(converse(run, receiver, sock, fresh_main(), toolbox))
    if isinstance(run, RunProgram):
        return _run(run, sock, Toolbox(sock, control, receiver) if run.tools else None)
    return 1


def rehearsal() -> Callable[[], object]:
    """Return what any program has a cell do, for a child of the launcher to do it once."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.send(b"\0" + encode(_REHEARSALS[0]))

    def rehearse_in_child() -> None:
        there.fileno()  # holds the other end open
        _serve(here.detach())

    return rehearse_in_child


def _be_random() -> None:
    """Seed what was loaded ahead: all cells of a launcher have a copy of the same state.  `random`
    does so by itself in every fork; `secrets` and uuid4 ask the kernel, and what notices a fork by
    another getpid() finds one (launcher/main.py)."""
    if not _hooks:
        _random.Random.seed(random._inst)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    # These two notice now that they are in another process: a child may have the launcher's number.
    if openssl := sys.modules.get("_ssl"):
        openssl.RAND_bytes(1)
    if (tempfile := sys.modules.get("tempfile")) and tempfile._name_sequence:
        tempfile._name_sequence.rng  # noqa: B018 - a property that makes another generator
    if uuid := sys.modules.get("uuid"):
        # libuuid, which uuid1 and getnode would ask, keeps its node and clock sequence over a fork.
        node = random.getrandbits(48) | 1 << 40  # multicast: of no network card (RFC 9562, 6.10)
        uuid.__dict__.update(_node=node, _last_timestamp=None, _generate_time_safe=None)


def _run(run: RunProgram, sock: Channel, toolbox: Toolbox | None) -> int:
    itself = os.getpid()
    finished, code = _execute(run, toolbox)
    code = _leave(code)
    if os.getpid() == itself:  # not a child that the program forked, and that came to its end
        if toolbox:
            toolbox.close()
        report((finished, code), sock)
    return code


def _execute(run: RunProgram, toolbox: Toolbox | None) -> tuple[Finished, int]:
    main = fresh_main()
    gc.enable()
    give(run, main, PROGRAM)
    if toolbox:
        toolbox.open(run, main)
    program = Source(run.code, Executor())
    return outcome(
        lambda: program.run(main.__dict__), run.value_bytes, run.picture_bytes, is_plain=run.plain
    )


def fresh_main() -> types.ModuleType:
    """Make the module as which programs run, the only one of that name that they see."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    return main


def _forget_ourselves() -> None:
    """Take out of the guest's sight what is not the interpreter's: ours, and what ours needs."""
    stdlib = os.path.dirname(os.__file__) + os.sep
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if module is None or (file and not file.startswith(stdlib)):
            del sys.modules[name]


def _raised_in_thread(failure: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, with the guest's source lines, which the default cannot find."""
    if failure.exc_type is SystemExit:
        return
    name = failure.thread.name if failure.thread else "?"
    error = failure.exc_value
    lines = lines_of(error, failure.exc_traceback) if error else [failure.exc_type.__name__]
    sys.stderr.write(f"Exception in thread {name}:\n{''.join(lines)}")


def _flush() -> None:
    if atexit._ncallbacks():
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _has_threads() -> bool:
    """Tell whether threads were started; threading._shutdown costs pages where none was."""
    inside = vars(threading)
    return len(inside["_active"]) > 1 or bool(inside["_threading_atexits"] or inside["_limbo"])


def _leave(code: int) -> int:
    """Do what python(1) does at its end: wait for threads, run atexit, flush."""
    try:
        if _has_threads():
            threading._shutdown()  # type: ignore[attr-defined]
        _flush()
    except BaseException:  # noqa: BLE001 - as python(1): 120 if the last flush fails
        return code or 120
    return code
