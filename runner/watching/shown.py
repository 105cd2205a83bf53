"""The paths that a cell shows, by name, to recognise an open that leads outside."""

import os
import stat

from ...policies.denied import denied_by
from ...policies.languages import TOOL_CLIENT
from ...policies.policy import lies_in
from ...policies.probes import FILES, TREES
from ..fixed_root import (
    DEVICES,
    DIRECTORIES,
    LINKS,
    NETWORK_TEXTS,
    TERMINAL,
    TERMINAL_LINKS,
    TERMINALS,
    TEXTS,
)
from ..messages import Boot

_OWN = ("/workspace/", "/tmp/", "/dev/shm/", "/dev/fd/")  # noqa: S108 - inside the cell
_OWN_FILES = frozenset(
    [TOOL_CLIENT, os.path.dirname(TOOL_CLIENT), "/", *DIRECTORIES, *TEXTS, *NETWORK_TEXTS]
    + [path for path, _ in LINKS]
    + [f"/dev/{name}" for name in DEVICES]
)
_WRITABLE = ("/workspace", "/tmp", "/dev/", "/dev/shm", "/proc/self/fd/")  # noqa: S108
_PROCESS = ("self", "thread-self", "mounts")
# Where glibc up to 2.36 looks, too, where a program says itself in which directory a library lies
# (ld.so(8), "Hardware capabilities").
_VARIANTS = frozenset(
    ["tls", "x86_64", "haswell", "xeon_phi", "avx512_1", "aarch64", "atomics", "i686"]
)
_GETPATHS = ("pyvenv.cfg", "pybuilddir.txt")
_SYSTEM = ("/etc/", "/lib/", "/lib64/", "/usr/", "/var/")
_NOT_PERMITTED = "host permissions: cells of root run as an id that owns nothing there"
_PASS = 1  # the mode bit that lets one pass a directory
_CHANGE = 3  # those that let one make a name in a directory
_WANTED = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6, os.O_ACCMODE: 6}  # mode bits
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Shown:
    """Judges paths by name: links are not followed, and the cell's mounts and Landlock alone decide
    the outcome of the open."""

    def __init__(self, boot: Boot) -> None:
        shown = [bind.path for bind in boot.plan.binds] + list(boot.files)
        shown += [link for link, _ in boot.links] + list(boot.shared)
        if boot.plan.terminal:
            shown += [TERMINAL, TERMINALS, *(link for link, _ in TERMINAL_LINKS)]
        homes = [each.also for each in boot.plan.tmpfs if each.also]
        shown += homes
        self._parents = _parents(shown)
        self._files = _OWN_FILES | frozenset(shown) | self._parents
        self._trees = (*_OWN, *(f"{path}/" for path in shown))
        self._mounts = _mounts(boot) | dict.fromkeys(homes, True)
        self._writable = tuple(path for path, is_writable in self._mounts.items() if is_writable)
        # Beneath these, as text, `_is_writable` must look for the nearest mount; mostly there are none.
        self._inside_writable = tuple(
            path
            for path in self._mounts
            if path not in _WRITABLE and path.startswith(self._writable)
        )
        self._hidden = denied_by(boot.plan.hidden)
        self._host = _HostPermissions(boot) if os.geteuid() == 0 else None

    def why_not(self, path: str, flags: int) -> str:
        """Return why an open of the absolute `path` leads nowhere; "" if it may lead somewhere."""
        path = os.path.normpath(path)
        if not self._is_shown(path):
            is_harmless = self._is_looked_for(path) or _is_nowhere(path, flags)
            return "" if is_harmless else "mount_ns: not shown"
        if flags & _WRITES and not self._is_writable(path):
            return "landlock: not writable"
        return _NOT_PERMITTED if self._host and self._host.refuse(path, flags) else ""

    def _is_shown(self, path: str) -> bool:
        if self._hidden and self._hidden.denies(path):
            return False
        if path in self._files or path.startswith(self._trees):
            return True
        top, _, rest = path[1:].partition("/")
        name = rest.partition("/")[0]
        return top == "proc" and (name in _PROCESS or name.isdigit())

    def _is_writable(self, path: str) -> bool:
        """Tell whether the mount that holds `path` is writable: the nearest one above it."""
        if not path.startswith(self._inside_writable):
            return path.startswith(self._writable)
        above = (each for each in self._mounts if lies_in(path, (each,)))
        return self._mounts.get(max(above, key=len, default=""), False)

    def _is_looked_for(self, path: str) -> bool:
        is_known = path in FILES or path.startswith(TREES)
        return is_known or self._is_library_search(path) or self._is_python_search(path)

    def _is_python_search(self, path: str) -> bool:
        """Return whether Python, at its start, looks for an environment or a build directory where it
        is shown (Modules/getpath.py)."""
        directory, _, name = path.rpartition("/")
        is_wanted = name in _GETPATHS or (name.startswith("python") and name.endswith("._pth"))
        return is_wanted and directory in self._parents

    def _is_library_search(self, path: str) -> bool:
        """Return whether the dynamic loader searches for a library where other libraries are shown."""
        directory, _, name = path.rpartition("/")
        while directory.rpartition("/")[2] in _VARIANTS:
            directory = directory.rpartition("/")[0]
        return ".so" in name and directory.partition("/glibc-hwcaps")[0] in self._parents


class _HostPermissions:
    """Judges opens of shown paths by the host's modes, for an id that owns only what cells made:
    otherwise a program of root's cell meets a bare EACCES."""

    def __init__(self, boot: Boot) -> None:
        sources = dict(boot.sources)
        # What the distribution ships everybody may read, and most programs open much of it.
        self._shown = {
            bind.path: sources.get(bind.path, bind.path)
            for bind in boot.plan.binds
            if not lies_in(bind.path, ("/usr",))
        }
        self._id = boot.host_uid

    def refuse(self, path: str, flags: int) -> bool:
        """Return whether the kernel refuses to open `path` because of the modes of what lies there
        now."""
        above = next((each for each in self._shown if lies_in(path, (each,))), None)
        if above is None:
            return False
        here, names = self._shown[above], path[len(above) :].split("/")[1:]
        status: os.stat_result | None = None
        for index in range(len(names) + 1):
            try:
                status = os.lstat(here)
            except OSError:  # to make a file takes writing to its directory
                makes = flags & os.O_CREAT and index == len(names)
                return bool(makes and status and not self._may(status, _CHANGE))
            if stat.S_ISLNK(status.st_mode):
                return False
            last = index == len(names)
            if not self._may(status, _WANTED[flags & os.O_ACCMODE] if last else _PASS):
                return True
            here = here if last else f"{here}/{names[index]}"
        return False

    def _may(self, status: os.stat_result, wanted: int) -> bool:
        shift = 6 if status.st_uid == self._id else 3 if status.st_gid == self._id else 0
        return not wanted & ~(status.st_mode >> shift)


def _is_nowhere(path: str, flags: int) -> bool:
    """Tell whether programs look for a file of the system that the host has as little as the cell.

    Elsewhere an attempt counts in any case: so nobody learns whether a file of a user exists.
    """
    return path.startswith(_SYSTEM) and not flags & _WRITES and not os.path.lexists(path)


def _mounts(boot: Boot) -> dict[str, bool]:
    """Return, by path, whether programs may write there.  The directories above shown paths lie in the
    root, which is read-only, also below /tmp."""
    binds = {bind.path: bind.writable for bind in boot.plan.binds}
    read_only = [*boot.files, *boot.shared]
    above = dict.fromkeys([*_parents([*binds, *read_only]), *read_only], False)
    return above | dict.fromkeys(_WRITABLE, True) | binds


def _parents(paths: list[str]) -> frozenset[str]:
    """Return every directory above `paths`: these exist, to hold shown paths."""
    found: set[str] = set()
    for path in paths:
        while (path := os.path.dirname(path)) not in found and path != "/":
            found.add(path)
    return frozenset(found)
