"""OCI runtimes: which one a name means, whose kernel its containers have, and its command line.

A runtime is a program with the commands create, start and delete (runtime-spec, "runtime.md").  It is
started for each command and has no daemon.
"""

import _signal  # type: ignore[import-not-found] # without the enums of `signal`
import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from ...policies.compiling.host import Kernel
from ...policies.errors import LaunchError, PolicyError, Unavailable
from ..channel import has_news

KERNELS: dict[str, Kernel] = {
    "runc": "shared", "crun": "shared", "youki": "shared",
    "runsc": "gvisor", "krun": "vm", "kata-runtime": "vm",
}  # fmt: skip
_DEFAULTS = ("crun", "runc", "youki")
ENGINES = ("podman", "docker", "nerdctl")
_PLACES = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
# crun refuses a host with v2 controllers beside v1 (src/libcrun/cgroup-utils.c)
_UNIFIED = "/sys/fs/cgroup/unified/cgroup.controllers"
_VERSION = re.compile(r"^(\S+) version (?:release-)?v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", re.MULTILINE)
_KEPT_VARIABLES = (
    "HOME",
    "XDG_RUNTIME_DIR",
)  # rootless runtimes look for their directory in these variables
_SECONDS = 30.0  # time of one command
_ASK_SECONDS = 10.0
_MOST_SAID = 4096
_SOCKET = 3  # the first descriptor that --preserve-fds keeps
_MESSAGE = re.compile(r'\bmsg="((?:[^"\\]|\\.)*)"')  # the message in a line of runc's log
# Versions before which a runtime has a hole that a container can use (their release notes).  A
# distribution may have repaired an older version.
_REPAIRED: dict[str, tuple[tuple[tuple[int, int, int], str], ...]] = {
    "runc": (
        ((1, 1, 12), "CVE-2024-21626"),
        ((1, 2, 8), "CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881"),
    ),
    "crun": (((1, 4, 4), "CVE-2022-27650"),),
    "krun": (((1, 20, 0), "CVE-2025-24965"),),
    "youki": (((0, 5, 7), "CVE-2025-62161 and CVE-2025-62596"),),
}  # fmt: skip


class OciRuntime(NamedTuple):
    """A runtime of this host: the path of its program, its kind, and its version."""

    program: str
    name: str
    version: tuple[int, int, int]

    @property
    def kernel(self) -> Kernel:
        """Whose kernel its containers have."""
        return KERNELS[self.name]

    @property
    def holes(self) -> str:
        """The known holes of this version, in words; empty if there are none."""
        found = [each for repaired, each in _REPAIRED.get(self.name, ()) if self.version < repaired]
        return ", ".join(found)

    @property
    def repair(self) -> str:
        """A hint for a host where this runtime fails."""
        other = next((each for each in installed_runtimes() if each != self.name), "")
        if not other:
            return "install another runtime, and name it with --runtime"
        return (
            f'name another runtime: --runtime {other}, in Python runtime="{other}"; '
            '"cellwright doctor" tries each'
        )

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"

    def command(self, state: str, *arguments: str) -> list[str]:
        """Return a command line that keeps the runtime's own state in the directory `state`."""
        options: list[str] = []
        if self.name == "crun" or (self.name == "krun" and os.geteuid()):
            options = ["--cgroup-manager=disabled"]  # cellwright caps the cells
        elif self.name == "runsc":
            options = ["--network=none"]  # gVisor's own loopback
            options += ["--rootless", "--ignore-cgroups"] if os.geteuid() else []
        return [self.program, *options, "--root", state, *arguments]

    def call(self, command: Sequence[str], sock: int = -1, stderr: int = -1) -> None:
        """Carry out a `command`; the container that it makes has `sock` as descriptor 3.

        `stderr`: a memfd for messages of the runtime and the container. Raises LaunchError if the
        runtime fails or does not end in time.
        """
        said = os.dup(stderr) if stderr >= 0 else os.memfd_create("oci", os.MFD_CLOEXEC)
        try:
            before = os.lseek(said, 0, os.SEEK_END)
            try:
                code = _run(list(command), sock, said, _SECONDS)
            except LaunchError as error:
                raise LaunchError(error.what, self.repair) from None
            if code:
                how = f"exit status {code}" if code > 0 else f"signal {-code}"
                raise LaunchError(
                    f"{self.name} failed at {_verb(command)} ({how}): {last_output(said, before)}",
                    self.repair,
                )
        finally:
            os.close(said)


def installed_runtimes() -> list[str]:
    """Return the names of the runtimes of this host, without those that its cgroups rule out, the
    default first."""
    names = dict.fromkeys((*_DEFAULTS, *KERNELS))
    return [each for each in names if shutil.which(each, path=_PLACES) and not _is_ruled_out(each)]


def default_runtime() -> str:
    """Return the runtime of a caller that names none: the first of crun, runc and youki that is
    installed and that does not refuse this host's cgroups, else crun."""
    return next((each for each in installed_runtimes() if each in _DEFAULTS), _DEFAULTS[0])


def _is_ruled_out(name: str) -> bool:
    if name not in ("crun", "krun"):
        return False
    with contextlib.suppress(OSError), open(_UNIFIED) as file:
        return bool(file.read().strip())
    return False


def find_oci_runtime(named: object) -> OciRuntime:
    """Return the runtime that has this name or path.

    Raises PolicyError for an invalid name or path, Unavailable if the host lacks the runtime or its
    kind is unknown.
    """
    if not isinstance(named, str | os.PathLike) or not (wanted := os.fspath(named)):
        known = ", ".join(KERNELS)
        raise PolicyError(
            f"runtime: must be an OCI runtime ({known}) or its path, got {named!r}",
            'HostSettings(backend="oci", runtime="crun")',
        )
    if "/" in wanted:
        program: str | None = os.path.abspath(wanted)
    elif wanted in KERNELS:
        program = shutil.which(wanted, path=_PLACES)
    elif wanted in ENGINES:
        raise PolicyError(
            f"runtime: {wanted} is a container engine, not an OCI runtime",
            "name the runtime that it uses, such as crun; or use ContainerIsolation",
        )
    else:
        raise PolicyError(
            f"runtime: must be one of {', '.join(KERNELS)}, or a path, got {wanted!r}"
        )
    if program is None or not os.access(program, os.X_OK):
        raise Unavailable(
            f"runtime: {wanted} is not installed", f"install {wanted}, or name another"
        )
    said = _version(program)
    found = _VERSION.search(said)
    if found is None or (name := _name(program, found[1])) not in KERNELS:
        raise Unavailable(
            f"runtime: {program} is no OCI runtime that is known: {said.strip()[:200]!r}",
            f"name one of {', '.join(KERNELS)}",
        )
    first, second, third = (int(part or 0) for part in found.groups()[1:])
    return OciRuntime(program, name, (first, second, third))


def _name(program: str, said: str) -> str:
    """krun is crun under another name, and calls itself crun (crun(1))."""
    called = os.path.basename(program)
    return called if called == "krun" else said


def _version(program: str) -> str:
    said = os.memfd_create("version", os.MFD_CLOEXEC)
    try:
        code = _run([program, "--version"], -1, said, _ASK_SECONDS, stdout=said)
        words = os.pread(said, _MOST_SAID, 0).decode("utf-8", "replace")
        last = last_output(said)
    finally:
        os.close(said)
    if code:
        raise Unavailable(f"runtime: {program} --version failed: {last}")
    return words


def spawn_runtime(
    command: list[str], stderr: int, *, sock: int = -1, stdout: int | None = None
) -> int:
    """Start a command in a session of its own, with no standard input; return its pid."""
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0 if stdout is None else stdout, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    if sock >= 0:
        actions.append((os.POSIX_SPAWN_DUP2, sock, _SOCKET))
    catchable = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
    try:
        return os.posix_spawn(
            command[0], command, _environment(),
            file_actions=actions, setsid=True, setsigmask=[], setsigdef=catchable,
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from None


def _run(
    command: list[str], sock: int, stderr: int, seconds: float, stdout: int | None = None
) -> int:
    """Run a command and return its exit status, -N for signal N."""
    pid = spawn_runtime(command, stderr, sock=sock, stdout=stdout)
    if _ends(pid, seconds):
        return _status(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, _signal.SIGKILL)  # the runtime and its children
    _status(pid)
    raise LaunchError(
        f"{os.path.basename(command[0])} did not end within {seconds:g} s at {_verb(command)}"
    )


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {"PATH": _PLACES} | kept


def _ends(pid: int, seconds: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:  # the embedding process reaps everything
        return True
    try:
        return has_news(pidfd, seconds)
    finally:
        os.close(pidfd)


def _status(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the embedding process reaped it; the steps below show the outcome
        return 0


def _verb(command: Sequence[str]) -> str:
    return next((each for each in command if each in ("create", "start", "delete")), command[-1])


def last_output(stderr: int, start: int = 0) -> str:
    """Return the last line that a runtime wrote to a memfd, from `start` on, in its own words."""
    said = os.pread(stderr, _MOST_SAID, start).decode("utf-8", "replace")
    lines = [line for line in said.strip().splitlines() if line.strip()]
    if not lines:
        return "no message"
    found = _MESSAGE.search(lines[-1])
    return (found[1].replace('\\"', '"') if found else lines[-1])[:500]
