"""Writing what a program made to files of the host.

The names are a guest's: every part is made harmless, no link is followed, and nothing that exists is
touched unless that was asked for.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from ...policies.errors import PolicyError
from ...runner.workspace import Artifact

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# What shells, terminals and options might take for something else; a leading dot hides a file.
_ODD = re.compile(r"[^\w.+=@ -]|^[-. ]|[. ]$")
_LONGEST = 200  # bytes of a part, which leaves room for a number


def keep(
    artifacts: Iterable[Artifact], directory: str, *, overwrite: bool = False
) -> Iterator[str]:
    """Write each below `directory`, which is made if it is missing, and yield the path it has now.

    Where a file of that name exists this one gets a number, unless `overwrite`.  Raises PolicyError
    if it cannot be written.
    """
    try:
        for artifact in artifacts:
            os.makedirs(directory, exist_ok=True)
            yield os.path.join(directory, _write(directory, artifact, overwrite=overwrite))
    except OSError as error:
        reason = f"cannot write what the program made to {directory}: {error.strerror}"
        raise PolicyError(reason, "name another directory with --output") from None


def images(artifacts: Iterable[Artifact]) -> tuple[Artifact, ...]:
    """Return those that have no other form: a table in HTML or Markdown is its text once more."""
    return tuple(each for each in artifacts if each.mime not in ("text/html", "text/markdown"))


def _write(directory: str, artifact: Artifact, *, overwrite: bool) -> str:
    *parents, name = map(_harmless, artifact.name.split("/"))
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            place = _enter(place, parent)
        name, descriptor = _create(place, name, overwrite=overwrite)
        with open(descriptor, "wb") as file:
            file.write(artifact.data)
    finally:
        os.close(place)
    return "/".join((*parents, name))


def _harmless(part: str) -> str:
    return _ODD.sub("_", part.encode()[:_LONGEST].decode(errors="ignore")) or "_"


def _enter(place: int, name: str) -> int:
    """Return the directory `name` in `place`, which is closed, and make it if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=place)
        return os.open(name, _DIRECTORY, dir_fd=place)
    finally:
        os.close(place)


def _create(place: int, name: str, *, overwrite: bool) -> tuple[str, int]:
    stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
    number = 1
    while True:
        candidate = name if number == 1 else f"{stem}-{number}{dot}{suffix}"
        try:
            return candidate, os.open(candidate, _NEW, 0o666, dir_fd=place)
        except FileExistsError:
            if overwrite:
                os.unlink(name, dir_fd=place)  # and not what a link there leads to
            else:
                number += 1
