"""What a cell shows of the file system, by name, to tell an open that leads outside."""

import os

from ...policies.denied import denied_by
from ...policies.languages import TOOL_CLIENT
from ...policies.probes import FILES, TREES
from ..messages import Boot
from ..shelf import PLACE

_OWN = ("/workspace/", "/tmp/", "/dev/shm/", "/dev/fd/")  # noqa: S108 - inside the cell
_OWN_FILES = frozenset(
    [TOOL_CLIENT, os.path.dirname(TOOL_CLIENT)]
    + ["/", "/workspace", "/tmp", "/proc", "/dev", "/etc", "/usr", "/dev/shm", "/dev/fd"]  # noqa: S108
    + [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    + [f"/dev/{name}" for name in ("stdin", "stdout", "stderr")]
    + [f"/etc/{name}" for name in ("passwd", "group", "hosts", "nsswitch.conf")]
)
_WRITABLE = ("/workspace", "/tmp", "/dev/", "/proc/self/fd/")  # noqa: S108
_PROCESS = ("self", "thread-self", "mounts")
# Where glibc up to 2.36 looks, too, where a program says itself in which directory a library lies
# (ld.so(8), "Hardware capabilities").
_VARIANTS = frozenset(
    ["tls", "x86_64", "haswell", "xeon_phi", "avx512_1", "aarch64", "atomics", "i686"]
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Shown:
    """Judges paths by the names given: a link that leads elsewhere is not followed, and what comes
    of the open is decided by the cell's mounts and Landlock alone."""

    def __init__(self, boot: Boot) -> None:
        shown = [bind.path for bind in boot.plan.binds] + list(boot.files)
        shown += [link for link, _ in boot.links] + ([PLACE] if boot.tools else [])
        self._parents = _parents(shown)
        self._files = _OWN_FILES | frozenset(shown) | self._parents
        self._trees = (*_OWN, *(f"{path}/" for path in shown))
        writable = tuple(bind.path for bind in boot.plan.binds if bind.writable)
        self._writable = (*_WRITABLE, *writable)
        self._hidden = denied_by(boot.plan.hidden)

    def why_not(self, path: str, flags: int) -> str:
        """Say why an open of the absolute `path` leads nowhere; empty if it may lead somewhere."""
        path = os.path.normpath(path)
        if not self._is_shown(path):
            return "" if self._is_looked_for(path) else "mount_ns: not shown"
        if flags & _WRITES and not path.startswith(self._writable):
            return "landlock: not writable"
        return ""

    def _is_shown(self, path: str) -> bool:
        if self._hidden and self._hidden.denies(path):
            return False
        if path in self._files or path.startswith(self._trees):
            return True
        top, _, rest = path[1:].partition("/")
        name = rest.partition("/")[0]
        return top == "proc" and (name in _PROCESS or name.isdigit())

    def _is_looked_for(self, path: str) -> bool:
        return path in FILES or path.startswith(TREES) or self._is_library_search(path)

    def _is_library_search(self, path: str) -> bool:
        """Tell whether the dynamic loader looks for a library where others of them are shown."""
        directory, _, name = path.rpartition("/")
        while directory.rpartition("/")[2] in _VARIANTS:
            directory = directory.rpartition("/")[0]
        return ".so" in name and directory.partition("/glibc-hwcaps")[0] in self._parents


def _parents(paths: list[str]) -> frozenset[str]:
    """Return every directory above `paths`: they exist, to hold what is shown."""
    found: set[str] = set()
    for path in paths:
        while (path := os.path.dirname(path)) not in found and path != "/":
            found.add(path)
    return frozenset(found)
