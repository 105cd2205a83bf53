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
    numbers: dict[str, int] = {}  # the last one, by harmless name: many names may become the same
    try:
        for artifact in artifacts:
            os.makedirs(directory, exist_ok=True)
            path = _write(directory, artifact, numbers, overwrite=overwrite)
            yield os.path.join(directory, path)
    except OSError as error:
        reason = f"cannot write what the program made to {directory}: {error.strerror}"
        raise PolicyError(reason, "name another directory with --output") from None


def images(artifacts: Iterable[Artifact]) -> tuple[Artifact, ...]:
    """Return those that have no other form: a table in HTML or Markdown is its text once more."""
    return tuple(each for each in artifacts if each.mime not in ("text/html", "text/markdown"))


def _write(directory: str, artifact: Artifact, numbers: dict[str, int], *, overwrite: bool) -> str:
    *parents, name = map(_harmless, artifact.name.split("/"))
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            place = _enter(place, parent)
        wanted = "/".join((*parents, name))
        number = numbers.get(wanted, 0)
        name, numbers[wanted], descriptor = _create(place, name, number, overwrite=overwrite)
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


def _create(place: int, name: str, last: int, *, overwrite: bool) -> tuple[str, int, int]:
    """Return the name that the file has now, its number, of those after `last`, and its descriptor."""
    stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
    number = 1 if overwrite else last + 1
    while True:
        candidate = name if number == 1 else f"{stem}-{number}{dot}{suffix}"
        try:
            return candidate, number, os.open(candidate, _NEW, 0o666, dir_fd=place)
        except FileExistsError:
            if overwrite:
                os.unlink(name, dir_fd=place)  # and not what a link there leads to
            else:
                number += 1
