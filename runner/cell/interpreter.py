"""The guest's process: receive one program, run it as `__main__`, say what it came to, exit.

Everything before `outcome` is ours and runs behind every layer already; from there on nothing in
this process can be trusted, least of all the Finished frame it sends.
"""

import _signal  # type: ignore[import-not-found]  # has no stub
import _sitebuiltins
import _socket
import atexit
import builtins
import gc
import importlib
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec

from ...policies.plan import Plan
from ..channel import Channel
from ..messages import Become, Finished, RunProgram, encode
from .evaluation import Executor, Source, lines_of, outcome
from .exchange import PROGRAM, WORKSPACE, ProgramFile, give, receive, receiver_of, report
from .pictures import display
from .programs import Interpreter, become_program
from .repl import converse
from .skills import install as find_skills
from .tools import Toolbox

# While modules are preloaded there is no /tmp to write to.
_WRITTEN_TO = {"TMPDIR", "MPLCONFIGDIR"}
_SOURCE = "/tmp/cell.py"  # noqa: S108 - the cell's own
_FOR_PROGRAMS = ("random", "socket")  # what many import, of which nothing here needs any
_REHEARSALS = (
    RunProgram("1 + 1", b"{}", (), {}, 100),
    RunProgram("x = [1]\nfor y in x:\n    print(end='')\nx + [y]", b"{}", (), {}, 100),
)


_guest: "Guest"
GUEST_ID = 2  # of each guest's process in its pid namespace, after init

_other: Interpreter | None = None  # where the plan is for another language
_hooks: list[object] = []  # that preloaded modules registered, to be called after a fork
_reseeding: tuple[Callable[[], object], ...] = ()  # of the generators that preloaded modules loaded


def has_hooks() -> bool:
    """Tell whether a preloaded module registered functions that a fork has to call."""
    return bool(_hooks)


def prepare(
    plan: Plan, control: int, *, has_skills: bool = False, is_for_one_cell: bool = False
) -> None:
    """Do in the launcher, once, what every guest would have to do: what a cell need not touch, it
    need not copy.  Afterwards nothing can be imported from cellwright any more.  `control` is where
    a guest has its control channel; `has_skills` says that there are files below /skills.  What is
    `is_for_one_cell` imports nothing that its program may not need.

    Raises ImportError if a module that the plan preloads cannot be.
    """
    global _other, _reseeding, _guest  # noqa: PLW0603 - set once, before any fork
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
    if not is_for_one_cell:
        for name in _FOR_PROGRAMS:
            importlib.import_module(name)
    _preload(plan.python_path, plan.preload)
    if has_skills:
        find_skills()
    if not (plan.preload or is_for_one_cell):
        _RandomOnImport.install()
    _reseeding = tuple(_generators())
    _forget_nodes()
    _add_what_people_expect()
    threading.main_thread()._native_id = GUEST_ID  # type: ignore[attr-defined]  # set at start only
    _guest = Guest(control)


def _preload(path: tuple[str, ...], names: tuple[str, ...]) -> None:
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
            report(_execute(run, fresh_main(), Toolbox(stage, 0, receiver))[:2], stage)
        _flush()
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
    """What a guest's process has before its program comes, made in the launcher: whatever Python does
    after the fork copies pages."""

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
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # as python(1) has it
        run = receive(self._receiver)
        if isinstance(run, RunProgram) and not _other:
            for reseed in _reseeding:
                reseed()
            if run.request:
                return _leave(converse(run, self._receiver, self._sock, self._main, self._toolbox))
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
    """Return what a guest's process does when its program has come, after all else was made."""
    freeze()
    return _guest.run


def freeze() -> None:
    """Keep what was made until now out of the collections in guests, which would look at it, and so
    copy it (bpo-31558)."""
    gc.enable()
    gc.freeze()


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
    """Yield what seeds each random generator that is loaded, of which all cells of a launcher have a
    copy.  `secrets` and uuid4 ask the kernel; what notices a fork by another getpid() finds one
    (launcher/main.py), but a child of the program may have the launcher's number."""
    if (random := sys.modules.get("random")) and not _hooks:  # one of them seeds it
        yield random.seed
    if numpy_random := sys.modules.get("numpy.random"):
        yield numpy_random.seed
    if openssl := sys.modules.get("_ssl"):
        yield partial(openssl.RAND_bytes, 1)
    if (tempfile := sys.modules.get("tempfile")) and tempfile._name_sequence:
        yield lambda: tempfile._name_sequence.rng  # a property that makes another generator


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
    code = _leave(code)
    if os.getpid() == itself:  # not a child that the program forked, and that came to its end
        if file:
            file.remove()
        if toolbox:
            toolbox.close()
        report((finished, code), sock)
    return code


def _execute(
    run: RunProgram, main: types.ModuleType, toolbox: Toolbox | None
) -> tuple[Finished, int, ProgramFile | None]:
    filename = run.filename or PROGRAM
    file = give(run, main, filename)
    if toolbox:
        toolbox.open(run, main)
    program = Source(run.code, Executor(), filename)
    finished, code = outcome(
        lambda: program.run(main.__dict__), run.value_bytes, run.picture_bytes, is_plain=run.plain
    )
    return finished, code, file


class _Main(types.ModuleType):
    """The module as which programs run.  A program that is no file becomes one outside /workspace when
    something asks for its path, as `multiprocessing` does: a child that is spawned runs it again."""

    def __getattr__(self, name: str) -> str:
        lines = linecache.getlines(PROGRAM) if name == "__file__" else []
        if not lines:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        with open(_SOURCE, "w", encoding="utf-8") as file:
            file.writelines(lines)
        return _SOURCE


def fresh_main() -> types.ModuleType:
    """Make the module as which programs run, the only one of that name that they see."""
    main = _Main("__main__")
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
