"""Starts a launcher process, and does nothing else.

This module avoids imports, so that a command can start a launcher first; the launcher and the
command then import what they need at the same time.
"""

import _signal  # type: ignore[import-not-found] # without the enums of `signal`
import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec

    from ...policies.closing import Closing
    from ...policies.compiling.host import Kernel
    from ...policies.errors import LaunchError
    from ...policies.plan import Plan
    from ...policies.policy import Policy
    from ..host.interpreters import HostInterpreter
    from ..host.runtime import Runtime

# Started with -c, so that /proc/PID/cmdline, which a cell's processes inherit, has no path of
# cellwright. Without garbage collection imports are a tenth faster.
_BOOTSTRAP = (
    "import gc,os,sys;"
    "gc.disable();"
    "paths=os.read(3,65536).decode().split('\\0');"
    "sys.path[:0]=paths;"
    "import cellwright.runner.lean_msgspec;"
    "from {} import {} as main;"
    "gc.enable();"
    "main(len(paths))"
)
_LAUNCHER = "cellwright.runner.launcher.main"  # a module, perhaps with `:function`
_PACKAGES = ("cellwright", "msgspec", "prctl")
_OPTIONAL = "prctl"  # without it the launcher makes the same system calls


class Spawned:
    """A launcher process that imports, and then waits for its Boot frame."""

    groups: "tuple[str, ...]" = ()  # groups of system calls that its cells need
    in_container = False  # True if `start` starts it in a container, once the policy is known

    def __init__(
        self, executable: str, module: str = _LAUNCHER, packages: "Sequence[str]" = (), *,
        has_fixed_addresses: bool = False, then: "Sequence[bytes]" = (),
    ) -> None:  # fmt: skip
        """Start `executable` with `main` of `module`; raises LaunchError if it cannot be executed or a
        package of it is missing.

        `packages`: the directories that an interpreter of another version has for msgspec, and for
        prctl where it is installed.
        `has_fixed_addresses`: do without a random address layout, and so do its cells.
        `then`: packets for `main` that come before the Boot frame.
        """
        self.executable = executable
        self._packages = tuple(packages)
        self.has_fixed_addresses = has_fixed_addresses
        self.launch: Closing | None = None  # a `Launch` that was begun ahead (launch.py)
        try:
            self.stderr = os.memfd_create("launcher-stderr", os.MFD_CLOEXEC)
        except OSError as error:
            raise _cannot_start(executable, error) from None
        try:
            ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        except OSError as error:
            os.close(self.stderr)
            raise _cannot_start(executable, error) from None
        try:
            spawn = _spawn_with_fixed_addresses if has_fixed_addresses else _spawn
            self.keeper = spawn(executable, module, theirs.fileno(), self.stderr)
        except OSError as error:
            os.close(self.stderr)
            ours.close()
            raise _cannot_start(executable, error) from None
        finally:
            theirs.close()
        self.socket = ours.detach()
        try:
            for packet in ("\0".join(import_paths(self._packages)).encode(), *then):
                os.write(self.socket, packet)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended; Launcher.boot reports why
        except BaseException:
            self.close()
            raise

    def again(self) -> "Spawned":
        """Start another launcher in the same way."""
        return Spawned(
            self.executable, packages=self._packages, has_fixed_addresses=self.has_fixed_addresses
        )

    @property
    def kernel(self) -> "Kernel":
        """Whose kernel its cells have."""
        return "shared"

    @property
    def shows_programs_of_the_host(self) -> bool:
        """Tell whether cells may see the host's programs: in an image they have those of the image."""
        return True

    def sources_of(self, policy: "Policy") -> dict[str, str]:
        """Return the resolved host path of each path that cells under `policy` see."""
        from ..host.shown_paths import sources_of

        return sources_of(policy)

    def host_id(self, user: int | str | None) -> int:
        """Return the id that it is to have, and its cells on the host."""
        from ..host.ids import id_for

        return os.geteuid() or id_for(user)

    def runtime(self, python_path: tuple[str, ...]) -> "Runtime":
        """Return the files that its interpreter needs, with those of packages in `python_path`."""
        from ..host.runtime import find_runtime

        found = find_runtime(self.executable)
        if not python_path:
            return found
        # most launchers need neither this nor subprocess
        from ..host.interpreters import with_packages

        return with_packages(found, python_path)

    def policy_for(self, policy: "Policy") -> "Policy":
        """Return the policy that cells of this launcher have where `policy` is given."""
        return policy

    def find_interpreter(self, language: str, runtime: "Runtime", path: str) -> "HostInterpreter":
        """Return the interpreter of `language`, at `path` if that is given."""
        from ..host.interpreters import find_interpreter  # most run Python, and need no subprocess

        return find_interpreter(language, runtime, path)

    def elsewhere(self, files: "Sequence[str]") -> dict[str, str]:
        """Return where the launcher finds `files` that lie elsewhere than in cells."""
        from ..host.shown_paths import lead_elsewhere

        return lead_elsewhere(files)

    def adapt(self, plan: "Plan") -> "Plan":
        """Return `plan` for cells of this launcher."""
        return plan

    def start(self, plan: "Plan", files: "Sequence[str]", sources: "Mapping[str, str]") -> None:
        """Start it, if it was not started when it was made."""

    def reap(self) -> None:
        """Free the resources of the process, which has ended."""
        os.waitpid(self.keeper, 0)

    def take_socket(self) -> int:
        """Return the socket for a Launcher, which owns the process from then on."""
        taken, self.socket = self.socket, -1
        return taken

    def take_launch(self) -> "Closing | None":
        """Return the launch that was begun ahead, if any; the caller owns it from then on."""
        taken, self.launch = self.launch, None
        return taken

    def close(self) -> None:
        """End a process that nothing has taken over; does nothing otherwise, or again."""
        if launch := self.take_launch():
            launch.close()
        if self.socket < 0:
            return
        os.close(self.take_socket())
        os.close(self.stderr)
        try:
            os.kill(self.keeper, _signal.SIGKILL)
            os.waitpid(self.keeper, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # the embedding process may reap everything


def _cannot_start(executable: str, error: OSError) -> "LaunchError":
    from ...policies.errors import LaunchError

    return LaunchError(f"cannot start {executable}: {error.strerror}")


def interpreter() -> str:
    """Return the interpreter that runs this process, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def import_paths(others: tuple[str, ...]) -> list[str]:
    """Return the directories that hold the launcher's packages, and no others; those of `others` come
    first, so that extension modules of another version are found there."""
    found = list(others)
    for package in _PACKAGES[:1] if others else _PACKAGES:
        spec = spec_of(package)
        if spec is None or spec.origin is None:
            if package == _OPTIONAL:
                continue
            from ...policies.errors import LaunchError

            raise LaunchError(f"the package {package} is not installed", "pip install cellwright")
        path = os.path.dirname(spec.origin)
        found.append(os.path.dirname(path) if spec.submodule_search_locations else path)
    return list(dict.fromkeys(found))


def spec_of(package: str) -> "ModuleSpec | None":
    """Do what `importlib.util.find_spec` does, without that module."""
    if module := sys.modules.get(package):
        return module.__spec__
    specs = (finder.find_spec(package, None) for finder in sys.meta_path)
    return next(filter(None, specs), None)


def _spawn_with_fixed_addresses(executable: str, module: str, sock: int, stderr: int) -> int:
    """Spawn with a personality that this thread has meanwhile, and the child keeps (personality(2))."""
    from ..kernel.process_calls import without_randomized_addresses  # seldom needed

    with without_randomized_addresses():
        return _spawn(executable, module, sock, stderr)


def launcher_command(executable: str, module: str = _LAUNCHER) -> list[str]:
    """Return the command line of a launcher, or of another process that starts as one."""
    name, _, function = module.partition(":")
    return [executable, "-I", "-S", "-c", _BOOTSTRAP.format(name, function or "main")]


def _spawn(executable: str, module: str, sock: int, stderr: int) -> int:
    """Start it with an empty environment, no inherited descriptor, signal mask or handler."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
        (os.POSIX_SPAWN_DUP2, sock, 3),
    ]
    catchable = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
    return os.posix_spawn(
        executable, launcher_command(executable, module), {},
        file_actions=actions, setsid=True, setsigmask=[], setsigdef=catchable,
    )  # fmt: skip
