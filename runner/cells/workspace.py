"""The files of a cell, seen from outside through a held descriptor of its /workspace.

A guest made the content and may be changing it at this moment: no link is followed, only regular
files are opened, and entries, depth, bytes and time are bounded.  Sparse files count with their
apparent size.
"""

import errno
import fnmatch
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ...policies.errors import BudgetExceeded, WorkspaceError
from ..concurrency import STEPS_PER_SECOND, Budget

_CHUNK = 1024 * 1024
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MOST_LEVELS = 32  # nested directories
_ENTRIES = 20_000
# Longest path below /workspace. With `/workspace/` and a NUL it is PATH_MAX (limits.h), and the next
# cell opens files by their whole path. With chdir(2) a program can make longer paths.
MOST_PATH_BYTES = 4096 - len("/workspace/") - 1
PATH_CHARACTERS = 4 * 1024 * 1024  # bytes of all paths together, which are kept in memory
_SECONDS = 5.0
_MOST_UNCOLLECTED = 100  # listed one by one
_COLLECT_SECONDS = 5.0
_TESTS_PER_STEP = 100  # comparisons of a character with a part of a glob, 5 ns each
_HASHED_BYTES = 64 * 1024 * 1024  # hashed in one look; further files get no hash


class WorkspaceFile(msgspec.Struct, frozen=True):
    """A regular file below /workspace.  `sha256` is empty if it was not computed."""

    path: str
    size_bytes: int
    sha256: str = ""


class Artifact(msgspec.Struct, frozen=True):
    """A product of a program: a collected file, or a value with a picture of itself."""

    name: str
    mime: str
    data: bytes

    def __repr__(self) -> str:
        """Return one line without the content, which may have megabytes."""
        return f"Artifact(name={self.name!r}, mime={self.mime!r}, {len(self.data):,} bytes)"


class Uncollected(msgspec.Struct, frozen=True):
    """A file that `collect` matched and that is not among the artifacts, and `why`.

    `path` is empty for files that cannot be named: they were not listed, or there are too many.
    """

    path: str
    size_bytes: int
    why: str


class Executable(bytes):
    """The content of a file that may be executed."""


class KeptWorkspace(msgspec.Struct, frozen=True):
    """The fate of a named workspace: `saved`, `staged` as a change that waits for review, `unchanged`,
    `removed`, or unchanged because saving was `refused`, and `why`."""

    name: str
    state: Literal["saved", "staged", "unchanged", "removed", "refused"]
    why: str = ""
    size_bytes: int = 0
    files: int = 0


class FileState(NamedTuple):
    """The attributes that tell that a file has changed."""

    size_bytes: int
    modified_ns: int
    inode: int
    executable: bool


Listing = dict[str, FileState]


def _ignore(_: str) -> None:
    """The default callback: does nothing."""


def list_files(
    workspace: int, leave_out: Callable[[str], None] = _ignore,
    pass_over: Callable[[str], None] = _ignore,
) -> Listing:  # fmt: skip
    """Return the regular files by path, as many as the bounds allow; files with names that are not
    UTF-8 are left out.  `leave_out` is called with the reason for each omission, `pass_over` with the
    path of each link and special file."""
    return dict(_walk(workspace, _ENTRIES, leave_out, pass_over))


def list_all_files(workspace: int, most_entries: int | None = None) -> Listing:
    """Return every regular file by path; raises WorkspaceError where `list_files` would leave one
    out.  With more entries the look may take more time and memory, in proportion."""

    def refuse(why: str) -> None:
        raise WorkspaceError(f"cannot tell all files: {why}")

    return dict(_walk(workspace, most_entries or _ENTRIES, refuse))


def content_of(workspace: int, path: str, seen: FileState) -> bytes:
    """Return the content of a listed file, as an Executable if it is one; raises WorkspaceError."""
    content = read_file(workspace, path, seen.size_bytes)
    return Executable(content) if seen.executable else content


def room(workspace: int) -> int:
    """Return how many bytes the workspace can hold, as the kernel says: files that together claim
    more are sparse, or are one file with many names."""
    held = os.fstatvfs(workspace)
    return held.f_frsize * held.f_blocks


def changed(workspace: int, before: Listing, after: Listing) -> tuple[WorkspaceFile, ...]:
    """Return the files of `after` that differ from `before`, with their hashes."""
    budget = _HASHED_BYTES
    found = []
    for path, seen in sorted(after.items()):
        if before.get(path) != seen:
            budget -= seen.size_bytes
            digest = _hash(workspace, path, seen.size_bytes) if budget >= 0 else ""
            found.append(WorkspaceFile(path, seen.size_bytes, digest))
    return tuple(found)


def collect(
    workspace: int, listing: Listing, patterns: Sequence[str], limit_bytes: int, budget: Budget,
    given: Mapping[str, bytes] | None = None, others: Sequence[str] = (),
) -> tuple[tuple[Artifact, ...], tuple[Uncollected, ...]]:  # fmt: skip
    """Return the files whose path matches one of `patterns`, together at most `limit_bytes`, and
    the matching files and `others` that are not returned; once the budget is used up, one entry for
    all unmatched files.  Files with the content in `given` are in neither."""
    import mimetypes  # takes 5 ms, and is rarely needed

    artifacts: list[Artifact] = []
    left_out: list[Uncollected] = []
    room = limit_bytes
    for path in sorted([*listing, *others]):
        try:
            if not _matches(path, patterns, budget):
                continue
        except BudgetExceeded as exceeded:
            left_out.insert(0, Uncollected("", 0, exceeded.what))
            break
        if (seen := listing.get(path)) is None:
            left_out.append(Uncollected(path, 0, "it is a link or a special file"))
            continue
        if _is_unchanged(workspace, path, seen, (given or {}).get(path)):
            continue
        if seen.size_bytes > room:
            why = f"limits.artifact_bytes is {limit_bytes}, of which {room} are left"
            left_out.append(Uncollected(path, seen.size_bytes, why))
            continue
        # Guessed from an absolute path, because a name that looks like a data: URL (RFC 2397) would
        # choose its own type.
        mime = mimetypes.guess_type(f"/{path}")[0] or "application/octet-stream"
        try:
            data = read_file(workspace, path, seen.size_bytes)
        except WorkspaceError as error:  # the file changed meanwhile
            left_out.append(Uncollected(path, seen.size_bytes, error.what))
            continue
        room -= seen.size_bytes
        artifacts.append(Artifact(path, mime, data))
    return tuple(artifacts), _listed(left_out)


def _is_unchanged(workspace: int, path: str, seen: FileState, content: bytes | None) -> bool:
    if content is None or len(content) != seen.size_bytes:
        return False
    try:
        return read_file(workspace, path, seen.size_bytes) == content
    except WorkspaceError:
        return False


def collecting_budget(cancel: int) -> Budget:
    """Return the budget of matching globs, which ends early once the descriptor `cancel` is
    readable."""
    steps = _COLLECT_SECONDS * STEPS_PER_SECOND
    return Budget("collecting files", steps, seconds=_COLLECT_SECONDS, cancel=cancel)


def _matches(path: str, patterns: Sequence[str], budget: Budget) -> bool:
    """Return whether a glob matches.  At each character of a path fnmatch tries only the longest
    part of a glob: its asterisks are atomic groups."""
    for pattern in patterns:
        budget.spend(1 + len(path) * len(pattern) // _TESTS_PER_STEP)
        if fnmatch.fnmatchcase(path, pattern):
            return True
    return False


def _listed(left_out: list[Uncollected]) -> tuple[Uncollected, ...]:
    told, rest = left_out[:_MOST_UNCOLLECTED], left_out[_MOST_UNCOLLECTED:]
    if rest:
        told.append(Uncollected("", sum(each.size_bytes for each in rest), f"{len(rest)} more"))
    return tuple(told)


def read_file(workspace: int, path: str, limit_bytes: int) -> bytes:
    """Return the content of a regular file; raises WorkspaceError."""
    return b"".join(read_chunks(workspace, path, limit_bytes))


def _hash(workspace: int, path: str, size: int) -> str:
    import hashlib  # loads OpenSSL, which a client of a daemon does not need

    digest = hashlib.sha256()
    try:
        for chunk in read_chunks(workspace, path, size):
            digest.update(chunk)
    except WorkspaceError:
        return ""  # the file changed meanwhile
    return digest.hexdigest()


def read_chunks(workspace: int, path: str, limit_bytes: int) -> Iterator[bytes]:
    """Yield the content of a regular file, at most 1 MiB at once; raises WorkspaceError."""
    descriptor = _open(workspace, path)
    try:
        if os.fstat(descriptor).st_size > limit_bytes:
            raise WorkspaceError(f"{path!r} is larger than {limit_bytes} bytes")
        left = limit_bytes
        while left > 0 and (chunk := os.read(descriptor, min(left, _CHUNK))):
            left -= len(chunk)
            yield chunk
    finally:
        os.close(descriptor)


def _open(workspace: int, path: str) -> int:
    from ..kernel.file_calls import open_beneath

    try:
        descriptor = open_beneath(workspace, os.fsencode(path), _FLAGS)
    except OSError as error:
        is_outside = error.errno == errno.EXDEV  # openat2(2) with RESOLVE_BENEATH
        why = "it must stay below /workspace" if is_outside else error.strerror
        hint = "give it relative to /workspace, without .." if is_outside else ""
        raise WorkspaceError(f"cannot read {path!r}: {why}", hint) from None
    except ValueError as error:  # a NUL, a lone surrogate
        raise WorkspaceError(f"cannot read {path!r}: {error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WorkspaceError(f"cannot read {path!r}: it is not a regular file")
    return descriptor


def _walk(
    workspace: int,
    most_entries: int,
    leave_out: Callable[[str], None],
    pass_over: Callable[[str], None] = _ignore,
) -> Iterator[tuple[str, FileState]]:
    """Yield the regular files; `leave_out` is called with the reason for each omission, `pass_over`
    with the path of whatever is neither a regular file nor a directory."""
    entries = characters = 0
    share = most_entries / _ENTRIES
    deadline = time.monotonic() + share * _SECONDS
    directories = deque([("", 0)])
    while directories:
        path, depth = directories.popleft()
        for entry in _scan(workspace, path, leave_out):
            name = f"{path}/{entry.name}" if path else entry.name
            entries, characters = entries + 1, characters + len(name)
            too_many = entries > most_entries or characters > share * PATH_CHARACTERS
            if too_many or time.monotonic() > deadline:
                return leave_out("there are too many for a look")
            if not _is_utf8(name):
                leave_out("a name that is not UTF-8")
            elif len(os.fsencode(name)) > MOST_PATH_BYTES:
                leave_out(f"a path of more than {MOST_PATH_BYTES} bytes")
            elif not entry.is_dir(follow_symlinks=False):
                if seen := _regular(entry):
                    yield name, seen
                else:
                    pass_over(name)
            elif depth < MOST_LEVELS:
                directories.append((name, depth + 1))
            else:
                leave_out(f"more than {MOST_LEVELS} levels")
    return None


def _scan(
    workspace: int, path: str, leave_out: Callable[[str], None]
) -> Iterator["os.DirEntry[str]"]:
    from ..kernel.file_calls import open_beneath

    try:
        descriptor = open_beneath(workspace, os.fsencode(path) or b".", _FLAGS | os.O_DIRECTORY)
    except OSError as error:  # the file was removed or replaced
        return leave_out(f"{path!r}: {error.strerror}")
    try:
        with os.scandir(descriptor) as scanned:
            yield from scanned
    finally:
        os.close(descriptor)


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _regular(entry: "os.DirEntry[str]") -> FileState | None:
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    executable = bool(found.st_mode & stat.S_IXUSR)
    return FileState(found.st_size, found.st_mtime_ns, found.st_ino, executable)
