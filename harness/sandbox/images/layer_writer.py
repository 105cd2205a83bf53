"""`LayerWriter`: writes the archive of a layer below one directory, in a confined process.

The archive may be hostile.  A name never leads out of the directory, also through links; devices, pipes
and extended attributes are left out.  Work is bounded.

A layer for overlayfs has a character device 0,0 for each file that it removes from the layers below
(a whiteout), and the attribute user.overlay.opaque on a directory that hides theirs.  mknod of 0,0
needs no privilege since Linux 5.8.  A directory that it does not list belongs to root.

Merged layers become one plain directory instead: a whiteout removes, owners and set-uid bits are left
out, and so is the right to write for others.
"""

import contextlib
import errno
import os
import stat
from typing import NamedTuple

from ....runner.kernel import file_calls as files
from ..workspaces.archive import TarMember, entries
from .layer_stream import LayerStream

_WHITEOUT, _OPAQUE = b".wh.", b".wh..wh..opq"  # image-spec, "layer.md"
_AUFS = b".wh..wh."  # other names that aufs, an older union file system, keeps for itself
OPAQUE = "user.overlay.opaque"
_DEEPEST = 100
_REGULAR, _HARD_LINK, _SYMBOLIC_LINK, _DIRECTORY = "0", "1", "2", "5"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOBODY, _IDS = 65534, 65536
_LATEST = 1 << 33  # seconds; the year 2242


class Written(NamedTuple):
    """The digests of a layer's archive, the bytes of its files, and the number of its members."""

    blob: str
    diff: str
    size_bytes: int
    members: int


class LayerWriter:
    """Writes layers below the open directory `root`, one after the other.

    `most_members` and `most_bytes` are those of all together.  `merges`: make a plain directory.
    `has_owners`: more ids than root's are mapped here.  Raises ValueError for a malformed layer, and
    OSError.
    """

    def __init__(
        self, root: int, most_bytes: int, most_members: int, *, merges: bool, has_owners: bool
    ) -> None:
        self._root = root
        self._most_bytes, self._most_members = most_bytes, most_members
        self._merges, self._has_owners = merges, has_owners and not merges
        self._bytes = self._members = 0
        self._times: dict[
            bytes, int
        ] = {}  # directories get theirs at the end, since entries change them
        self._open: tuple[list[bytes], int] | None = None  # the directory of the last file

    def add(self, stream: LayerStream) -> Written:
        """Write a layer."""
        try:
            for entry in entries(stream, self._most_members, "surrogateescape"):
                self._members += 1
                self._write(entry, stream)
            blob, diff = stream.finish()
        finally:
            self._forget()
        for path, modified in reversed(self._times.items()):
            with contextlib.suppress(OSError):  # a later entry took its place
                directory = files.open_beneath(self._root, path or b".", _FOLDER)
                os.utime(directory, (modified, modified))
                os.close(directory)
        return Written(blob, diff, self._bytes, self._members)

    def _write(self, entry: TarMember, stream: LayerStream) -> None:
        name = entry.name.encode(errors="surrogateescape")
        names = _names(name)
        if not names:
            if entry.kind == _DIRECTORY:
                self._describe_directory(self._root, entry, b"")
            return
        if entry.kind != _REGULAR or names[-1].startswith(_WHITEOUT):
            self._forget()
        directory = self._directory(names[:-1])
        try:
            self._put(entry, directory, names, stream)
        except OSError as error:
            raise OSError(error.errno, error.strerror, _shown(name)) from None
        finally:
            if self._open is None or self._open[1] != directory:
                os.close(directory)

    def _forget(self) -> None:
        if self._open:
            os.close(self._open[1])
        self._open = None

    def _directory(self, names: list[bytes], *, is_link: bool = False) -> int:
        """Open a directory below the root, making missing ones."""
        if self._open and self._open[0] == names:
            return self._open[1]
        look = files.open_inside if self._merges else files.open_beneath
        for count in range(len(names), 0, -1):
            path = b"/".join(names[:count])
            try:
                opened = look(self._root, path, _FOLDER)
                break
            except FileNotFoundError:
                continue
            except OSError as error:
                if not any(
                    self._is_whiteout(b"/".join(names[:upper])) for upper in range(1, count + 1)
                ):
                    why = "it is a link" if error.errno == errno.ELOOP else error.strerror
                    raise ValueError(f"{_shown(path)} cannot be a directory: {why}") from None
        else:
            count, opened = 0, os.dup(self._root)
        if is_link and count < len(names):
            os.close(opened)
            raise ValueError(f"a link leads to no file of the layer: {_shown(b'/'.join(names))}")
        for name in names[count:]:
            above = opened
            try:
                self._make_directory(above, name)
                opened = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
            finally:
                os.close(above)
        self._forget()
        self._open = names, opened
        return opened

    def _is_whiteout(self, path: bytes) -> bool:
        above, _, name = path.rpartition(b"/")
        try:
            directory = files.open_beneath(self._root, above or b".", _FOLDER)
        except OSError:
            return False
        try:
            return _kind(directory, name) == stat.S_IFCHR
        finally:
            os.close(directory)

    def _make_directory(self, above: int, name: bytes) -> None:
        """Make a directory in place of anything else; in place of a whiteout, an opaque one."""
        hides = _kind(above, name) == stat.S_IFCHR
        _remove_entry(above, name)
        os.mkdir(name, 0o755, dir_fd=above)
        if hides:
            _set_opaque(above, name)

    def _put(
        self, entry: TarMember, directory: int, names: list[bytes], stream: LayerStream
    ) -> None:
        name = names[-1]
        if name == _OPAQUE:
            self._hide(directory)
        elif name.startswith(_AUFS):
            return
        elif name.startswith(_WHITEOUT):
            self._white_out(directory, name.removeprefix(_WHITEOUT))
        elif entry.kind == _DIRECTORY:
            if _kind(directory, name) != stat.S_IFDIR:
                self._make_directory(directory, name)
            made = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=directory)
            try:
                self._describe_directory(made, entry, b"/".join(names))
            finally:
                os.close(made)
        elif entry.kind == _SYMBOLIC_LINK:
            _remove_entry(directory, name)
            os.symlink(entry.target.encode(errors="surrogateescape"), name, dir_fd=directory)
            self._own(entry, name, directory)
            times = (_time(entry),) * 2
            os.utime(name, times, dir_fd=directory, follow_symlinks=False)
        elif entry.kind == _REGULAR:
            self._put_file(directory, name, entry, stream)
        elif entry.kind == _HARD_LINK:
            self._link(directory, name, entry.target.encode(errors="surrogateescape"))

    def _put_file(self, directory: int, name: bytes, entry: TarMember, stream: LayerStream) -> None:
        self._bytes += entry.size
        if self._bytes > self._most_bytes:
            raise ValueError("it holds more bytes than the limit")
        _remove_entry(directory, name)
        file = os.open(name, _NEW, 0o600, dir_fd=directory)
        try:
            stream.copy(entry.size, file)
            self._own(entry, file)
            # after chown(2), which clears set-uid bits
            os.fchmod(file, (entry.mode & 0o755) | 0o600 if self._merges else entry.mode & 0o7777)
            os.utime(file, (_time(entry),) * 2)
        finally:
            os.close(file)

    def _describe_directory(self, directory: int, entry: TarMember, path: bytes) -> None:
        self._own(entry, directory)
        mode = (entry.mode & 0o755) | 0o700 if self._merges else entry.mode & 0o7777
        os.fchmod(directory, mode)
        self._times[path] = _time(entry)

    def _own(self, entry: TarMember, file: int | bytes, directory: int | None = None) -> None:
        if self._has_owners:
            ids = [each if 0 <= each < _IDS else _NOBODY for each in (entry.uid, entry.gid)]
            if isinstance(file, bytes):
                os.chown(file, *ids, dir_fd=directory, follow_symlinks=False)
            else:
                os.fchown(file, *ids)

    def _link(self, directory: int, name: bytes, target: bytes) -> None:
        """Make a hard link to a file, or a symbolic link, that this layer has already."""
        names = _names(target.lstrip(b"/"))
        if not names:
            raise ValueError("a link leads to no file: the root")
        self._open = None  # `directory`, which the caller closes then
        source = self._directory(names[:-1], is_link=True)
        self._open = None
        try:
            kind = _kind(source, names[-1])
            if kind not in (stat.S_IFREG, stat.S_IFLNK):
                raise ValueError(f"a link leads to no file of the layer: {_shown(target)}")
            temporary = (
                b".linked-" + os.urandom(8).hex().encode()
            )  # `name` may be the target itself
            os.link(
                names[-1], temporary, src_dir_fd=source, dst_dir_fd=directory,
                follow_symlinks=False,
            )  # fmt: skip
            _remove_entry(directory, name)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.close(source)

    def _hide(self, directory: int) -> None:
        if not self._merges:
            _set_opaque(directory)
            return
        for each in os.listdir(directory):
            _remove_entry(directory, os.fsencode(each))

    def _white_out(self, directory: int, name: bytes) -> None:
        """Remove a file of the layers below; an entry of this layer stays, as image-spec says."""
        if name in (b"", b".", b".."):
            raise ValueError(f"no name of a file: {_shown(_WHITEOUT + name)}")
        if self._merges:
            _remove_entry(directory, name)
        elif (kind := _kind(directory, name)) == stat.S_IFDIR:
            _set_opaque(directory, name)
        elif not kind:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=directory)


def _names(path: bytes) -> list[bytes]:
    names = [name for name in path.split(b"/") if name not in (b"", b".")]
    if b".." in names:
        raise ValueError(f"a name leads upwards: {_shown(path)}")
    if len(names) > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} directories above a file")
    return names


def _shown(name: bytes) -> str:
    return ascii(name.decode(errors="backslashreplace"))[:200]


def _time(entry: TarMember) -> int:
    return min(max(entry.modified, 0), _LATEST)


def _kind(directory: int, name: bytes) -> int:
    """Return the type bits of an entry, 0 if there is none."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return 0


def _remove_entry(directory: int, name: bytes) -> None:
    if _kind(directory, name) == stat.S_IFDIR:
        files.remove_tree(directory, os.fsdecode(name), is_superuser=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _set_opaque(directory: int, name: bytes = b"") -> None:
    opened = os.open(name or b".", _FOLDER | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.setxattr(opened, OPAQUE, b"y")
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise ValueError(
            "the file system of the store has no user extended attributes, which this layer needs; set "
            "XDG_STATE_HOME to a directory on ext4, xfs or btrfs"
        ) from None
    finally:
        os.close(opened)
