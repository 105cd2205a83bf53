"""The paths that a cell shows, by name, to recognise an open that leads outside."""

import os
import re
import stat

from ...policies.denied import denied_by
from ...policies.languages import TOOL_CLIENT
from ...policies.policy import lies_in
from ..fixed_root import (
    DEVICES,
    DIRECTORIES,
    LIKE_TMP,
    LINKS,
    NETWORK_TEXTS,
    TERMINAL,
    TERMINAL_LINKS,
    TERMINALS,
    TEXTS,
)
from ..messages import Boot

# Paths that libraries probe by themselves: opening one that a cell lacks is not a violation. A path
# that ends in a slash covers everything beneath it.
PROBES: dict[str, str] = {
    "/etc/ld.so.cache": "ld.so(8), before every library",
    "/etc/ld.so.preload": "ld.so(8), at every exec",
    "/etc/localtime": "tzset(3), where TZ is not set",
    "/usr/share/zoneinfo/": "tzset(3), for TZ=UTC too",
    "/usr/lib/locale/": "setlocale(3)",
    "/usr/share/locale/": "setlocale(3), gettext(3)",
    "/etc/locale.alias": "setlocale(3)",
    "/usr/lib/x86_64-linux-gnu/gconv/": "iconv(3)",
    "/usr/lib/aarch64-linux-gnu/gconv/": "iconv(3)",
    "/usr/lib/ssl/": "OpenSSL's configuration and certificates (import ssl)",
    "/etc/ssl/": "OpenSSL's configuration and certificates (import ssl)",
    "/etc/resolv.conf": "getaddrinfo(3)",
    "/etc/host.conf": "getaddrinfo(3)",
    "/etc/gai.conf": "getaddrinfo(3)",
    "/etc/services": "getaddrinfo(3), getservbyname(3)",
    "/etc/protocols": "getprotobyname(3)",
    "/var/run/nscd/": "getpwnam(3)",
    "/run/nscd/": "getpwnam(3)",
    "/etc/os-release": "platform",
    "/usr/lib/os-release": "platform",
    "/etc/mime.types": "mimetypes.init, and six more names of it",
    "/etc/httpd/": "mimetypes.init",
    "/etc/apache2/": "mimetypes.init",
    "/usr/local/etc/": "mimetypes.init",
    "/usr/local/lib/": "mimetypes.init; the interpreter's search path",
    "/usr/lib/python3/": "Debian's site-packages on the search path",
    "/etc/inputrc": "readline(3)",
    "/etc/terminfo/": "terminfo(5)",
    "/lib/terminfo/": "terminfo(5)",
    "/usr/share/terminfo/": "terminfo(5)",
    "/etc/bash.bashrc": "bash(1), interactive",
    "/etc/profile": "bash(1), at login",
    "/proc/cpuinfo": "numerical libraries choose their kernels by it",
    "/proc/meminfo": "sysconf(3) and runtimes size their heaps by it",
    "/proc/stat": "get_nprocs(3)",
    "/proc/filesystems": "libselinux",
    "/proc/sys/": "malloc, runtimes: overcommit, pid_max, somaxconn",
    "/proc/net/": "libuv, getifaddrs(3)",
    "/proc/version_signature": "libuv",
    "/sys/devices/system/": "sysconf(3), numerical libraries: CPUs and caches",
    "/sys/fs/cgroup/": "runtimes size heaps and thread pools by it",
    "/sys/kernel/mm/": "malloc: transparent huge pages",
    "/dev/tty": "getpass(3), readline(3)",
    "/proc/driver/nvidia/": "libcuda, which goes on without (measured)",
    "/proc/devices": "libcuda, which goes on without (measured)",
    "/etc/nvidia/": "libcuda: profiles of applications",
    "/usr/share/nvidia/": "libcuda: profiles of applications",
}

FILES = frozenset(path for path in PROBES if not path.endswith("/"))
TREES = tuple(path for path in PROBES if path.endswith("/"))


_OWN = ("/workspace/", "/tmp/", "/dev/fd/", *(f"{place}/" for place in LIKE_TMP))  # noqa: S108 - inside the cell
_OWN_FILES = frozenset(
    [TOOL_CLIENT, os.path.dirname(TOOL_CLIENT), "/", *DIRECTORIES, *TEXTS, *NETWORK_TEXTS]
    + [each for path, _ in LINKS for each in (path, os.path.dirname(path))]
    + [f"/dev/{name}" for name in DEVICES]
)
_WRITABLE = ("/workspace", "/tmp", "/dev/", "/proc/self/fd/", *LIKE_TMP)  # noqa: S108
_PROCESS = ("self", "thread-self", "mounts")
# Subdirectories that glibc up to 2.36 also searches if a program names the directory of a library
# (ld.so(8), "Hardware capabilities").
_VARIANTS = frozenset(
    ["tls", "x86_64", "haswell", "xeon_phi", "avx512_1", "aarch64", "atomics", "i686"]
)
_GETPATHS = ("pyvenv.cfg", "pybuilddir.txt")
# Patterns of this module are compiled when they are used: few programs make a listener use one.
_ZIPPED = r"(.*)/python\d+\.zip(?:/.*)?"  # entries of sys.path
_SYSTEM = ("/etc/", "/lib/", "/lib64/", "/usr/", "/var/")
# Programs write to their own such files (the JVM, PostgreSQL, pthread_setname_np). A refusal does no
# harm, so it is no violation.
_OF_ITSELF = (
    r"/proc/(?:self|thread-self|\d+)(?:/task/\d+)?"
    r"/(?:autogroup|clear_refs|comm|coredump_filter|oom_adj|oom_score_adj|sched|timerslack_ns)"
)
_MEMORY = r"/proc/(?:self|(?!1/)\d+)(?:/task/\d+)?/mem"  # gdb falls back to ptrace(2)
_NOT_PERMITTED = "host permissions: cells of root run as an id that owns nothing there"
_PASS = 1  # the mode bit that permits searching a directory
_CHANGE = 3  # the mode bits that permit creating a name in a directory
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
        shown += [f"/dev/{name}" for name in boot.plan.devices]
        own = {each for tmpfs in boot.plan.tmpfs for each in (tmpfs.target, tmpfs.also) if each}
        own -= {*_WRITABLE}
        shown += own
        self._packages = boot.plan.python_path
        self._parents = _parents(shown)
        self._files = _OWN_FILES | frozenset(shown) | self._parents
        self._trees = (*_OWN, *(f"{path}/" for path in shown))
        self._mounts = _mounts(boot) | dict.fromkeys(own, True)
        self._writable = tuple(path for path, is_writable in self._mounts.items() if is_writable)
        # Prefixes beneath which `_is_writable` must find the nearest mount; usually there are none.
        self._inside_writable = tuple(
            path
            for path in self._mounts
            if path not in _WRITABLE and path.startswith(self._writable)
        )
        self._is_image = boot.plan.image is not None
        self._traces = bool(boot.plan.judged)
        self._hidden = denied_by(boot.plan.hidden)
        self._host = _HostPermissions(boot) if os.geteuid() == 0 else None

    def why_not(self, path: str, flags: int) -> str:
        """Return why an open of the absolute `path` leads nowhere; "" if it may lead somewhere."""
        named, path = path, os.path.normpath(path)
        if not self._is_shown(path):
            is_harmless = (
                self._is_looked_for(path)
                or self._is_beside(named, path)
                or _is_nowhere(path, flags)
            )
            return "" if is_harmless else "mount_ns: not shown"
        if flags & _WRITES and not self._is_writable(path):
            is_usual = re.fullmatch(_OF_ITSELF, path) or (
                self._traces and re.fullmatch(_MEMORY, path)
            )
            return "" if is_usual else "mount_ns: read-only"
        return _NOT_PERMITTED if self._host and self._host.refuse(path, flags) else ""

    def _is_shown(self, path: str) -> bool:
        if self._hidden and self._hidden.denies(path):
            return False
        if path in self._files or path.startswith(self._trees):
            return True
        top, _, rest = path[1:].partition("/")
        if self._is_image and top != "proc":
            return True
        name = rest.partition("/")[0]
        return top == "proc" and (name in _PROCESS or name.isdigit())

    def _is_writable(self, path: str) -> bool:
        """Tell whether the mount that holds `path` is writable: the nearest one above it."""
        if not (self._is_image or path.startswith(self._inside_writable)):
            return path.startswith(self._writable)
        above = (each for each in self._mounts if lies_in(path, (each,)))
        in_root = self._is_image and not lies_in(path, ("/proc", "/sys", "/dev"))
        return self._mounts.get(max(above, key=len, default=""), in_root)

    def _is_looked_for(self, path: str) -> bool:
        is_known = path in FILES or path.startswith(TREES)
        return is_known or self._is_library_search(path) or self._is_python_search(path)

    def _is_python_search(self, path: str) -> bool:
        """Return whether Python, at its start, looks for an environment or a build directory where it
        is shown (Modules/getpath.py), or imports from the archive that no installation has."""
        if found := re.fullmatch(_ZIPPED, path):
            return found[1] in self._parents
        directory, _, name = path.rpartition("/")
        is_wanted = name in _GETPATHS or (name.startswith("python") and name.endswith("._pth"))
        return is_wanted and directory in self._parents

    def _is_library_search(self, path: str) -> bool:
        """Return whether a loader or linker searches for a library where other libraries are shown."""
        directory, _, name = path.rpartition("/")
        while directory.rpartition("/")[2] in _VARIANTS:
            directory = directory.rpartition("/")[0]
        return _is_library(name) and directory.partition("/glibc-hwcaps")[0] in self._parents

    def _is_beside(self, named: str, path: str) -> bool:
        """Return whether a loader searches where a shown library says that others are, `$ORIGIN/../..`,
        which for torch is beside the shown directory of packages."""
        return _is_library(path.rpartition("/")[2]) and any(
            named.startswith(f"{place}/") and path.startswith(f"{os.path.dirname(place)}/")
            for place in self._packages
        )


def _is_library(name: str) -> bool:
    return ".so" in name or name.endswith(".a")  # ld(1) looks for both


class _HostPermissions:
    """Judges opens of shown paths by the host's modes, for an id that owns only what cells made:
    otherwise a program of root's cell meets a bare EACCES."""

    def __init__(self, boot: Boot) -> None:
        sources = dict(boot.sources)
        # Everybody may read files of the distribution, and most programs open many of them.
        self._shown = {
            bind.path: sources.get(bind.path, bind.path)
            for bind in boot.plan.binds
            if not lies_in(bind.path, ("/usr",)) and not bind.owned
        }
        self._id = boot.host_uid

    def refuse(self, path: str, flags: int) -> bool:
        """Return whether the kernel refuses to open `path` because of the current modes."""
        above = next((each for each in self._shown if lies_in(path, (each,))), None)
        if above is None:
            return False
        here, names = self._shown[above], path[len(above) :].split("/")[1:]
        status: os.stat_result | None = None
        for index in range(len(names) + 1):
            try:
                status = os.lstat(here)
            except OSError:  # creating a file needs write permission on its directory
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

    Elsewhere an attempt always counts, so that a program does not learn whether a user's file exists.
    """
    return path.startswith(_SYSTEM) and not flags & _WRITES and not os.path.lexists(path)


def _mounts(boot: Boot) -> dict[str, bool]:
    """Return, by path, whether programs may write there.  The directories above shown paths lie in the
    root, which is read-only, also below /tmp."""
    binds = {bind.path: bind.writable for bind in boot.plan.binds}
    read_only = [*boot.files, *boot.shared]
    in_root = [path for path in _parents([*binds, *read_only]) if not lies_in(path, tuple(binds))]
    above = dict.fromkeys([*in_root, *read_only], False)
    own = (place for place in _WRITABLE if not lies_in(place, tuple(binds)))
    return above | dict.fromkeys(own, True) | binds


def _parents(paths: list[str]) -> frozenset[str]:
    found: set[str] = set()
    for path in paths:
        while (path := os.path.dirname(path)) not in found and path != "/":
            found.add(path)
    return frozenset(found)
