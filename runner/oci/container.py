"""`SpawnedContainer`: a launcher in a container of its own, which an OCI runtime makes.

The launcher speaks to the supervisor over the socket that it inherits, as it does without a container,
and forks cells inside. Its root holds only the files that the launcher and its cells need.
"""

import _socket
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from ...policies.compiling.host import Kernel
from ...policies.errors import LaunchError, PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import Plan
from ...policies.policy import Policy, lies_in, named_paths
from ..host.answer_cache import cached
from ..host.ids import id_for
from ..host.interpreters import with_packages
from ..host.runtime import Runtime, find_runtime, sonames
from ..host.shown_paths import leads, resolve
from ..launching.spawn import Spawned, import_paths, launcher_command
from .bundle import (
    Bundle,
    Ids,
    Mount,
    RootFilesystem,
    container_config,
    leftover_bundles,
    remove_bundle,
    state_of,
)
from .oci_runtime import OciRuntime, find_oci_runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONTAINER = "container"  # name of the layer
_PREFIX = "/.cellwright"  # place of the interpreter's files beside an image's files
# Starts the interpreter with an empty environment: runc sets HOME, and every cell would show it in
# /proc/PID/environ.
_WITH_NO_ENVIRONMENT = ("-I", "-S", "-c", "import os,sys;os.execve(sys.argv[1],sys.argv[1:],{})")


class ContainerLayout(NamedTuple):
    """The mounts of a container and the links in its root; `needed`: the files of the interpreter."""

    mounts: tuple[Mount, ...]
    links: tuple[tuple[str, str], ...]
    needed: tuple[str, ...]


class SpawnedContainer(Spawned):
    """A launcher that `start` starts in a container."""

    in_container = True

    def __init__(
        self, runtime: OciRuntime, executable: str, packages: "Sequence[str]" = (),
        rootfs: RootFilesystem | None = None,
    ) -> None:  # fmt: skip
        """Name the `runtime`, the launcher's interpreter with its `packages`, and the files that cells
        see; without a `rootfs` they see those of the host that the policy shows."""
        self.executable = executable
        self.has_fixed_addresses = False
        self.launch = None
        self.socket = self.stderr = self.keeper = -1
        self.oci = runtime
        self._packages = tuple(packages)
        self._rootfs = rootfs
        self._bundle: Bundle | None = None

    @property
    def kernel(self) -> Kernel:
        return self.oci.kernel

    def again(self) -> "SpawnedContainer":
        return SpawnedContainer(self.oci, self.executable, self._packages, self._rootfs)

    @property
    def shows_programs_of_the_host(self) -> bool:
        return self._rootfs is None

    def sources_of(self, policy: Policy) -> dict[str, str]:
        """Return the resolved host paths of what `policy` shows of the host."""
        return {
            path: resolve(where, path)
            for where, path in named_paths(policy)
            if not self._has(path)
        }  # fmt: skip

    def host_id(self, user: int | str | None) -> int:
        """Return 0 without root: in the container no other id is mapped."""
        return 0 if os.geteuid() else id_for(user)

    def runtime(self, python_path: tuple[str, ...]) -> Runtime:
        """Return the interpreter's files at their places in the container."""
        found = with_packages(find_runtime(self.executable), python_path)
        if self._rootfs is None:
            return found
        links = [
            (_PREFIX + link, target if target[0] != "/" else _PREFIX + target)
            for link, target in found.links
        ]
        return Runtime(
            _PREFIX + found.executable,
            (*(_PREFIX + path for path in found.files), *self._rootfs.files),
            (*links, *self._rootfs.links),
            tuple(_PREFIX + path for path in found.hidden),
            (),
        )

    def adapt(self, plan: Plan) -> Plan:
        """Return `plan` for cells in the container; raises PolicyError for paths it cannot show."""
        if self._rootfs and plan.language != PYTHON:
            raise LaunchError(
                f"language: {plan.language} cannot be the language of a program with a rootfs",
                "run the interpreter of the rootfs as a command: sandbox.run([...])",
            )
        writable = tuple(bind.path for bind in plan.binds if bind.writable)
        if any(bind.changes for bind in plan.binds):
            raise PolicyError("filesystem.changes: not available in a container")
        for bind in plan.binds:
            if bind.writable and self._has(bind.path):
                raise PolicyError(
                    f"filesystem.write: {bind.path} is of the rootfs, which is read-only"
                )
            if bind.path not in writable and lies_in(bind.path, writable):
                raise PolicyError(
                    f"filesystem: {bind.path} lies beneath a path that programs can write",
                    "a runtime mounts by name: show paths that no program can replace",
                )
        binds = tuple(bind for bind in plan.binds if not self._has(bind.path))
        return replace(plan, binds=binds, layers=(*plan.layers, CONTAINER, *self._shared_kernel()))

    def _shared_kernel(self) -> tuple[str, ...]:
        return ("kernel_shared",) if self.kernel == "shared" else ()

    def _has(self, path: str) -> bool:
        return self._rootfs is not None and self._rootfs.has(path)

    def layout(
        self, plan: Plan, files: "Sequence[str]", sources: "Mapping[str, str]"
    ) -> ContainerLayout:
        """Return the mounts of a container: of `files`, of the paths that `plan` shows, and of the
        files that a launcher needs.

        `sources`: path -> host path, where they differ.
        """
        paths = import_paths(self._packages)
        runtime = find_runtime(self.executable)
        libraries = launcher_libraries(self.executable, paths)
        needed = (*runtime.files, *runtime.programs, self.executable, *libraries.files)
        prefix = _PREFIX if self._rootfs else ""
        shown = {bind.path: sources.get(bind.path, bind.path) for bind in plan.binds}
        shown |= {path: sources.get(path, "") for path in files if not self._has(path)}
        places = {prefix + path: leads(path) for path in needed}
        places |= {path: source or self._source(path) for path, source in shown.items()}
        writable = {bind.path for bind in plan.binds if bind.writable}
        mounts = [Mount(place, source, place in writable) for place, source in places.items()]
        if self._rootfs:
            mounts += [Mount(tree, self._rootfs.directory + tree) for tree in self._rootfs.trees]
        links = [
            (prefix + link, target if target[0] != "/" else prefix + target)
            for link, target in (*runtime.links, *libraries.links)
            if link[:5] != "/tmp/"  # noqa: S108 - the cell's own
        ]
        mounts = [*_without_inner(mounts), *package_mounts(paths)]
        return ContainerLayout(tuple(mounts), tuple(_outside(links, mounts)), needed)

    def start(self, plan: Plan, files: "Sequence[str]", sources: "Mapping[str, str]") -> None:
        """Start the launcher in a container that shows `files`, and what `plan` shows.

        `sources`: path -> host path, where they differ. Raises LaunchError.
        """
        layout = self.layout(plan, files, sources)
        command = self.command_of(launcher_command(self.executable)[1:], layout)
        config = container_config(plan, command, layout.mounts, self.ids())
        bundle = Bundle(layout.links, self.oci.program)
        try:
            bundle.write_config(config)
        except BaseException:
            bundle.remove()
            raise
        self._run(bundle)

    def ids(self) -> Ids | None:
        """Return the ids that the container's root stands for; None for those of the host's root."""
        return Ids(os.geteuid(), os.getegid()) if os.geteuid() else None

    def _source(self, place: str) -> str:
        return leads(place.removeprefix(_PREFIX) if self._rootfs else place)

    def command_of(self, arguments: "Sequence[str]", layout: ContainerLayout) -> tuple[str, ...]:
        """Return the command line of the interpreter in the container, with an empty environment."""
        interpreter = [self.executable]
        if self._rootfs:
            # The root file system may have another loader and other libraries.
            directories = dict.fromkeys(
                _PREFIX + os.path.dirname(leads(path)) for path in layout.needed if ".so" in path
            )
            loader = _PREFIX + find_runtime(self.executable).loader
            path = ":".join(directories)
            interpreter = [loader, "--library-path", path, _PREFIX + self.executable]
        return (*interpreter, *_WITH_NO_ENVIRONMENT, *interpreter, *arguments)

    def _run(self, bundle: Bundle) -> None:
        """Make and start the container; nothing of it is left if that fails."""
        self._bundle = bundle
        ends: list[_socket.socket] = []
        try:
            self.stderr = os.memfd_create("launcher-stderr", os.MFD_CLOEXEC)
            ends += _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
            ours, theirs = ends
            self._create(bundle, theirs.fileno())
            os.write(ours.fileno(), PACKAGES.encode())
            self.socket = ours.detach()
        except BaseException as error:
            self.reap()
            if self.stderr >= 0:
                os.close(self.stderr)
                self.stderr = -1
            if isinstance(error, OSError):
                raise LaunchError(f"cannot start a container: {error.strerror}") from None
            raise
        finally:
            for end in ends:
                end.close()

    def _create(self, bundle: Bundle, sock: int) -> None:
        runtime = self.oci
        create = (
            "create", "--bundle", bundle.path, "--preserve-fds", "1", "--pid-file", bundle.pid_file,
            bundle.name,
        )  # fmt: skip
        runtime.call(runtime.command(bundle.state, *create), sock, self.stderr)
        self.keeper = _pid_in(bundle.pid_file, runtime.name)
        runtime.call(runtime.command(bundle.state, "start", bundle.name), stderr=self.stderr)

    def reap(self) -> None:
        """Delete the container, which has ended or is ended now, and its bundle."""
        bundle, self._bundle = self._bundle, None
        if bundle:
            self.delete(bundle)

    def delete(self, bundle: Bundle) -> None:
        """End the container of a bundle, and leave nothing of both."""
        delete = self.oci.command(bundle.state, "delete", "--force", bundle.name)
        with contextlib.suppress(
            LaunchError
        ):  # the container was never made, or has ended by itself
            self.oci.call(delete)
        bundle.remove()

    def close(self) -> None:
        if self.socket < 0:
            return
        os.close(self.take_socket())
        os.close(self.stderr)
        self.reap()


def remove_leftover_containers() -> list[str]:
    """Delete the containers of processes of this user that have ended; return their bundles."""
    removed = []
    for path, program in leftover_bundles():
        with contextlib.suppress(LaunchError, PolicyError):
            runtime = find_oci_runtime(program)
            runtime.call(runtime.command(state_of(path), "delete", "--force", path.name))
        if remove_bundle(path):
            removed.append(str(path))
    return removed


def _pid_in(path: str, name: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        raise LaunchError(f"{name} made no container: it noted no process") from None


def _without_inner(mounts: list[Mount]) -> list[Mount]:
    """Return `mounts`, outer ones first, without those that an outer one shows anyway."""
    kept: list[Mount] = []
    for mount in sorted(mounts, key=lambda each: each.place):
        outer = [each for each in kept if mount.place.startswith(f"{each.place}/")]
        shown = (f"{each.source}{mount.place[len(each.place) :]}" for each in outer[-1:])
        if mount.source not in shown:
            kept.append(mount)
    return kept


def _outside(links: list[tuple[str, str]], mounts: list[Mount]) -> list[tuple[str, str]]:
    places = tuple(mount.place for mount in mounts)
    return [(link, target) for link, target in links if not lies_in(link, places)]


PACKAGES = "/.cellwright/packages"
_FACE = "cellwright"
_FOLDERS = ("policies", "runner")  # packages that a launcher imports; in a checkout they are links
_ASK_SECONDS = 60
_SCRIPT = (
    "import sys;sys.path[:0]=sys.argv[1:];"
    "sys.modules['typing_extensions']=sys.modules['_uuid']=None;"
    "from cellwright.runner.launcher import main\n"
    "print(*{line.split(None,5)[5].strip() for line in open('/proc/self/maps') if '.so' in line},"
    "sep='\\n')"
)


class LauncherLibraries(msgspec.Struct, frozen=True):
    """The shared libraries that a launcher loads, and the links by which it finds them."""

    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def package_mounts(paths: list[str]) -> tuple[Mount, ...]:
    """Return where a launcher in a container finds the packages that it finds in `paths` outside."""
    found: list[Mount] = []
    for path in paths:
        for entry in sorted(Path(path).glob("*")):
            if not _is_wanted(entry):
                continue
            found.append(Mount(f"{PACKAGES}/{entry.name}", str(entry.resolve())))
            if entry.name == _FACE:
                found += [
                    Mount(f"{PACKAGES}/{folder}", str((entry / folder).resolve()))
                    for folder in _FOLDERS if (entry / folder).is_symlink()
                ]  # fmt: skip
    first = {
        mount.place: mount for mount in reversed(found)
    }  # in the order of sys.path: the first match counts
    return tuple(first.values())


def _is_wanted(entry: Path) -> bool:
    name = entry.name.partition(".")[0]
    if entry.is_dir():
        return name in (_FACE, "msgspec", "prctl")
    return name in ("prctl", "_prctl") and entry.suffix in (".py", ".so")


def launcher_libraries(executable: str, paths: list[str]) -> LauncherLibraries:
    """Return what `executable` loads as a launcher; asked once, then the cache.

    Raises LaunchError if it cannot be a launcher.
    """
    stats = [os.stat(path) for path in (executable, *paths)]
    identity = [(each.st_mtime_ns, each.st_ino) for each in stats]
    key = f"launcher libraries 1 {executable} {paths} {identity}"
    return cached(key, LauncherLibraries, lambda: _ask(executable, paths))


def _ask(executable: str, paths: list[str]) -> LauncherLibraries:
    import subprocess  # needed only without a cached answer

    done = subprocess.run(
        [executable, "-I", "-S", "-c", _SCRIPT, *paths],
        env={}, cwd="/", capture_output=True, text=True, timeout=_ASK_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LaunchError(f"{executable} cannot be a launcher: {done.stderr[-500:]}")
    files = sorted(path for path in done.stdout.splitlines() if not path.startswith(tuple(paths)))
    links = [link for path in files for link in sonames(Path(path))]
    return LauncherLibraries(tuple(files), tuple(links))
