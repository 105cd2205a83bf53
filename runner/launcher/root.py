"""The root directory that all cells of a launcher share: built once, then read-only.

Everything in it is a bind of a host path at the same place, read-only unless the policy says
otherwise, a device, or a small file made here.  Sources are opened, through no link, before the new
root covers anything, and places in it are opened through no link either: what a program left in a
directory that it could write decides neither what is shown nor where.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from ...policies.denied import Denied, denied_by
from ...policies.languages import LANGUAGES, TOOL_CLIENT
from ...policies.plan import Bind, Plan
from ..fixed_root import (
    DEVICES,
    DIRECTORIES,
    LINKS,
    NETWORK_TEXTS,
    SYSTEM,
    TERMINAL,
    TERMINAL_LINKS,
    TERMINALS,
    TEXTS,
)
from ..kernel import files, mounts
from ..kernel.now import Now
from ..machine import sys_texts
from ..messages import Boot, Cover, Views
from .views import ShownPath, SinglyShown, cover, cover_pipes, guard, new_view, open_source

_STAGING = "/tmp"  # noqa: S108 - a mount point in our own mount namespace; nothing is written to it
with open(os.path.join(os.path.dirname(__file__), "../cell/call.sh")) as _file:
    _CLIENT = _file.read()  # while it can be read
_SHELF = {"size": "64M", "mode": "0755", "nr_inodes": "32768"}
_HARD = mounts.NOSUID | mounts.NODEV


def enter_new_root(boot: Boot) -> tuple[tuple[int, ...], Views]:
    """Build the root and make it ours; the host's own file system is then out of reach.

    Return the descriptors through which the shared files can be written, and what the
    supervisor has to look at while cells live.  The calling process needs CAP_SYS_ADMIN over its
    mount namespace.  Raises OSError, and ViewError.
    """
    do = Now()
    mounts.make_private()
    with contextlib.ExitStack() as opened:
        sources = _open_sources(boot)
        for each in sources:
            opened.callback(os.close, each.descriptor)
        size = {"size": "4M", "mode": "0755", "nr_inodes": "8192"}
        mounts.put(do, mounts.new(do, "tmpfs", _HARD, **size), _STAGING)
        root = os.open(_STAGING, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, root)
        for place in (*DIRECTORIES, *(each.also for each in boot.plan.tmpfs if each.also)):
            os.makedirs(_STAGING + place, exist_ok=True)
        if boot.plan.terminal:
            os.makedirs(_STAGING + TERMINALS)
        views = _show(root, sources, boot)
    shared_files = tuple(_mount_shared_files(do, place) for place in boot.shared)
    _write_texts(TEXTS | NETWORK_TEXTS if boot.plan.network else TEXTS)
    _write_texts(sys_texts(boot.plan))
    _write_client(boot.plan)
    _make_links((*LINKS, *(TERMINAL_LINKS if boot.plan.terminal else ()), *boot.links))
    # The launcher's own, for its id maps; each cell covers it by one of its own, and the kernel
    # allows those only while a whole /proc is mounted somewhere (mount_too_revealing).
    proc = mounts.new(do, "proc", _HARD | mounts.NOEXEC, subset="pid")
    mounts.put(do, proc, _STAGING + "/proc")
    mounts.pivot_into(_STAGING)
    mounts.make_read_only("/")
    return shared_files, views


def _open_sources(boot: Boot) -> list[ShownPath]:
    """Open what the policy shows, then what the interpreter needs besides, then the devices."""
    plan, where = boot.plan, dict(boot.sources)
    wanted = [(bind.path, _attributes(bind)) for bind in plan.binds]
    covered = tuple(bind.path.rstrip("/") + "/" for bind in plan.binds if bind.executable)
    denied = denied_by(plan.hidden)
    wanted += [
        (path, _HARD | mounts.RDONLY)
        for path in boot.files
        if not path.startswith(covered) and not denied.denies(path)
    ]
    devices = [f"/dev/{name}" for name in DEVICES] + ([TERMINAL] if plan.terminal else [])
    wanted += [(path, mounts.NOSUID | mounts.NOEXEC) for path in devices]
    opened = []
    for path, attributes in wanted:
        source = where.get(path, path)
        try:
            descriptor = open_source(source)
        except FileNotFoundError:
            if path in plan.optional:
                continue
            raise
        opened.append(ShownPath(path, source, descriptor, attributes))
    return opened


def _show(root: int, sources: list[ShownPath], boot: Boot) -> Views:
    """Put every source in its place, without what is denied beneath it."""
    shown = [bind.path for bind in boot.plan.binds]
    denied, singly = denied_by(boot.plan.hidden), SinglyShown(shown)
    whole = {bind.path for bind in boot.plan.binds if bind.writable}
    without_pipes = {bind.path for bind in boot.plan.binds} - whole - {*boot.plan.python_path}
    covers: list[Cover] = []
    for each in sources:
        with _naming(each.path):
            inner = [path for path in shown if path.startswith(f"{each.path}/")]
            covers += _show_one(root, each, denied, singly, inner, writable=each.path in whole)
            if each.path in without_pipes and not _is_system(each.source):
                cover_pipes(root, each.path)
    for path in boot.hidden:
        with _naming(path):
            cover(root, path)
    return Views(tuple(covers), tuple(singly.snapshots))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Have an OSError say which path it is about."""
    try:
        yield
    except OSError as error:
        if str(error.filename).startswith("show "):
            raise
        words = f"{error.strerror} ({error.filename})"
        raise OSError(error.errno, words, f"show {path}") from None


def _show_one(
    root: int, shown: ShownPath, denied: Denied, singly: SinglyShown, inner: list[str],
    *, writable: bool,
) -> list[Cover]:  # fmt: skip
    """Put one source in its place; return what had to be covered there.  `inner` are the paths that are
    shown beneath it by themselves."""
    is_directory = stat.S_ISDIR(os.fstat(shown.descriptor).st_mode)
    below = _denied_beneath(shown, denied)
    place = _open_place(root, shown.path, is_directory=is_directory)
    try:
        if below and is_directory and not writable:
            mounts.attach_opened(new_view(shown), place)
        else:
            mount = mounts.clone_opened(shown.descriptor)
            mounts.restrict(mount, shown.attributes)
            mounts.attach_opened(mount, place)
    finally:
        os.close(place)
    if writable and is_directory:
        return guard(root, shown, below, inner)
    if below and is_directory:
        view = files.open_within(root, _relative(shown.path), os.O_PATH | os.O_CLOEXEC)
        try:
            singly.fill(shown, view, below)
        finally:
            os.close(view)
    return []


def _is_system(path: str) -> bool:
    return f"{path}/".startswith(tuple(f"{each}/" for each in SYSTEM))


def _denied_beneath(shown: ShownPath, denied: Denied) -> Denied:
    """Return what is denied beneath a shown path, by its own name or by the one that cells see."""
    found = denied.beneath(shown.source), denied.beneath(shown.path)
    if found[0] is None or found[1] is None:
        raise PermissionError(errno.EACCES, "the policy hides it", shown.source)
    return found[0].also(found[1])


def _relative(path: str) -> bytes:
    return os.fsencode(path.lstrip("/"))


def _open_place(root: int, path: str, *, is_directory: bool) -> int:
    """Open the place of `path` in the new root, making it where our own file system lacks it."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return files.open_within(root, _relative(path), flags)
    above, name = os.path.split(path)
    directory = root if above == "/" else _open_place(root, above, is_directory=True)
    try:
        if os.fstat(directory).st_dev != os.fstat(root).st_dev:  # not ours to make things in
            raise FileNotFoundError(2, f"{path} does not exist any more", f"show {path}")
        if is_directory:
            os.mkdir(name, 0o755, dir_fd=directory)
        else:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444, dir_fd=directory))
        return files.open_within(directory, os.fsencode(name), flags)
    finally:
        if directory != root:
            os.close(directory)


def _mount_shared_files(do: Now, shared: str) -> int:
    """Mount a filesystem twice: read-only where cells see it, and writable nowhere but behind the
    descriptor that is returned."""
    place, attributes = _STAGING + shared, _HARD | mounts.NOEXEC
    os.mkdir(place, 0o755)
    mounts.put(do, mounts.new(do, "tmpfs", attributes, **_SHELF), place)
    writable = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    shown = mounts.clone(do, place)
    mounts.restrict(shown, attributes | mounts.RDONLY)
    mounts.detach(place)  # the descriptor keeps it
    mounts.put(do, shown, place)
    return writable


def _attributes(bind: Bind) -> int:
    read_only = 0 if bind.writable else mounts.RDONLY
    return _HARD | read_only | (0 if bind.executable else mounts.NOEXEC)


def _write_texts(texts: dict[str, str]) -> None:
    for path, text in texts.items():
        os.makedirs(os.path.dirname(_STAGING + path), exist_ok=True)
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
