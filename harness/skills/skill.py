"""`Skill`: one skill in memory: its manifest and its files, with the digest of both.

`SkillTree`: the files of a skill in memory, read once through descriptors.

The hash, the text for a model and the files in cells are made from the same bytes: a change of the
folder after it was read has no effect. A folder to read is hostile: it can be huge, deep, endless, and
change meanwhile.
"""

import contextlib
import errno
import hashlib
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from ...policies.errors import SkillError, SkillInvalid
from ...policies.policy import MIB
from ..text.hidden import first_hidden
from .manifest import FILE, SkillManifest, read_manifest, write_manifest

MOST_FILES, MOST_FILE_BYTES, MOST_BYTES = 500, MIB, 20 * MIB
_MOST_ENTRIES = 2 * MOST_FILES  # directories count
_DEEPEST = 8
_LONGEST_PATH = 200
_DIGITS = 32  # hexadecimal digits of SHA-256: 128 bits, too many to find a second tree
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BYTECODE = (".pyc", ".pyo", ".pyd", ".so")  # Python imports these without a source to read
# Bytecode begins with a two-byte number of about 3000 to 4000 and \r\n (importlib).
_MAGIC_SECOND, _MAGIC_END = range(0x0B, 0x10), b"\r\n"


class SkillFile(NamedTuple):
    content: bytes
    is_executable: bool = False


class SkillTree:
    """The files of a skill by path.  Raises SkillInvalid unless all of them may be in a skill."""

    def __init__(self, files: Mapping[str, SkillFile | bytes]) -> None:
        self.files = {
            path: each if isinstance(each, SkillFile) else SkillFile(each)
            for path, each in sorted(files.items())
        }
        _check_paths(self.files)
        if len(self.files) > MOST_FILES:
            raise _too_many()
        for path, file in self.files.items():
            _check_content(path, file.content)
        if self.size_bytes > MOST_BYTES:
            raise SkillInvalid(f"the files have more than {MOST_BYTES} bytes")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SkillTree) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def hash(self) -> str:
        """The digest of all paths, modes and contents."""
        told = hashlib.sha256(b"cellwright skill 1\n")
        for path, file in self.files.items():
            mode = "755" if file.is_executable else "644"
            told.update(f"{mode} {hashlib.sha256(file.content).hexdigest()} {path}\n".encode())
        return told.hexdigest()[:_DIGITS]

    @cached_property
    def size_bytes(self) -> int:
        return sum(len(each.content) for each in self.files.values())


def read_tree(folder: str | os.PathLike[str]) -> SkillTree:
    """Return the files below a folder, which must not be a link.

    Raises SkillInvalid for anything that may not be in a skill, SkillError if it cannot be read.
    """
    try:
        with _opened(folder, _DIRECTORY) as top:
            return SkillTree(dict(_Reading().below(top, "", 1)))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise SkillInvalid(f"{folder}: not a directory, or a link") from None
        raise SkillError(f"cannot read {folder}: {error.strerror}") from None


def write_tree(tree: SkillTree, folder: Path) -> None:
    """Write the files into a new directory; raises OSError."""
    folder.mkdir(0o700)
    for path, file in tree.files.items():
        place = folder / path
        place.parent.mkdir(0o755, parents=True, exist_ok=True)
        mode = 0o755 if file.is_executable else 0o644
        with open(os.open(place, _NEW, mode), "wb") as written:
            os.fchmod(written.fileno(), mode)  # independent of the umask, because modes are hashed
            written.write(file.content)


@contextlib.contextmanager
def _opened(
    path: str | os.PathLike[str], flags: int, directory: int | None = None
) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Reading:
    """Reads one tree within its limits, which hold before anything more is read."""

    def __init__(self) -> None:
        self._entries = 0
        self._bytes = 0

    def below(self, directory: int, above: str, depth: int) -> Iterator[tuple[str, SkillFile]]:
        if depth > _DEEPEST:
            raise SkillInvalid(f"{above}: more than {_DEEPEST} directories deep")
        with os.scandir(directory) as entries:
            for entry in entries:  # one at a time, because the list may be endless
                self._entries += 1
                if self._entries > _MOST_ENTRIES:
                    raise _too_many()
                path = above + entry.name
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    with _opened(entry.name, _DIRECTORY, directory) as inner:
                        yield from self.below(inner, f"{path}/", depth + 1)
                else:
                    yield path, self._file(directory, entry.name, path, found)

    def _file(self, directory: int, name: str, path: str, seen: os.stat_result) -> SkillFile:
        _check_kind(
            path, seen
        )  # before the file is opened, because opening a device can have effects
        with _opened(name, _FILE, directory) as descriptor:
            found = os.fstat(descriptor)
            _check_kind(path, found)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MOST_FILE_BYTES + 1)
        self._bytes += len(content)
        if self._bytes > MOST_BYTES:
            raise SkillInvalid(f"the files have more than {MOST_BYTES} bytes")
        return SkillFile(content, bool(found.st_mode & 0o111))


def _check_kind(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SkillInvalid(f"{path!a}: a link, or another special file")
    if found.st_nlink != 1:
        raise SkillInvalid(f"{path!a}: has {found.st_nlink} names (hard links)")
    if found.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        raise SkillInvalid(f"{path!a}: is set-uid, set-gid or sticky")


def _check_content(path: str, content: bytes) -> None:
    if len(content) > MOST_FILE_BYTES:
        raise SkillInvalid(f"{path!a}: more than {MOST_FILE_BYTES} bytes")
    is_code = len(content) > 3 and content[1] in _MAGIC_SECOND and content[2:4] == _MAGIC_END
    if path.lower().endswith(_BYTECODE) or "__pycache__" in path.split("/") or is_code:
        raise SkillInvalid(f"{path!a}: compiled code, which cannot be reviewed")


def _check_paths(files: Mapping[str, SkillFile]) -> None:
    seen: dict[str, str] = {}
    for path in files:
        _check_path(path)
        parts = PurePosixPath(path).parts
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            if end < len(parts) and part in files:
                raise SkillInvalid(f"{part!a}: both a file and a directory")
            if seen.setdefault(part.casefold(), part) != part:
                raise SkillInvalid(f"{part!a}: differs from another path in case alone")


def _check_path(path: str) -> None:
    parts = path.split("/")
    # Editors, and the shared files of cells, end the name of a half-written file in ~.
    is_plain = all(
        part not in ("", ".", "..") and part == part.strip() and part[-1] != "~" for part in parts
    )
    if not is_plain or "\\" in path or len(path) > _LONGEST_PATH or len(parts) > _DEEPEST:
        raise SkillInvalid(f"{ascii(path)[:300]}: not a path of a skill")
    if not path.isprintable() or first_hidden(path):
        raise SkillInvalid(f"{ascii(path)[:300]}: has a hidden character")
    if not unicodedata.is_normalized("NFKC", path):
        raise SkillInvalid(f"{ascii(path)[:300]}: not in Unicode's normal form NFKC")


def _too_many() -> SkillInvalid:
    return SkillInvalid(f"more than {MOST_FILES} files")


_OTHER_FILE = "skill.md"  # some agents use this name
_LOOKS_LIKE = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s", "-": ""})


class Skill(msgspec.Struct, frozen=True):
    """A skill that was read whole.

    place: the folder that it was read from, for people; the files are those of `tree`
    """

    manifest: SkillManifest
    tree: SkillTree
    place: str = ""

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def description(self) -> str:
        return self.manifest.description

    @property
    def hash(self) -> str:
        """The digest of all its files, 32 hexadecimal digits."""
        return self.tree.hash

    @property
    def reference(self) -> str:
        """The argument of `cellwright skills trust`."""
        return f"{self.name}@{self.hash}"


def read_skill(folder: str | os.PathLike[str], name: str = "") -> Skill:
    """Return the skill in a folder; `name`: what the folder should be called, default its own name.

    Raises SkillInvalid, and SkillError if it cannot be read.
    """
    try:
        return skill_of(read_tree(folder), name or Path(folder).absolute().name, str(folder))
    except SkillInvalid as error:
        raise SkillInvalid(f"{ascii(str(folder))[1:-1]}: {error.what}", error.hint) from None


def skill_of(tree: SkillTree, folder: str = "", place: str = "") -> Skill:
    """Return the skill that a tree holds; raises SkillInvalid."""
    file = tree.files.get(FILE) or tree.files.get(_OTHER_FILE)
    if file is None:
        raise SkillInvalid(f"has no {FILE}")
    return Skill(read_manifest(file.content, folder), tree, place)


def make_skill(manifest: SkillManifest, files: dict[str, SkillFile | bytes]) -> Skill:
    """Return a new skill with a SKILL.md of `manifest` and these files; raises SkillInvalid."""
    if any(path.lower() == _OTHER_FILE for path in files):
        raise SkillInvalid(f"files: {FILE} is written from name, description and body")
    return skill_of(SkillTree({FILE: write_manifest(manifest), **files}), manifest.name)


def skeleton(name: str) -> str:
    """Return a name as it looks at a glance: names of one skeleton are easily confused."""
    return name.replace("rn", "m").replace("vv", "w").replace("cl", "d").translate(_LOOKS_LIKE)
