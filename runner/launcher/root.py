"""The root directory that all cells of a launcher share: built once, then read-only.

Everything in it is a bind of a host path at the same place, read-only unless the policy says otherwise,
a device, or a small file made here. Sources are opened, through no link, before the new root covers
anything, and places in it are opened through no link either: a link that a program left in a writable
directory can change neither the source nor the place of a mount.
"""

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterable, Iterator

from ...policies.denied import Denied, denied_by
from ...policies.languages import LANGUAGES, TOOL_CLIENT
from ...policies.plan import COPIED, Bind, ImagePlan, Plan
from ..cell import privileges
from ..fixed_root import (
    DEVICES,
    DIRECTORIES,
    IMAGE_CHANGES,
    IMAGE_LAYERS,
    IMAGE_NEW_ROOT,
    IMAGE_PLACES,
    IMAGE_PREFIX,
    IMAGE_PYTHON,
    LINKS,
    NETWORK_TEXTS,
    SYSTEM,
    TERMINAL,
    TERMINAL_LINKS,
    TERMINALS,
    TEXTS,
    sys_texts,
)
from ..kernel import file_calls as files
from ..kernel import mounts
from ..kernel.steps import Now
from ..messages import LAYER, Boot, Cover, Views
from .views import ShownPath, SinglyShown, cover, cover_pipes, guard, new_view, open_source

_STAGING = "/tmp"  # noqa: S108 - a mount point in our own mount namespace; nothing is written to it
with open(os.path.join(os.path.dirname(__file__), "../cell/call.sh")) as _file:
    _CLIENT = _file.read()  # read now, while the file is visible
_SHELF = {"size": "64M", "mode": "0755", "nr_inodes": "32768"}
_HARD = mounts.NOSUID | mounts.NODEV
_ALWAYS = ("/proc", "/dev", "/sys", IMAGE_PREFIX)  # in cells with an image


def enter_new_root(boot: Boot) -> tuple[tuple[int, ...], Views]:
    """Build the root and make it ours; the host's own file system is then out of reach.

    Return the descriptors through which the shared files can be written, and the covers that the
    supervisor checks while cells live. The calling process needs CAP_SYS_ADMIN over its mount
    namespace. Raises OSError, and ViewError.
    """
    do = Now()
    mounts.make_private()
    with contextlib.ExitStack() as opened:
        sources = _open_sources(boot)
        for each in sources:
            opened.callback(os.close, each.descriptor)
            if each.changes >= 0:
                opened.callback(os.close, each.changes)
        layers = [open_source(each) for each in boot.plan.image.layers] if boot.plan.image else []
        for layer in layers:
            opened.callback(os.close, layer)
        size = {"size": "4M", "mode": "0755", "nr_inodes": "8192"}
        mounts.put(do, mounts.new(do, "tmpfs", _HARD, **size), _STAGING)
        root = os.open(_STAGING, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, root)
        places = [each for tmpfs in boot.plan.tmpfs for each in (tmpfs.target, tmpfs.also) if each]
        for place in (*DIRECTORIES, *places):
            os.makedirs(_STAGING + place, exist_ok=True)
        if boot.plan.terminal:
            os.makedirs(_STAGING + TERMINALS)
        views = _show(root, sources, boot)
        _show_layers(root, layers)
    shared_files = tuple(_mount_shared_files(do, place) for place in boot.shared)
    _write_texts(_texts(boot.plan))
    _write_texts(sys_texts(boot.plan))
    _write_client(boot.plan)
    shown = (*(bind.path for bind in boot.plan.binds), *boot.files)
    ours = [link for link in LINKS if not lies_in(link[0], shown)]
    _make_links((*ours, *(TERMINAL_LINKS if boot.plan.terminal else ()), *boot.links))
    # The launcher's own /proc, for its id maps. Each cell covers it with a /proc of its own, which the
    # kernel allows only while a complete /proc is mounted somewhere (mount_too_revealing).
    proc = mounts.new(do, "proc", _HARD | mounts.NOEXEC, subset="pid")
    mounts.put(do, proc, _STAGING + "/proc")
    if boot.plan.image:
        _make_places(boot, boot.plan.image)
    mounts.pivot_into(_STAGING)
    mounts.make_read_only("/")
    return shared_files, views


def _open_sources(boot: Boot) -> list[ShownPath]:
    """Open the paths that the policy shows, then the interpreter's files, then the devices."""
    plan, where = boot.plan, dict(boot.sources)
    wanted = [(bind.path, _attributes(bind)) for bind in plan.binds]
    covered = tuple(bind.path.rstrip("/") + "/" for bind in plan.binds if bind.executable)
    denied = denied_by(plan.hidden)
    wanted += [
        (path, _HARD | mounts.RDONLY)
        for path in boot.files
        if not path.startswith(covered) and not denied.denies(path)
    ]
    names = (*DEVICES, *plan.devices)
    devices = [f"/dev/{name}" for name in names] + ([TERMINAL] if plan.terminal else [])
    wanted += [(path, mounts.NOSUID | mounts.NOEXEC) for path in devices]
    opened = []
    changes = {bind.path: bind.changes for bind in plan.binds if bind.changes}
    for path, attributes in wanted:
        source = where.get(path, path)
        try:
            descriptor = open_source(source)
        except FileNotFoundError:
            if path in plan.optional:
                continue
            raise
        if path in devices and not stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.close(descriptor)  # nor a disk of that name
            raise OSError(errno.ENODEV, "it is no character device", f"show {path}")
        layer = open_source(changes[path]) if path in changes else -1
        opened.append(ShownPath(path, source, descriptor, attributes, layer))
    return opened


def _show(root: int, sources: list[ShownPath], boot: Boot) -> Views:
    shown = [bind.path for bind in boot.plan.binds]
    denied, singly = denied_by(boot.plan.hidden), SinglyShown(shown)
    whole = {bind.path for bind in boot.plan.binds if bind.writable}
    owned = {bind.path for bind in boot.plan.binds if bind.owned} if os.geteuid() == 0 else set()
    without_pipes = {bind.path for bind in boot.plan.binds} - whole - {*boot.plan.python_path}
    programs = {bind.path for bind in boot.plan.binds if bind.executable}
    covers: list[Cover] = []
    for each in sources:
        with _naming(each.path):
            inner = [path for path in shown if path.startswith(f"{each.path}/")]
            host_uid = boot.host_uid if each.path in owned else 0
            covers += _show_one(
                root, each, denied, singly, inner, writable=each.path in whole,
                host_uid=host_uid, optional=each.path in boot.plan.optional,
            )  # fmt: skip
            if each.path in without_pipes and not lies_in(each.source, SYSTEM):
                cover_pipes(root, each.path, of_programs=each.path in programs)
    for path in boot.hidden:
        with _naming(path):
            cover(root, path)
    return Views(tuple(covers), tuple(singly.snapshots))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if str(error.filename).startswith(("show ", LAYER)):
            raise
        words = f"{error.strerror} ({error.filename})"
        raise OSError(error.errno, words, f"show {path}") from None


def _show_one(
    root: int, shown: ShownPath, denied: Denied, singly: SinglyShown, inner: list[str],
    *, writable: bool, host_uid: int, optional: bool,
) -> list[Cover]:  # fmt: skip
    """Put one source in its place; return the covers that it needed. `inner` are the paths that are
    shown beneath it by themselves; `host_uid`, unless 0, is the id that gets its owner's files. An
    `optional` source that was removed since it was opened is left out."""
    is_directory = stat.S_ISDIR(os.fstat(shown.descriptor).st_mode)
    below = _denied_beneath(shown, denied)
    place = _open_place(root, shown.path, is_directory=is_directory)
    try:
        if below and is_directory and not writable:
            mounts.attach_opened(new_view(shown), place)
        else:
            mount = _clone(shown.descriptor, host_uid)
            if shown.changes >= 0:
                mount = _layered(mount, shown.changes, host_uid)
            mounts.restrict(mount, shown.attributes)
            mounts.attach_opened(mount, place)
    except FileNotFoundError:
        if optional:
            return []
        raise
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


def _clone(source: int, host_uid: int, *, with_root: bool = False) -> int:
    """Return a detached mount of an open path; `host_uid`, unless 0, gets its owner's files."""
    mount = mounts.clone_opened(source)
    if host_uid:
        privileges.map_owner(mount, os.fstat(source), host_uid, with_root=with_root)
    return mount


def _layered(lower: int, changes: int, host_uid: int) -> int:
    """Return a detached overlay mount of `lower`, a detached mount that is closed, whose changes go to
    the directories `upper` and `work` in `changes` (Linux 5.11 without privilege, 5.19 with mapped
    ids).  File systems that are mounted beneath it are not in there.  If `changes` says that `upper` is
    a copy, return that."""
    if _is_copy(changes):
        os.close(lower)
        upper = files.open_within(changes, b"upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if host_uid:  # a file system without overlays seldom has mapped ids
                _give(upper, host_uid)
            return mounts.clone_opened(upper)
        finally:
            os.close(upper)
    try:
        return _overlay(lower, changes, host_uid)
    except OSError as error:
        words = f"{error.strerror} ({error.filename})"
        raise OSError(
            error.errno, words, f"{LAYER}{os.readlink(f'/proc/self/fd/{changes}')}"
        ) from None


def _is_copy(changes: int) -> bool:
    try:
        os.stat(COPIED, dir_fd=changes, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _give(directory: int, host_uid: int) -> None:
    os.chown(directory, host_uid, host_uid)
    for _, directories, names, at in os.fwalk(".", dir_fd=directory):
        for each in (*directories, *names):
            os.chown(each, host_uid, host_uid, dir_fd=at, follow_symlinks=False)


def _overlay(lower: int, changes: int, host_uid: int) -> int:
    places = [f"{_STAGING}/.{name}" for name in ("lower", "changes")]
    upper = _clone(changes, host_uid, with_root=True)  # the kernel makes files in `work` as root
    for mount, place in zip((lower, upper), places, strict=True):
        os.mkdir(place)
        mounts.put(Now(), mount, place)
    try:
        return mounts.overlay(places[0], f"{places[1]}/upper", f"{places[1]}/work")
    finally:
        for place in places:
            mounts.detach(place)
            os.rmdir(place)


def image_trees(boot: Boot, root: str = "") -> tuple[str, ...]:
    """Return the paths that cells have in the places of an image, from the launcher's root, which is in
    the directory `root`; none if cells have no image."""
    if not boot.plan.image:
        return ()
    wanted = [*_ALWAYS, *boot.shared, *(each.target for each in boot.plan.tmpfs)]
    wanted += [*(bind.path for bind in boot.plan.binds), *boot.files]
    return tuple(outermost(wanted, root))


def outermost(paths: Iterable[str], root: str = "") -> Iterator[str]:
    """Yield those of `paths` that exist and lie in none of the others."""
    last = ""
    for path in sorted(paths, key=lambda path: path.split("/")):
        if not (last and lies_in(path, (last,))) and os.path.lexists(root + path):
            last = path
            yield path


def _show_layers(root: int, layers: list[int]) -> None:
    for number, layer in enumerate(layers):
        place = _open_place(root, f"{IMAGE_LAYERS}/{number}", is_directory=True)
        try:
            mount = mounts.clone_opened(layer)
            mounts.restrict(mount, _HARD | mounts.RDONLY)
            mounts.attach_opened(mount, place)
        finally:
            os.close(place)


def _make_places(boot: Boot, image: ImagePlan) -> None:
    """Make the uppermost layer of cells with an image: mount points for the trees that they have beside
    it, and the files that say where they are.  Root's belong to root of the image.

    Programs start the cell's Python by a script, which names its loader and libraries: the image has
    others.
    """
    top = _STAGING + IMAGE_PLACES
    for path in (IMAGE_PLACES, IMAGE_CHANGES, IMAGE_NEW_ROOT):
        os.mkdir(_STAGING + path, 0o755)
    for path in image_trees(boot, _STAGING):
        if os.path.isdir(_STAGING + path):
            os.makedirs(top + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(top + path), exist_ok=True)
            os.close(os.open(top + path, os.O_CREAT | os.O_EXCL, 0o444))
    for path in ("/tmp", "/var/tmp"):  # noqa: S108 - with the mode of the image's
        if os.path.isdir(top + path):
            os.chmod(top + path, 0o1777)  # noqa: S103 - with the sticky bit
    texts = {**TEXTS, **NETWORK_TEXTS}
    wanted = {"/etc/hosts": texts["/etc/hosts"], "/etc/hostname": f"{boot.plan.hostname}\n"}
    if boot.plan.network:
        wanted["/etc/resolv.conf"] = texts["/etc/resolv.conf"]
    _write_texts({IMAGE_PLACES + path: text for path, text in wanted.items()})
    with open(_STAGING + IMAGE_PYTHON, "x") as file:
        command = " ".join(map(shlex.quote, image.interpreter))
        file.write(f'#!/bin/sh\nexec {command} "$@"\n')
        os.fchmod(file.fileno(), 0o555)
    try:
        os.setxattr(top, "user.cellwright", b"")
        os.removexattr(top, "user.cellwright")
    except OSError as error:
        what = "attributes of files in memory, which need Linux 6.6 and CONFIG_TMPFS_XATTR"
        raise OSError(error.errno, error.strerror, what) from None
    if os.geteuid() == 0 and boot.host_uid:
        _give(os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), boot.host_uid)


def lies_in(path: str, places: tuple[str, ...]) -> bool:
    """Tell whether `path` is one of `places` or lies beneath one."""
    return f"{path}/".startswith(tuple(f"{each}/" for each in places))


def _denied_beneath(shown: ShownPath, denied: Denied) -> Denied:
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
        if os.fstat(directory).st_dev != os.fstat(root).st_dev:  # another mount: create nothing
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
    mounts.detach(place)  # the descriptor keeps the mount alive
    mounts.put(do, shown, place)
    return writable


def _attributes(bind: Bind) -> int:
    read_only = 0 if bind.writable else mounts.RDONLY
    return _HARD | read_only | (0 if bind.executable else mounts.NOEXEC)


def _texts(plan: Plan) -> dict[str, str]:
    """Return the small files of /etc; the home directory in passwd(5) is where cells have theirs."""
    home = next(
        (
            each.target if each.is_home else each.also
            for each in plan.tmpfs
            if each.is_home or each.also
        ),
        "",
    )
    texts = TEXTS | NETWORK_TEXTS if plan.network else TEXTS
    passwd = texts["/etc/passwd"].replace(":/workspace:", f":{home or '/workspace'}:")
    return {**texts, "/etc/passwd": passwd}


def _write_texts(texts: dict[str, str]) -> None:
    for path, text in texts.items():
        os.makedirs(os.path.dirname(_STAGING + path), exist_ok=True)
        with open(_STAGING + path, "x") as file:
            file.write(text)


def _write_client(plan: Plan) -> None:
    """Put the command that calls tools where a shell's programs and their children find it."""
    if plan.language in LANGUAGES and LANGUAGES[plan.language].is_shell:
        os.makedirs(os.path.dirname(_STAGING + TOOL_CLIENT))
        with open(_STAGING + TOOL_CLIENT, "x") as file:
            file.write(f"#!{plan.program}\n{_CLIENT}")
            os.fchmod(file.fileno(), 0o555)


def _make_links(links: tuple[tuple[str, str], ...]) -> None:
    for path, target in links:
        if not os.path.lexists(_STAGING + path):
            os.makedirs(os.path.dirname(_STAGING + path), exist_ok=True)
            os.symlink(target, _STAGING + path)
