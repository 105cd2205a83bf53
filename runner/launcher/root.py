"""The root directory that all cells of a launcher share: built once, then read-only.

Everything in it is a bind of a host path at the same place, read-only unless the policy says
otherwise, a device, or a small file made here.  Sources are opened as detached mounts before the new
root covers anything, so no path is resolved through what was mounted a moment ago.
"""

import os
from pathlib import Path

from ...policies.languages import LANGUAGES, TOOL_CLIENT
from ...policies.plan import Bind, Plan
from ..kernel import mounts
from ..messages import Boot
from ..shelf import PLACE

_STAGING = "/tmp"  # noqa: S108 - a mount point in our own mount namespace; nothing is written to it
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PLACES = ("/workspace", "/tmp", "/proc", "/dev", "/etc", "/usr")  # noqa: S108 - in the new root
_TEXTS = {
    "/etc/passwd": "cell:x:1000:1000:cell:/workspace:/usr/sbin/nologin\n",
    "/etc/group": "cell:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost cell\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_LINKS = (
    ("/dev/shm", "../tmp"),  # noqa: S108 - POSIX semaphores and shared memory (shm_overview(7))
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
)
_CLIENT = Path(__file__).parents[1].joinpath("cell/call.sh").read_text()  # while it can be read
_SHELF = {"size": "64M", "mode": "0755", "nr_inodes": "32768"}
_HARD = mounts.NOSUID | mounts.NODEV

Source = tuple[int, str, bool]  # a detached mount, its place, whether it is a directory


def enter_new_root(boot: Boot) -> int | None:
    """Build the root and make it ours; the host's own file system is then out of reach.

    Return a descriptor through which the shelf can be written, if there is one.  The calling process
    needs CAP_SYS_ADMIN over its mount namespace.
    """
    mounts.make_private()
    sources = _open_sources(boot)
    size = {"size": "1M", "mode": "0755", "nr_inodes": "4096"}
    mounts.attach(mounts.new_filesystem("tmpfs", _HARD, **size), _STAGING)
    for place in _PLACES:
        os.makedirs(_STAGING + place, exist_ok=True)
    for mount, path, is_directory in sources:
        mounts.attach_making(mount, _STAGING + path, is_directory=is_directory)
    shelf = _put_up_shelf() if boot.tools else None
    _hide((*boot.hidden, *boot.plan.hidden))
    _write_texts()
    _write_client(boot.plan)
    _make_links((*_LINKS, *boot.links))
    # The launcher's own, for its id maps; each cell covers it by one of its own, and the kernel
    # allows those only while a whole /proc is mounted somewhere (mount_too_revealing).
    proc = mounts.new_filesystem("proc", _HARD | mounts.NOEXEC, subset="pid")
    mounts.attach(proc, _STAGING + "/proc")
    mounts.pivot_into(_STAGING)
    mounts.make_read_only("/")
    return shelf


def _open_sources(boot: Boot) -> list[Source]:
    """Open what the policy shows, then what the interpreter needs besides, then the devices."""
    shown = [_open_source(bind.path, _attributes(bind)) for bind in boot.plan.binds]
    covered = tuple(bind.path.rstrip("/") + "/" for bind in boot.plan.binds if bind.executable)
    needed = [path for path in boot.files if not path.startswith(covered)]
    libraries = [_open_source(path, _HARD | mounts.RDONLY) for path in needed]
    devices = mounts.NOSUID | mounts.NOEXEC
    return shown + libraries + [_open_source(f"/dev/{name}", devices) for name in _DEVICES]


def _put_up_shelf() -> int:
    """Mount a filesystem twice: read-only where cells see it, and writable nowhere but behind the
    descriptor that is returned."""
    place, attributes = _STAGING + PLACE, _HARD | mounts.NOEXEC
    os.mkdir(place, 0o755)
    mounts.attach(mounts.new_filesystem("tmpfs", attributes, **_SHELF), place)
    writable = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    shown = mounts.clone_tree(place)
    mounts.restrict(shown, attributes | mounts.RDONLY)
    mounts.detach(place)  # the descriptor keeps it
    mounts.attach(shown, place)
    return writable


def _attributes(bind: Bind) -> int:
    read_only = 0 if bind.writable else mounts.RDONLY
    return _HARD | read_only | (0 if bind.executable else mounts.NOEXEC)


def _open_source(path: str, attributes: int) -> Source:
    mount = mounts.clone_tree(path)
    mounts.restrict(mount, attributes)
    return mount, path, os.path.isdir(path)


def _hide(paths: tuple[str, ...]) -> None:
    """Cover each directory by an empty one, each file by a device that cannot be opened (nodev)."""
    for path in paths:
        covered = _STAGING + path
        if os.path.isdir(covered):
            empty = mounts.new_filesystem("tmpfs", _HARD | mounts.RDONLY, size="4k", mode="0555")
            mounts.attach(empty, covered)
        elif os.path.lexists(covered):
            nothing = mounts.clone_tree("/dev/null")
            mounts.restrict(nothing, _HARD | mounts.NOEXEC | mounts.RDONLY)
            mounts.attach(nothing, covered)


def _write_texts() -> None:
    for path, text in _TEXTS.items():
        with open(_STAGING + path, "x") as file:
            file.write(text)


def _write_client(plan: Plan) -> None:
    """Have a shell's programs, and what these start, find the command that calls tools."""
    if plan.program and LANGUAGES[plan.language].is_shell:
        os.makedirs(os.path.dirname(_STAGING + TOOL_CLIENT))
        with open(_STAGING + TOOL_CLIENT, "x") as file:
            file.write(f"#!{plan.program}\n{_CLIENT}")
            os.fchmod(file.fileno(), 0o555)


def _make_links(links: tuple[tuple[str, str], ...]) -> None:
    for path, target in links:
        if not os.path.lexists(_STAGING + path):
            os.makedirs(os.path.dirname(_STAGING + path), exist_ok=True)
            os.symlink(target, _STAGING + path)
