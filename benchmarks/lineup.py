"""The lineup of the comparison: every peer, and its isolation from the machine."""

import shutil
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ..harness.sandbox.sandbox import Sandbox
from ..harness.version import installed_version
from ..runner.host.runtime import find_runtime
from ..runner.launching.spawn import interpreter
from ..runner.settings import PoolSettings
from . import commandlines, libraries
from .libraries import Library
from .peer_base import AbsentError, Command, Isolation, Peer, check_output, version_of
from .programs import SampleProgram
from .settings import Settings, sandbox

READY, ON_DEMAND = "cellwright, a cell stood ready", "cellwright, made on demand"
BUBBLEWRAP = "bwrap --unshare-all python3 -I -S"
_HOST, _CPYTHON = "the host's", "CPython"
_NONE = Isolation("process", "none", "none", "all", "all", "none", _HOST, _CPYTHON)
_CELL = Isolation(
    "process, all namespaces", "pid, mount, net, ipc, uts, user, cgroup", "what is allowed",
    "interpreter's; Landlock too", "none", "memory, CPU, processes, time, output", _HOST, _CPYTHON,
)  # fmt: skip
_CONTAINER = Isolation(
    "process, its namespaces", "pid, mount, net, ipc, uts", "none", "/usr, interpreter's", "none",
    "memory, processes", _HOST, _CPYTHON,
)  # fmt: skip
_IN_PROCESS = Isolation(
    "globals", "none", "none", "by checks in Python", "by checks in Python", "none", _HOST,
    "CPython, a subset",
)  # fmt: skip


class Ours:
    """Our own cells, as a peer."""

    def __init__(self, name: str, settings: Settings, pool: int) -> None:
        self.name = name
        self.isolation = _CELL
        self._stack = ExitStack()
        self._sandbox: Sandbox | None = None
        self._settings = settings
        self._pool = pool

    def find(self, place: Path) -> str:
        self._sandbox = self._stack.enter_context(sandbox(self._settings, self._pool))
        return installed_version()

    def run(self, program: SampleProgram) -> float:
        assert self._sandbox is not None
        self._sandbox.settle()
        began = time.perf_counter()
        result = self._sandbox.execute(program.printing)
        seconds = time.perf_counter() - began
        check_output(program, result.stdout)
        if result.pool_hit != (self._pool > 0):
            raise RuntimeError("no cell stood ready")
        return seconds

    def close(self) -> None:
        self._stack.close()


def every_peer(settings: Settings) -> list[Peer]:
    """Return all that we know of, found or not."""
    return [
        Ours(READY, settings, PoolSettings().size),
        Ours(ON_DEMAND, settings, 0),
        *_interpreters(),
        *_containers(),
        *_elsewhere(settings.peers),
    ]


def _interpreters() -> list[Peer]:
    of_this = partial(str, ".".join(map(str, sys.version_info[:3])))
    return [
        Command(f"python3 {' '.join(flags)}", _NONE, partial(_bare, flags), of_this)
        for flags in (("-I", "-S"), ("-I",))
    ]


def _bare(flags: tuple[str, ...], place: Path, program: SampleProgram) -> list[str]:
    return commandlines.bare(*flags, "-c", program.printing)


def _bubblewrap(place: Path, program: SampleProgram) -> list[str]:
    line = commandlines.bubblewrap("-I", "-S", "-c", program.printing)
    if line is None:
        raise AbsentError("bwrap is not installed")
    return line


def _containers() -> list[Peer]:
    namespaces = "pid, mount, net, ipc, uts, user, cgroup"
    bwrap = _CONTAINER._replace(namespaces=namespaces, caps="none")
    jail = bwrap._replace(
        namespaces="pid, mount, net", filter="what is refused", files="all, read-only"
    )
    nspawn = _CONTAINER._replace(filter="what is refused", caps="none")
    podman = _CONTAINER._replace(filter="what is allowed", caps="processes")
    gone = commandlines.remove_cgroups
    return [
        Command(BUBBLEWRAP, bwrap, _bubblewrap, version_of("bwrap", "--version")),
        Command("firejail", jail, commandlines.firejail, version_of("firejail", "--version")),
        Command("runc", _CONTAINER, commandlines.runc, version_of("runc", "--version"), gone),
        Command("crun", _CONTAINER, commandlines.crun, version_of("crun", "--version"), gone),
        Command("podman", podman, commandlines.podman, version_of("podman", "--version"), gone),
        Command(
            "systemd-nspawn", nspawn, commandlines.nspawn, version_of("systemd-nspawn", "--version")
        ),
    ]


def shown_to_peers() -> tuple[str, ...]:
    """Return the paths of the host that the interpreter needs."""
    runtime = find_runtime(interpreter())
    merged = (path for path, _ in commandlines.top_links(runtime))  # their loader is in /lib64
    return (*merged, *commandlines.shown_paths(runtime))


def _elsewhere(peers: Path | None) -> list[Peer]:
    """Return what peers-setup installs."""
    where = (
        f"it is not in {peers}" if peers else "without --peers; benchmarks/peers-setup installs it"
    )
    monty = _IN_PROCESS._replace(
        fresh="session", files="none", network="none", python="a subset, written in Rust"
    )
    wasm = Isolation(
        "globals", "none", "none", "its own, in memory", "as node has it", "none",
        "the host's, behind WebAssembly", _CPYTHON,
    )  # fmt: skip
    given = (find_runtime(interpreter()).executable, *shown_to_peers())
    through_bwrap, through_nsjail = ("bubblewrap", *given), ("nsjail", *given)
    local = _CONTAINER._replace(
        namespaces="pid, mount, net, ipc, uts, user, cgroup", filter="what is refused", caps="none"
    )
    landlock = Isolation(
        "process", "none", "what is refused", "/usr, interpreter's, by Landlock", "none",
        "memory, processes", _HOST, _CPYTHON,
    )  # fmt: skip
    scripts: tuple[tuple[str, Isolation, str, str, tuple[str, ...]], ...] = (
        ("llm-sandbox, bubblewrap", local, "llm_sandbox", libraries.LLM_SANDBOX, through_bwrap),
        ("llm-sandbox, nsjail", local, "llm_sandbox", libraries.LLM_SANDBOX, through_nsjail),
        ("sandlock", landlock, "sandlock", libraries.SANDLOCK, given),
        ("pydantic-monty", monty, "pydantic_monty", libraries.MONTY, ()),
        ("RestrictedPython", _IN_PROCESS, "RestrictedPython", libraries.RESTRICTED, ()),
        ("smolagents, local executor", _IN_PROCESS, "smolagents", libraries.SMOLAGENTS, ()),
    )
    return [
        _sandbox_runtime(peers, where),
        *(
            Library(name, kept, libraries.python_worker(peers, package, script, *arguments), where)
            for name, kept, package, script, arguments in scripts
        ),
        Library("Pyodide under node", wasm, libraries.node_worker(peers), where),
    ]


def _sandbox_runtime(peers: Path | None, where: str) -> Peer:
    kept = Isolation(
        "process, its namespaces", "pid, mount, net", "Unix sockets", "all, read-only",
        "none, by a proxy", "none", _HOST, _CPYTHON,
    )  # fmt: skip
    cli = (peers or Path()) / "js/node_modules/@anthropic-ai/sandbox-runtime/dist/cli.js"

    def find() -> str:
        if not peers or not cli.is_file() or not shutil.which("node"):
            raise AbsentError(where)
        return version_of("node", str(cli), "--version")()

    line = partial(commandlines.sandbox_runtime, cli.absolute())
    return Command("@anthropic-ai/sandbox-runtime", kept, line, find)
