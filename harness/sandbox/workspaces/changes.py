"""Changes of named workspaces that wait for review: the files before and after, compared."""

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from ....runner.workspace import Executable

_ID_CHARACTERS = 32  # 128 bits: a program cannot make two changes of one id


class FileVersion(msgspec.Struct, frozen=True):
    """One version of a file of a workspace."""

    size_bytes: int
    sha256: str
    executable: bool


class FileChange(msgspec.Struct, frozen=True):
    """A file that a pending change adds (`before` is None), changes or removes (`after` is None).

    A file of which only the executable bit differs is changed.
    """

    path: str
    kind: Literal["added", "changed", "removed"]
    before: FileVersion | None
    after: FileVersion | None


class WorkspaceDiff(msgspec.Struct, frozen=True):
    """The difference that committing a workspace makes, by path.

    id: names exactly this difference, for `commit` and `discard`; empty if no change is pending
    """

    name: str
    id: str
    changes: tuple[FileChange, ...]

    @property
    def added(self) -> tuple[FileChange, ...]:
        return self._of_kind("added")

    @property
    def changed(self) -> tuple[FileChange, ...]:
        return self._of_kind("changed")

    @property
    def removed(self) -> tuple[FileChange, ...]:
        return self._of_kind("removed")

    def _of_kind(self, kind: str) -> tuple[FileChange, ...]:
        return tuple(each for each in self.changes if each.kind == kind)


def change_id(before: bytes, after: bytes) -> str:
    """Return the id of the change from one archive to another."""
    digests = hashlib.sha256(before).digest() + hashlib.sha256(after).digest()
    return hashlib.sha256(digests).hexdigest()[:_ID_CHARACTERS]


def changes_between(
    before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> tuple[FileChange, ...]:
    """Return the files that differ in content or in the executable bit."""
    return tuple(
        change
        for path in sorted(before.keys() | after.keys())
        if (change := _change(path, before.get(path), after.get(path)))
    )


def _change(path: str, before: bytes | None, after: bytes | None) -> FileChange | None:
    if before is None or after is None:
        kind: Literal["added", "removed"] = "added" if before is None else "removed"
        return FileChange(path, kind, _version(before), _version(after))
    if before == after and _is_executable(before) == _is_executable(after):
        return None
    return FileChange(path, "changed", _version(before), _version(after))


def _version(content: bytes | None) -> FileVersion | None:
    if content is None:
        return None
    digest = hashlib.sha256(content).hexdigest()
    return FileVersion(len(content), digest, _is_executable(content))


def _is_executable(content: bytes) -> bool:
    return isinstance(content, Executable)
