"""Servers in cells: each in its own, which shows it what its configuration names and nothing else."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from ...policies.errors import LaunchError
from ...policies.loading import load_policy
from ...policies.policy import Policy
from ..sandbox.sandbox import Sandbox
from .config import ServerConfig

PROFILE = "server"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_FETCHERS = ("npx", "uvx", "uv", "pipx", "bunx", "pnpm", "yarn", "docker", "podman")
_OF_A_BASE = ("bin", "lib", "lib64")
_MAX_MANIFEST_BYTES = 1024 * 1024
_ORDINARY, _NOBODY = 1000, 65534  # UID_MIN of login.defs(5); whoever is not mapped
_GRACE_SECONDS = 2.0  # to exit after its input ended


class CellProcess:
    """A server in a cell; it has the variables that it was given, a PATH and a HOME, and no others."""

    pid = 0  # its cell's own business
    errors = -1

    def __init__(self, config: ServerConfig, env: Mapping[str, str]) -> None:
        """Start it; raises LaunchError, PolicyError, Unenforceable."""
        command = _command(config, env)
        variables = {"PATH": _PATH, "HOME": "/workspace", **env}
        policy = policy_of(config, command)
        self._sandbox = Sandbox(policy=policy, pool=0, audit=False, user=_user_of(config))
        try:
            self._program = self._sandbox.program(
                [command, *config.args], env=variables, cwd=config.cwd or None
            )
        except BaseException:
            self._sandbox.close()
            raise
        self.stdin, self.stdout = self._program.stdin, self._program.stdout

    def said(self) -> str:
        """Return what it wrote to its standard error, once it has ended or a second later."""
        try:
            return self._program.wait(1).stderr
        except (TimeoutError, LaunchError):
            return self._program.stderr

    def close(self, *, patient: bool) -> None:
        """Kill it and whatever it started; before that, if patient, its input ends."""
        with self._sandbox, self._program:
            if patient:
                self._program.close_stdin()
                try:
                    self._program.wait(_GRACE_SECONDS)
                except (TimeoutError, LaunchError):
                    return


def policy_of(config: ServerConfig, command: str) -> Policy:
    """Return what the cell of a server may do: the profile, and what it is shown."""
    policy = load_policy(config.policy or PROFILE)
    filesystem, processes = policy.filesystem, policy.processes
    execute = (*processes.execute, *config.execute, *_needed_by(command, processes.execute))
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
    """Return whose id a server has on the host where root starts it: the owner of what it may write,
    if that is one ordinary user; else one that is the same at each start.  Otherwise a server could
    not open again what it wrote."""
    if os.geteuid():
        return None
    owners: set[int] = set()
    for path in config.write:
        with contextlib.suppress(OSError):  # one that does not exist is told when the cell is built
            owners.add(os.stat(path).st_uid)
    if len(owners) == 1 and (owner := owners.pop()) >= _ORDINARY and owner != _NOBODY:
        return owner
    return f"{config.name} {config.command}"


def _command(config: ServerConfig, env: Mapping[str, str]) -> str:
    if (program := os.path.basename(config.command)) in _FETCHERS:
        raise LaunchError(
            f"server {config.name}: {program} fetches what it runs, and cells have no network",
            "install the server and name its own program, or say sandboxed: false",
        )
    found = shutil.which(config.command, path=env.get("PATH", _PATH))
    if found is None:
        raise LaunchError(
            f"server {config.name}: there is no program {config.command!r}",
            "install it, or give its whole path as command",
        )
    command, real = os.path.abspath(found), os.path.realpath(found)
    return real if _package_of(real) else command  # Node looks for modules beside the real file


def _package_of(program: str) -> Path | None:
    """Return the npm package that names `program` as one of its programs, if one does."""
    folders = (each for each in Path(program).parents if (each / "package.json").is_file())
    nearest = next(folders, None)
    if nearest and Path(program) in _programs_of(nearest / "package.json"):
        return nearest
    return None


def _programs_of(manifest: Path) -> list[Path]:
    """Return the files that a package.json names as programs (`bin` in package.json(5))."""
    try:
        with open(manifest, "rb") as file:
            given = json.loads(file.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    named = given.get("bin") if isinstance(given, dict) else None
    paths = named.values() if isinstance(named, dict) else [named]
    return [(manifest.parent / each).resolve() for each in paths if isinstance(each, str)]


def _needed_by(command: str, shown: tuple[str, ...]) -> tuple[str, ...]:
    """Return what has to be executable for `command` to be: its virtual environment, with the Python
    that this was made from, or its npm package with those that it may use, or itself."""
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
    """Return where the Python that an environment was made from has its programs and libraries.

    The folder around them is not shown: it may be /, or somebody's home with all that is in it.
    """
    home = _home_of(environment)
    programs = {home, home.resolve(), (environment / "bin" / "python").resolve().parent}
    places = [each.parent / name for each in programs if each.name == "bin" for name in _OF_A_BASE]
    return tuple(sorted(str(each) for each in places if _has_to_be_shown(each, environment)))


def _has_to_be_shown(place: Path, environment: Path) -> bool:
    """Tell whether a cell that sees an environment, and the host's own programs, lacks a folder."""
    real = place.resolve()
    seen = any(real.is_relative_to(each) for each in ("/usr", environment.resolve()))
    return place.is_absolute() and place.is_dir() and not seen


def _home_of(environment: Path) -> Path:
    """Return where the Python lies that an environment was made from (PEP 405)."""
    for line in (environment / "pyvenv.cfg").read_text().splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            return Path(value.strip())
    return environment / "bin"


def _together(*paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for each in paths for path in each))
