"""Server processes: their interface, and servers that run on the host.

Servers in cells: each in a cell that shows only the paths of its configuration.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from ...policies.errors import LaunchError
from ...policies.policy import Policy
from ...policies.profiles.loading import load_policy
from ..sandbox.sandbox import Sandbox
from ..sandbox.sandbox_arguments import HostSettings
from .server_config import ServerConfig

_INHERITED = (
    "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG",
    "CELLWRIGHT_CGROUP_ROOT",  # without which `cellwright mcp` cannot make cells
)  # fmt: skip
_GRACE_SECONDS = 2.0  # to exit after its stdin is closed, and again after SIGTERM


class ServerProcess(Protocol):
    """A started server.  `stdin`, `stdout` and `stderr` are descriptors; `stderr` is -1 if there is
    none to read, and `read_stderr` returns it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> int: ...
    @property
    def stdout(self) -> int: ...
    @property
    def stderr(self) -> int: ...
    def read_stderr(self) -> str:
        """Return its standard error if `stderr` is -1; may wait a second."""

    def close(self, *, patient: bool) -> None:
        """End it and its children; a `patient` close first gives it some seconds to end by itself."""


class HostProcess:
    """A server that runs on the host as our user, unconfined.

    It has a session of its own, so that Ctrl-C in a terminal does not reach it.  It inherits only the
    few variables that every program needs.
    """

    def __init__(self, config: ServerConfig, env: Mapping[str, str]) -> None:
        """Start it; raises LaunchError.  The kernel kills it when the thread that calls this ends
        (pdeathsig of prctl(2))."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= env
        command = shutil.which(config.command, path=environment.get("PATH"))
        if command is None:
            raise LaunchError(
                f"server {config.name}: command: program {config.command!r} not found",
                "install it, or use its absolute path",
            )
        try:
            self._process = subprocess.Popen(
                (*_parent_death_prefix(), command, *config.args),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment, cwd=config.cwd or None, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"server {config.name}: {error.strerror}: {error.filename}") from None
        self.pid = self._process.pid
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self.stderr = (each.fileno() for each in streams if each)

    def read_stderr(self) -> str:
        return ""

    def close(self, *, patient: bool) -> None:
        """Kill its session; a `patient` close first closes its stdin, then sends SIGTERM."""
        with self._process:  # closes the pipes and reaps it
            if self._process.stdin:
                self._process.stdin.close()
            pidfd = os.pidfd_open(self.pid)
            try:
                if patient and not _ended(pidfd):
                    self._signal(signal.SIGTERM)
                    _ended(pidfd)
                self._signal(
                    signal.SIGKILL
                )  # not reaped yet, so the pid still belongs to this process
            finally:
                os.close(pidfd)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def launch_server(config: ServerConfig, env: Mapping[str, str]) -> ServerProcess:
    """Start a server, in a cell by default; raises LaunchError, and Unenforceable where this host
    cannot build the cell."""
    if not config.sandboxed:
        return HostProcess(config, env)

    return CellProcess(config, env)


def _parent_death_prefix() -> tuple[str, ...]:
    """Return a command prefix that has the kernel kill the program when we are killed; empty without
    setpriv(1)."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(_GRACE_SECONDS * 1000))


PROFILE = "server"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_FETCHERS = ("npx", "uvx", "uv", "pipx", "bunx", "pnpm", "yarn", "docker", "podman")
_OF_A_BASE = ("bin", "lib", "lib64")
_MAX_MANIFEST_BYTES = 1024 * 1024
_ORDINARY, _NOBODY = 1000, 65534  # UID_MIN of login.defs(5), and the id of unmapped users


class CellProcess:
    """A server in a cell.  Its environment is PATH, HOME and the configured variables."""

    pid = 0  # the process has a pid only in its cell
    stderr = -1

    def __init__(self, config: ServerConfig, env: Mapping[str, str]) -> None:
        """Start it; raises LaunchError, PolicyError, Unenforceable."""
        command = _command(config, env)
        variables = {"PATH": _PATH, "HOME": "/workspace", **env}
        policy = policy_of(config, command)
        self._sandbox = Sandbox(
            policy=policy, pool=0, audit=False, host=HostSettings(user=_user_of(config))
        )
        try:
            self._program = self._sandbox.program(
                [command, *config.args], env=variables, cwd=config.cwd or None
            )
        except BaseException:
            self._sandbox.close()
            raise
        self.stdin, self.stdout = self._program.stdin, self._program.stdout

    def read_stderr(self) -> str:
        """Return its standard error, after waiting up to a second for its end."""
        try:
            return self._program.wait(1).stderr
        except (TimeoutError, LaunchError):
            return self._program.stderr

    def close(self, *, patient: bool) -> None:
        """Kill it and its children; a `patient` close first closes its stdin and waits two seconds."""
        with self._sandbox, self._program:
            if patient:
                self._program.close_stdin()
                try:
                    self._program.wait(_GRACE_SECONDS)
                except (TimeoutError, LaunchError):
                    return


def policy_of(config: ServerConfig, command: str) -> Policy:
    """Return the policy of a server's cell: its profile and the configured paths."""
    policy = load_policy(config.policy or PROFILE)
    filesystem, processes = policy.filesystem, policy.processes
    execute = (*processes.execute, *config.execute, *_paths_needed_by(command, processes.execute))
    return replace(
        policy,
        name=f"{policy.name} for {config.name}",
        filesystem=replace(
            filesystem,
            read=_together(filesystem.read, config.read),
            write=_together(filesystem.write, config.write),
        ),
        processes=replace(processes, execute=_together(execute)),
    )


def _user_of(config: ServerConfig) -> int | str | None:
    """Return the host user of a server that root starts: the owner of its writable paths if that is one
    ordinary user, else a name that gives the same id at each start.  With another id at each start a
    server could not reopen its own files."""
    if os.geteuid():
        return None
    owners: set[int] = set()
    for path in config.write:
        with contextlib.suppress(OSError):  # a missing path is reported when the cell is built
            owners.add(os.stat(path).st_uid)
    if len(owners) == 1 and (owner := owners.pop()) >= _ORDINARY and owner != _NOBODY:
        return owner
    return f"{config.name} {config.command}"


def _command(config: ServerConfig, env: Mapping[str, str]) -> str:
    if (program := os.path.basename(config.command)) in _FETCHERS:
        raise LaunchError(
            f"server {config.name}: {program} downloads what it runs, and cells have no network",
            "install the server and set command to its own program, or set sandboxed: false",
        )
    found = shutil.which(config.command, path=env.get("PATH", _PATH))
    if found is None:
        raise LaunchError(
            f"server {config.name}: command: program {config.command!r} not found",
            "install it, or use its absolute path",
        )
    command, real = os.path.abspath(found), os.path.realpath(found)
    return real if _package_of(real) else command  # Node looks for modules beside the real file


def _package_of(program: str) -> Path | None:
    folders = (each for each in Path(program).parents if (each / "package.json").is_file())
    nearest = next(folders, None)
    if nearest and Path(program) in _programs_of(nearest / "package.json"):
        return nearest
    return None


def _programs_of(manifest: Path) -> list[Path]:
    try:
        with open(manifest, "rb") as file:
            given = json.loads(file.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    named = given.get("bin") if isinstance(given, dict) else None
    paths = named.values() if isinstance(named, dict) else [named]
    return [(manifest.parent / each).resolve() for each in paths if isinstance(each, str)]


def _paths_needed_by(command: str, shown: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths that `command` needs to run: its virtual environment with that environment's
    base Python, or the node_modules around it, or its npm package, or the file itself."""
    if any(Path(command).is_relative_to(each) for each in shown):
        return ()
    if around := [each for each in Path(command).parents if each.name == "node_modules"]:
        return (str(around[-1]),)
    if package := _package_of(command):
        return (str(package),)
    environment = Path(command).parent.parent
    if not (environment / "pyvenv.cfg").is_file():
        return (command,)
    return (str(environment), *_base_of(environment))


def _base_of(environment: Path) -> tuple[str, ...]:
    """Return the bin and lib directories of a virtual environment's base Python.

    Their parent directory is not shown: it may be / or a home directory with all its files.
    """
    home = _home_of(environment)
    programs = {home, home.resolve(), (environment / "bin" / "python").resolve().parent}
    places = [each.parent / name for each in programs if each.name == "bin" for name in _OF_A_BASE]
    return tuple(sorted(str(each) for each in places if _is_missing(each, environment)))


def _is_missing(place: Path, environment: Path) -> bool:
    """Tell whether `place` exists and is neither below /usr nor in the environment: a cell shows
    these."""
    real = place.resolve()
    seen = any(real.is_relative_to(each) for each in ("/usr", environment.resolve()))
    return place.is_absolute() and place.is_dir() and not seen


def _home_of(environment: Path) -> Path:
    """Return the directory of an environment's base Python (`home` of PEP 405)."""
    for line in (environment / "pyvenv.cfg").read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip())
    return environment / "bin"


def _together(*paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for each in paths for path in each))
