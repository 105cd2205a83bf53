"""The guest's process: receives one program, runs it as `__main__`, reports its outcome, and exits.

Everything before `outcome` is ours and runs behind every layer already; from there on nothing in
this process can be trusted, least of all the Finished frame it sends.
"""

import _imp
import _io
import _signal  # type: ignore[import-not-found]  # has no stub
import _socket
import _thread
import atexit
import builtins
import gc
import importlib
import linecache
import os
import site
import sys
import threading
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

from ...policies.languages import LANGUAGES
from ...policies.plan import Plan
from ..channel import Channel
from ..fixed_root import IMAGE_PYTHON, processors
from ..kernel import process_calls as processes
from ..messages import Become, Finished, RunProgram, encode
from .evaluation import NAMED, Executor, Source, converse, fresh_main, lines_of, outcome
from .guest_frames import (  # fmt: skip
    PROGRAM,
    WORKSPACE,
    Interpreter,
    ProgramFile,
    become_program,
    give,
    path_of,
    receive,
    receiver_of,
    report,
)
from .import_finders import install_skills as find_skills
from .pictures import display
from .tool_module import Toolbox

# While modules are preloaded there is no /tmp to write to.
_WRITTEN_TO = {"TMPDIR", "MPLCONFIGDIR"}
_FOR_PROGRAMS = ("random", "socket")  # preloaded for programs; this module does not need them
# Preloaded where programs start others: importing it takes longer than to start one (measured).
_FOR_COMMANDS = ("subprocess",)
_REHEARSALS = (
    RunProgram("1 + 1", b"{}", (), {}, 100),
    RunProgram("for x in 1, 2:\n    print(end='')\n[1] + [x]", b"{}", (), {}, 100),
)
_WARM_UPS = 8
_POOL_BYTES, _POOL_HEADER_BYTES, _POOL_STEP, _MOST_IN_POOLS = 16 * 1024, 64, 16, 512
_MOST_FREE_PLACES = 20_000  # for one size of objects
_fillers: list[object] = []


_BELOW_PROGRAMS = ("evaluation", "interpreter", "main")  # modules

_guest: "Guest"
GUEST_ID = 2  # pid of each guest's process in its pid namespace; init is 1

_other: Interpreter | None = None  # set if the plan is for another language
# Objects that finalizers of a program may still use.
_KEPT_FOR_FINALIZERS = frozenset(
    (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, type(None), int, float, str)
)  # fmt: skip
_BUFFERED = frozenset((_io.TextIOWrapper, _io.BufferedWriter, _io.BufferedRandom))

_hooks: list[object] = []  # functions that preloaded modules registered by os.register_at_fork
# Called in each cell before its program: they seed generators of preloaded modules, and size pools.
_renewing: tuple[Callable[[], object], ...] = ()


def has_hooks() -> bool:
    """Tell whether a preloaded module registered functions that a fork has to call."""
    return bool(_hooks)


def prepare(
    plan: Plan, control: int, *, has_skills: bool = False, is_for_one_cell: bool = False
) -> None:
    """Do once in the launcher what every guest would have to do. A cell need not copy pages that it
    does not touch. Afterwards nothing can be imported from cellwright any more. `control` is where a
    guest has its control channel; `has_skills` says that there are files below /skills. With
    `is_for_one_cell` nothing is imported that the program may not need.

    Raises ImportError if a module that the plan preloads cannot be.
    """
    global _other, _renewing, _guest  # noqa: PLW0603 - set once, before any fork
    _other = Interpreter(plan) if plan.language in LANGUAGES else None
    sys.path_importer_cache.clear()
    if plan.image:
        sys.executable = IMAGE_PYTHON
    sys.argv = [PROGRAM]
    sys.orig_argv = [sys.executable, PROGRAM]
    sys.flags = _flags_of_programs()
    os.environ.clear()  # Python itself put LC_CTYPE there (PEP 538)
    os.environ.update(plan.environment)
    threading.excepthook = _raised_in_thread
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Warms up the interpreter's caches once instead of in every cell.
    rehearse(1 if is_for_one_cell else _WARM_UPS)
    _forget_ourselves()
    if not is_for_one_cell:
        for name in (*_FOR_PROGRAMS, *(_FOR_COMMANDS if "exec" in plan.groups else ())):
            importlib.import_module(name)
    _preload(plan.python_path, plan.preload, plan.devices)
    if has_skills:
        find_skills()
    if not (plan.preload or is_for_one_cell):
        _RandomOnImport.install()
    _renewing = (*_generators(), *_thread_pools(plan))
    _forget_nodes()
    _add_what_people_expect()
    threading.main_thread()._native_id = GUEST_ID  # type: ignore[attr-defined]  # set at start only
    _guest = Guest(control)


def _preload(path: tuple[str, ...], names: tuple[str, ...], devices: tuple[str, ...]) -> None:
    sys.path.extend(path)
    if not names:
        return
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
        if devices and (node := processes.open_device("self", devices)):
            why = f"it opens {node}, which a fork cannot share (is CUDA initialised?)"
            raise PreloadError(f"cannot preload {name}: {why}")
        if len(os.listdir("/proc/self/task")) > 1:  # a fork does not copy threads
            raise PreloadError(f"cannot preload {name}: it starts a thread")
    os.register_at_fork = register
    os.environ.update(environment)


def _add_what_people_expect() -> None:
    """Let programs import their own files, and define the names that the module site defines for
    python(1), and a notebook for its cells.

    /workspace comes last: for source that is no file, a file that another program left there never
    takes the place of a module of the standard library or of a package.
    """
    sys.path.append(WORKSPACE)
    sys.dont_write_bytecode = True  # imports would write __pycache__ beside the program
    for give_names in (site.setquit, site.setcopyright, site.sethelper):
        give_names()
    builtins.__dict__["display"] = display


def _flags_of_programs() -> Any:
    """Return sys.flags as python(1) has them without options.  Those of the launcher isolate it from
    its host; `multiprocessing` would start children with them, which then find no packages."""
    names = [*type(sys.flags).__match_args__]
    isolating = ("isolated", "ignore_environment", "no_site", "no_user_site", "safe_path")
    changed = dict.fromkeys(isolating, 0) | {"safe_path": False, "dont_write_bytecode": 1}
    values = {name: changed.get(name, getattr(sys.flags, name)) for name in names}
    made: Any = namedtuple("flags", names, module="sys")  # type: ignore[misc]
    for name in {*dir(sys.flags)} - {*dir(made)}:  # Python 3.14 has some that are not in the tuple
        setattr(made, name, getattr(sys.flags, name))
    return made(**values)


class PreloadError(Exception):
    """A module that the policy names cannot be imported ahead of the programs."""


def rehearse(times: int = 1) -> None:
    """Run programs that do nothing, each so many times, and leave no trace of them but memory that is
    this process's own: a page that a program is going to touch costs three microseconds then.

    Python counts the calls of a function until it has specialized its code. Further counts would be
    written in every cell, so here each function is called often enough.
    """
    before = sys.modules["__main__"]
    for program in _REHEARSALS * times:
        stage = _Stage(b"\0" + encode(program))
        run = receive(receiver_of(stage))
        if isinstance(run, RunProgram):
            _run(run, stage, fresh_main(), None)
    sys.modules["__main__"] = before
    linecache.cache.clear()


class _Stage:
    """A control channel that leads nowhere."""

    def __init__(self, packet: bytes) -> None:
        self._packet = packet

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        return self._packet[:size]

    def send(self, packet: bytes | bytearray) -> int:
        return len(packet)


class Guest:
    """The objects of a guest's process before its program comes. The launcher makes them, because
    Python code after the fork copies pages."""

    def __init__(self, control: int) -> None:
        """`control` is where the control channel will be, as the launcher has a socket too."""
        self.control = control
        # The C class: the enumerations of its Python face cost 70 pages (measured).
        self._sock = _socket.socket(fileno=control)
        self._receiver = receiver_of(self._sock)
        self._main = fresh_main()
        self._toolbox = Toolbox(self._sock, control, self._receiver)

    def run(self) -> int:
        """Run the one program that arrives, or all that do if it is the first of a session; return the
        exit code."""
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # as python(1) does
        run = receive(self._receiver)
        if isinstance(run, RunProgram) and not _other:
            for renew in _renewing:
                renew()
            if run.request:
                code = converse(run, self._receiver, self._sock, self._main, self._toolbox)
                return _leave(code, self._main)
            return _run(run, self._sock, self._main, self._toolbox if run.tools else None)
        if isinstance(run, Become):
            become_program(run, self.control)
        if run and _other:
            _other.become(run, self.control)
        return 1


def rehearsal() -> tuple[Callable[[], int], int, int]:
    """Return `work`, and the two ends of a control channel on which a program has come."""
    near, far = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    far.send(b"\0" + encode(_REHEARSALS[0]))
    return work(), near.detach(), far.detach()


def work() -> Callable[[], int]:
    """Return the function that a guest's process runs when its program has come; called after
    everything else was made."""
    freeze()
    return _guest.run


def freeze() -> None:
    """Exclude all objects made until now from garbage collection in guests, which would touch their
    pages, and so copy them (bpo-31558)."""
    gc.enable()
    gc.freeze()


def begin_new_pools() -> None:
    """Fill the free places among the launcher's objects, so that objects of a guest lie side by side in
    a few pages instead of one here and one there.

    Python allocates up to 512 bytes from pools of one size each (Objects/obmalloc.c). The first object
    of a new pool lies behind its header.
    """
    for size in range(_POOL_STEP, _MOST_IN_POOLS + 1, _POOL_STEP):
        for number in range(_MOST_FREE_PLACES):
            _fillers.append(each := _object_of(size, number))
            if id(each) % _POOL_BYTES < _POOL_HEADER_BYTES:
                break
        else:  # this Python has other pools, or none
            return
    # Have the interpreter's own caches there too, unless that would call functions for the end of a
    # process that preloaded modules have registered.
    if not (atexit._ncallbacks() or _has_threads()):
        rehearse()


def _object_of(size: int, number: int) -> object:
    if size == _POOL_STEP:
        return object()
    return bytes(size - b"".__sizeof__()) if size > 2 * _POOL_STEP else number + (1 << 20)


class _RandomOnImport:
    """Gives a program that imports `random` the module that the launcher has imported, seeded for this
    cell: most programs do not, and seeding copies 30 pages."""

    def __init__(self, random: types.ModuleType, spec: ModuleSpec) -> None:
        self._random, self._spec = random, spec

    @classmethod
    def install(cls) -> None:
        random = sys.modules.pop("random")
        if random.__spec__:
            sys.meta_path.insert(0, cls(random, random.__spec__))

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "random" else None  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> types.ModuleType:
        """Seed it here: a program that makes the module of a spec need not execute it."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._random.seed()
        return self._random

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> object:  # such as get_code, for runpy
        return getattr(self._spec.loader, name)


def _generators() -> Iterator[Callable[[], object]]:
    """Yield a function for each loaded random generator that seeds it: all cells of a launcher have
    copies of one state. `secrets` and uuid4 ask the kernel. Generators that detect a fork by a
    changed getpid() see a change in every cell (launcher/main.py), but a child of the program may
    have the launcher's pid."""
    if (
        random := sys.modules.get("random")
    ) and not _hooks:  # a registered function already seeds it
        yield random.seed
    if numpy_random := sys.modules.get("numpy.random"):
        yield numpy_random.seed
    if generator := getattr(sys.modules.get("torch"), "default_generator", None):
        yield generator.seed
    if openssl := sys.modules.get("_ssl"):
        yield partial(openssl.RAND_bytes, 1)
    if (tempfile := sys.modules.get("tempfile")) and tempfile._name_sequence:
        yield lambda: tempfile._name_sequence.rng  # the property makes a new generator after a fork


def _thread_pools(plan: Plan) -> Iterator[Callable[[], object]]:
    """Yield a function that gives torch as many threads as the cell has processors: it has read in the
    launcher that it may have one (OMP_NUM_THREADS in policies/compiling/runtimes.toml)."""
    resize = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if resize and "threads" in plan.groups and (count := processors(plan)) > 1:
        yield partial(resize, count)


def _forget_nodes() -> None:
    """Have uuid1 and getnode draw a node and a clock sequence in each cell: libuuid, which they would
    ask, keeps its own over a fork, and looks for network cards."""
    if uuid := sys.modules.get("uuid"):
        drawn = dict.fromkeys((name for name in vars(uuid) if name.startswith("_last_")), None)
        uuid.__dict__.update(
            drawn, _node=None, _generate_time_safe=None, _GETTERS=[uuid._random_getnode]
        )


def _run(run: RunProgram, sock: Channel, main: types.ModuleType, toolbox: Toolbox | None) -> int:
    itself = os.getpid()
    finished, code, file = _execute(run, main, toolbox)
    code = _leave(code, main)
    if os.getpid() == itself:  # not in a child that the program forked
        if file:
            file.remove()
        if toolbox:
            toolbox.close()
        report((finished, code), sock)
    return code


def _execute(
    run: RunProgram, main: types.ModuleType, toolbox: Toolbox | None
) -> tuple[Finished, int, ProgramFile | None]:
    filename = path_of(run) if run.filename else PROGRAM
    file = give(run, main, filename)
    if toolbox:
        toolbox.open(run, main)
    program = Source(run.code, Executor(), filename)
    finished, code = outcome(
        lambda: program.run(main.__dict__), run.value_bytes, run.picture_bytes, is_plain=run.plain
    )
    return finished, code, file


def _forget_ourselves() -> None:
    """Hide all modules that do not belong to the interpreter: cellwright's, and those that it needs."""
    stdlib = os.path.dirname(os.__file__) + os.sep
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if module is None or (file and not file.startswith(stdlib)):
            del sys.modules[name]
            if name.rpartition(".")[2] in _BELOW_PROGRAMS:
                _forget_place(module)


def _forget_place(module: types.ModuleType) -> None:
    """Name the module in place of its file in the frames below a program: tracebacks of the stack,
    faulthandler and pdb would print paths of the host, and look for their lines there."""
    found = [*vars(module).values()]
    for each in [each for each in found if isinstance(each, type)]:
        found += vars(each).values() if each.__module__ == module.__name__ else ()
    for each in found:
        code = getattr(each, "__code__", None)
        if code and code.co_filename == module.__file__:
            _imp._fix_co_filename(code, f"{NAMED}{module.__name__.partition('.')[2]}>")  # type: ignore[attr-defined]


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


def _let_go(main: types.ModuleType) -> None:
    """Have files that the program left open written, and finalizers called, as python(1) does at its
    end. Not while threads still run, because the program's names would vanish under them."""
    names = main.__dict__
    owned = [
        name for name, value in names.items()
        if not name.startswith("__") and type(value) not in _KEPT_FOR_FINALIZERS
    ]  # fmt: skip
    if not owned:
        return
    if not _thread._count():
        for name in owned:
            names[name] = None
    for each in gc.get_objects():  # a collection may close the file below a buffer first
        if type(each) in _BUFFERED and not each.closed:
            each.flush()
    if not _thread._count():
        gc.collect()


def _leave(code: int, main: types.ModuleType) -> int:
    """Do what python(1) does at its end: wait for threads, run atexit, let go of objects, flush."""
    try:
        if _has_threads():
            threading._shutdown()  # type: ignore[attr-defined]
        if atexit._ncallbacks():
            atexit._run_exitfuncs()
        _let_go(main)
        _flush()
    except BaseException:  # noqa: BLE001 - as python(1): 120 if the last flush fails
        return code or 120
    return code
