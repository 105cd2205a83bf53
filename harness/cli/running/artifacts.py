"""Artifacts of a program, written to files of the host.

The guest chooses their names: each part of a path is made harmless, no link is followed, and no
existing file is changed unless the caller asks for it.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

from ....policies.errors import PolicyError
from ....runner.cells.workspace import Artifact

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Characters that shells, terminals or options interpret; a leading dot hides a file.
_ODD = re.compile(r"[^\w.+=@ -]|^[-. ]|[. ]$")
_LONGEST = 200  # bytes of a part: NAME_MAX is 255, and a number may follow


def write_artifacts(
    artifacts: Iterable[Artifact], directory: str, *, overwrite: bool = False
) -> Iterator[str]:
    """Write each artifact below `directory`, which is made if it is missing, and yield its path.

    If the file exists, a number is added to the new name; with `overwrite` the file is replaced.
    Raises PolicyError if an artifact cannot be written.
    """
    numbers: dict[
        str, int
    ] = {}  # harmless name -> its last number, because two names may become equal
    try:
        for artifact in artifacts:
            os.makedirs(directory, exist_ok=True)
            path = _write(directory, artifact, numbers, overwrite=overwrite)
            yield os.path.join(directory, path)
    except OSError as error:
        why = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        reason = f"cannot write artifacts to {directory}: {why}"
        raise PolicyError(reason, "name another directory with --output") from None


def without_text_forms(artifacts: Iterable[Artifact]) -> tuple[Artifact, ...]:
    """Return the artifacts but HTML and Markdown, which only repeat the text of a displayed value."""
    return tuple(each for each in artifacts if each.mime not in ("text/html", "text/markdown"))


def _write(directory: str, artifact: Artifact, numbers: dict[str, int], *, overwrite: bool) -> str:
    *parents, name = map(_harmless, artifact.name.split("/"))
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            folder = _enter(folder, parent)
        wanted = "/".join((*parents, name))
        number = numbers.get(wanted, 0)
        name, numbers[wanted], descriptor = _create(folder, name, number, overwrite=overwrite)
        with open(descriptor, "wb") as file:
            file.write(artifact.data)
    finally:
        os.close(folder)
    return "/".join((*parents, name))


def _harmless(part: str) -> str:
    return _ODD.sub("_", part.encode()[:_LONGEST].decode(errors="ignore")) or "_"


def _enter(folder: int, name: str) -> int:
    """Return a descriptor of the directory `name` in `folder`, made if missing; close `folder`."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        return os.open(name, _DIRECTORY, dir_fd=folder)
    finally:
        os.close(folder)


def _create(folder: int, name: str, last: int, *, overwrite: bool) -> tuple[str, int, int]:
    """Create the file with the first free number after `last`; return name, number and descriptor."""
    stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
    number = 1 if overwrite else last + 1
    while True:
        candidate = name if number == 1 else f"{stem}-{number}{dot}{suffix}"
        try:
            return candidate, number, os.open(candidate, _NEW, 0o666, dir_fd=folder)
        except FileExistsError:
            if overwrite:
                os.unlink(name, dir_fd=folder)  # removes a link, not its target
            else:
                number += 1
