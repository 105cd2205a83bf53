"""A directory of the host as an image: its archive, and a stamp that changes with it.

Files of the caller's own id belong to root in the image.  Other ids stay, but those above 65,535 become
65534 (nobody).
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator

from ....policies.errors import PolicyError
from .image_sources import FoundImage, LayerBlob
from .layer_work import ArchivePart, ImageLimits
from .tree_archive import TreeArchive, TreeLimits

_LAYOUT_PARTS = ("index.json", "oci-layout")
_NOBODY, _IDS = 65534, 65536


@contextlib.contextmanager
def opened_tree(path: str, limits: ImageLimits) -> Iterator[FoundImage]:
    """Open a directory as an image of one layer; a thread writes its archive into a pipe.

    Raises PolicyError for one that cannot be read, when the image was read to its end.
    """
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    read, write = os.pipe2(os.O_CLOEXEC)
    failed: list[Exception] = []

    def fill() -> None:
        try:
            TreeArchive(root, write, TreeLimits(*limits), _owner, is_upper=False).write()
        except (OSError, ValueError) as error:
            failed.append(error)
        finally:
            os.close(write)

    thread = threading.Thread(target=fill, name="cellwright-tree", daemon=True)
    thread.start()
    try:
        try:
            yield FoundImage(None, (LayerBlob("", ArchivePart(read, 0, -1, path)),))
        finally:
            os.close(read)  # a thread that still writes gets EPIPE
            thread.join()
            os.close(root)
    except PolicyError:
        if failed and not isinstance(failed[0], BrokenPipeError):
            raise PolicyError(f"image: {path}: {failed[0]}") from None
        raise
    if failed and not isinstance(failed[0], BrokenPipeError):
        raise PolicyError(f"image: {path}: {failed[0]}")


def _owner(status: os.stat_result) -> tuple[int, int]:
    return _inside(status.st_uid, os.geteuid()), _inside(status.st_gid, os.getegid())


def _inside(number: int, own: int) -> int:
    return 0 if number == own else number if number < _IDS else _NOBODY


def stamp_of(path: str, most: int) -> str:
    """Return a digest of names, sizes, modes and times of a directory, a layout or a file.

    Raises OSError, and PolicyError for a directory with more than `most` files.
    """
    if os.path.realpath(path) == "/":
        raise PolicyError("image: / is the host itself", "name a directory with a root file system")
    found = hashlib.sha256()
    if not os.path.isdir(path):
        _add(found, path, os.stat(path))
    elif os.path.exists(os.path.join(path, _LAYOUT_PARTS[1])):
        for name in _LAYOUT_PARTS:
            _add(found, name, os.stat(os.path.join(path, name)))
    else:
        waiting = [path]
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    most -= 1
                    if most < 0:
                        raise PolicyError(f"image: {path} has too many files")
                    _add(found, entry.path, entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return found.hexdigest()


def _add(found: "hashlib._Hash", name: str, status: os.stat_result) -> None:
    told = (status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns,
            status.st_ctime_ns, status.st_ino)  # fmt: skip
    found.update(os.fsencode(name) + repr(told).encode())
