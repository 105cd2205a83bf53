"""`SkillStore`: the skills that were saved or imported, in versions, in the user's state directory.

    kept/NAME@VERSION/     the files of one version, as they are exported
    new/                   what is being written; renamed when it is whole
    trust.json             the trusted digests

A version is never changed: a skill with other files is another version.

`TrustStore`: the skills that a person trusts, each with the digest of its whole tree.  Trust belongs to
files and not to a folder or a name: whatever changes them ends it.

`SkillUsages`: how often the skills of this process were used, and how often that failed.
"""

import contextlib
import difflib
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...policies.errors import SkillError, SkillInvalid, SkillNotFound
from ...policies.policy import MIB, check_limit
from ...runner.requests.result import SandboxResult
from ..user_data import locked, make_private_directory, replace_file, state_directory
from .manifest import FILE, check_name, maker_of
from .skill import Skill, read_skill, skeleton, write_tree

MOST_SKILLS, MOST_VERSIONS, MOST_BYTES = 200, 10, 200 * MIB
_NEARLY = 0.9  # share of equal words of two descriptions, as for tools
_PLACE = re.compile(r"([a-z0-9-]+)@([1-9][0-9]{0,8})")
_WORD = re.compile(r"\w+")


class KeptSkill(NamedTuple):
    """One version of a skill in a store; `used`: when it was last kept or loaded, since the epoch."""

    skill: Skill
    version: int
    used: float


class SkillStore:
    """The kept skills of one user, and the trust in them.  Safe from many threads and processes.

    `directory`: default `cellwright/skills` in $XDG_STATE_HOME, else in ~/.local/state.  `most_skills`,
    `most_versions` of one skill and `most_bytes` of all are its quota: beyond the versions the oldest
    is removed, beyond the others nothing is kept.  Raises SkillError if it cannot be written.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, most_skills: int = MOST_SKILLS,
        most_versions: int = MOST_VERSIONS, most_bytes: int = MOST_BYTES,
    ) -> None:  # fmt: skip
        for name, limit in (("most_skills", most_skills), ("most_versions", most_versions)):
            check_limit(name, limit, whole=True)
        check_limit("most_bytes", most_bytes, whole=True)
        self.trust = TrustStore(directory)
        self.directory = self.trust.directory
        self._kept = self.directory / "kept"
        self._most_skills = most_skills
        self._most_versions = most_versions
        self._most_bytes = most_bytes

    def versions(self, name: str = "") -> tuple[KeptSkill, ...]:
        """Return the versions of one skill, or of all, the newest of each name first.

        Versions whose files became invalid are left out.
        """
        found = []
        for place, named, version in self._places():
            if name in ("", named):
                with contextlib.suppress(SkillError, OSError):
                    used = place.stat().st_mtime
                    found.append(KeptSkill(read_skill(place, named), version, used))
        return tuple(sorted(found, key=lambda each: (each.skill.name, -each.version)))

    def add(self, skill: Skill, *, allow_similar: bool = False) -> KeptSkill:
        """Keep a skill, as the next version if its name is known; return it.

        The same files are kept once.  Raises SkillInvalid for a skill that does not follow the
        specification, or that is like another one (unless `allow_similar`): the same files, nearly the
        same description, or a name that is easily confused; or whose maker adds a version to a skill
        of another maker or of a person.  Raises SkillError beyond the quota.
        """
        if problems := skill.manifest.problems:
            raise SkillInvalid(f"{skill.name}: {problems[0]}", "see `cellwright skills check`")
        with self._changing():
            kept = self.versions()
            own = [each for each in kept if each.skill.name == skill.name]
            if same := next((each for each in own if each.skill.hash == skill.hash), None):
                return same
            _check_maker(skill, own)
            newest = {each.skill.name: each.skill for each in reversed(kept)}
            if not allow_similar:
                _check_new(skill, [each for name, each in newest.items() if name != skill.name])
            surplus = self._surplus(own)
            self._check_quota(skill, newest, [each for each in kept if each not in surplus])
            version = max((each.version for each in own), default=0) + 1
            self._write(skill, version)
            for each in surplus:
                self._remove(self._place(skill.name, each.version))
        place = self._place(skill.name, version)
        written = read_skill(place, skill.name)
        if written.hash != skill.hash:
            raise SkillError(f"{place}: was changed while it was written")
        return KeptSkill(written, version, place.stat().st_mtime)

    def touch(self, skill: Skill) -> None:
        """Note that a kept skill was used now, which defers its expiry."""
        place = Path(skill.place)
        if place.parent == self._kept:
            with contextlib.suppress(OSError):
                os.utime(place)

    def remove(self, name: str, version: int = 0) -> int:
        """Remove a version, or all of a skill, and the trust in them; return their number."""
        with self._changing():
            found = [each for each in self._places() if each[1] == name]
            found = [each for each in found if version in (0, each[2])]
            for place, _, _ in found:
                if version:
                    with contextlib.suppress(SkillError):
                        self.trust.revoke(name, read_skill(place, name).hash)
                self._remove(place)
        if not version:
            self.trust.revoke(check_name(name))
        return len(found)

    def prune(self, max_age_seconds: float) -> tuple[str, ...]:
        """Remove the versions that were not used for that long; return them as NAME@VERSION."""
        check_limit("max_age_seconds", max_age_seconds)
        with self._changing():
            old = [
                place for place, _, _ in self._places()
                if time.time() - place.stat().st_mtime >= max_age_seconds
            ]  # fmt: skip
            for place in old:
                self._remove(place)
        return tuple(place.name for place in old)

    def _places(self) -> list[tuple[Path, str, int]]:
        names = sorted(os.listdir(self._kept)) if self._kept.is_dir() else []
        found = [(name, match) for name in names if (match := _PLACE.fullmatch(name))]
        return [(self._kept / name, match[1], int(match[2])) for name, match in found]

    def _place(self, name: str, version: int) -> Path:
        return self._kept / f"{name}@{version}"

    def _surplus(self, own: list[KeptSkill]) -> list[KeptSkill]:
        """Return the versions that have to go for one more: the oldest, trusted ones last."""
        trusted = self.trust.all()
        by_worth = sorted(
            own,
            key=lambda each: (each.skill.hash in trusted.get(each.skill.name, ()), each.version),
        )
        return by_worth[: max(0, len(own) - self._most_versions + 1)]

    def _check_quota(self, skill: Skill, newest: dict[str, Skill], kept: list[KeptSkill]) -> None:
        if skill.name not in newest and len(newest) >= self._most_skills:
            raise SkillError(
                f"{len(newest)} skills are kept, at most {self._most_skills}",
                "remove some: `cellwright skills remove`, or `cellwright skills prune`",
            )
        total = sum(each.skill.tree.size_bytes for each in kept) + skill.tree.size_bytes
        if total > self._most_bytes:
            raise SkillError(f"the skills would have {total} bytes, at most {self._most_bytes}")

    def _write(self, skill: Skill, version: int) -> None:
        new = self.directory / "new"
        shutil.rmtree(
            new, ignore_errors=True
        )  # left by a process that died; the caller has the lock
        try:
            new.mkdir(0o700)
            made = Path(tempfile.mkdtemp(dir=new), skill.name)
            write_tree(skill.tree, made)
            os.sync()  # so that a name never outlives a power cut without its files
            os.rename(made, self._place(skill.name, version))
        except OSError as error:
            raise SkillError(f"cannot write {new}: {error.strerror}") from None
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _remove(self, place: Path) -> None:
        aside = self.directory / "new"
        aside.mkdir(0o700, exist_ok=True)
        os.rename(place, aside / place.name)
        shutil.rmtree(aside, ignore_errors=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        make_private_directory(self.directory, SkillError)
        self._kept.mkdir(0o700, exist_ok=True)
        with locked(self.directory / "store.lock", SkillError):
            yield


def export_skill(skill: Skill, directory: str | os.PathLike[str]) -> Path:
    """Write a skill into a new folder of its name below `directory`; raises SkillError."""
    folder = Path(directory) / skill.name
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_tree(skill.tree, folder)
    except OSError as error:
        raise SkillError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def newest_of(store: SkillStore, name: str) -> KeptSkill:
    """Return the newest version of a kept skill; raises SkillNotFound."""
    for each in store.versions(name):
        return each
    raise SkillNotFound(f"no skill {name!r} is kept", "see `cellwright skills list`")


def _check_new(skill: Skill, others: list[Skill]) -> None:
    """Raise SkillInvalid if one of the other skills is like this one."""
    for other in others:
        if skeleton(other.name) == skeleton(skill.name):
            raise SkillInvalid(
                f"{skill.name}: the name is easily confused with {other.name!r}",
                "choose another name",
            )
        if _files(skill) and _files(skill) == _files(other):
            raise _alike(skill, other, "has the same files")
        one, two = (_WORD.findall(each.description.lower()) for each in (skill, other))
        if difflib.SequenceMatcher(None, one, two, autojunk=False).ratio() >= _NEARLY:
            raise _alike(
                skill, other, f"has nearly the same description: {other.description[:200]}"
            )


def _check_maker(skill: Skill, own: list[KeptSkill]) -> None:
    maker = maker_of(skill.manifest)
    others = {maker_of(each.skill.manifest) for each in own} - {maker}
    if maker and others:
        raise SkillInvalid(
            f"{skill.name}: kept by another maker, {min(others) or 'a person'}",
            "choose another name",
        )


def _alike(skill: Skill, other: Skill, why: str) -> SkillInvalid:
    hint = f"save it as a version of {other.name}, or pass allow_similar=True (--similar)"
    return SkillInvalid(f"{skill.name}: {other.name} {why}", hint)


def _files(skill: Skill) -> dict[str, bytes]:
    files = skill.tree.files
    return {path: each.content for path, each in files.items() if path != FILE}


_MOST_BYTES = 4 * 1024 * 1024
_MOST_HASHES = 50  # digests kept for one name; the oldest are forgotten
_HASH = re.compile(r"[0-9a-f]{32}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_Trusted = dict[str, list[str]]


class TrustStore:
    """The trusted skills of one user, in a directory that nobody else may write to.

    `directory`: default `cellwright/skills` in $XDG_STATE_HOME, else in ~/.local/state.  Safe from many
    threads and processes.  Raises SkillError if the directory or its file is not this user's alone.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory or state_directory() / "skills")
        self._file = self.directory / "trust.json"

    def is_trusted(self, name: str, hash: str) -> bool:
        return hash in self.all().get(name, ())

    def all(self) -> _Trusted:
        """Return the trusted digests by name."""
        try:
            descriptor = os.open(self._file, _READ)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SkillError(f"cannot read {self._file}: {error.strerror}") from None
        with open(descriptor, "rb") as file:
            _check_owner(self._file, os.fstat(descriptor))
            data = file.read(_MOST_BYTES)
        try:
            return msgspec.json.decode(data, type=_Trusted)
        except ValueError as error:
            hint = "remove it, and trust your skills again"
            raise SkillError(f"{self._file}: damaged: {error}", hint) from None

    def trust(self, reference: str) -> None:
        """Trust `NAME@HASH`; raises SkillInvalid for anything else."""
        name, hash = named(reference)
        with self._changing() as trusted:
            hashes = [each for each in trusted.get(name, ()) if each != hash]
            trusted[name] = [*hashes, hash][-_MOST_HASHES:]

    def revoke(self, name: str, hash: str = "") -> bool:
        """End the trust in one digest of a name, or in all; return whether there was any."""
        with self._changing() as trusted:
            known = trusted.pop(name, [])
            if kept := [each for each in known if hash and each != hash]:
                trusted[name] = kept
        return len(kept) < len(known)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Trusted]:
        """Yield the trusted digests, and write them afterwards, while no other process does."""
        make_private_directory(self.directory, SkillError)
        with locked(self.directory / "trust.lock", SkillError):
            trusted = self.all()
            yield trusted
            data = msgspec.json.format(msgspec.json.encode(trusted), indent=2)
            replace_file(self._file, data)


def named(reference: str) -> tuple[str, str]:
    """Return name and digest of `NAME@HASH`; raises SkillInvalid."""
    name, _, hash = reference.partition("@")
    if not _HASH.fullmatch(hash):
        raise SkillInvalid(
            f"reference: must be NAME@HASH with 32 hexadecimal digits, got {ascii(reference)[:120]}",
            "read the skill with `cellwright skills show NAME`, which prints its reference",
        )
    return check_name(name), hash


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SkillError(f"{path}: others may write to it", "chmod 600, or remove it")


_MOST_CHARACTERS = 20_000  # characters of a traceback, which a guest writes
_FRAME = re.compile(r'File "/skills/([a-z0-9-]{1,64})/')


class SkillUsage(msgspec.Struct, frozen=True):
    """The use of one skill since the process began.

    uses: instructions that were loaded, scripts that were run, and failures of programs
    failures: scripts that did not complete, and programs whose traceback names a file of the skill
    """

    uses: int = 0
    failures: int = 0


class SkillUsages:
    """Counts by the name of a skill.  Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, SkillUsage] = {}

    def of(self, name: str) -> SkillUsage:
        """Return the counts of a skill."""
        with self._lock:
            return self._by_name.get(name, SkillUsage())

    def add(self, name: str, *, failed: bool = False) -> None:
        """Count a use of a skill that exists."""
        with self._lock:
            before = self._by_name.get(name, SkillUsage())
            self._by_name[name] = SkillUsage(before.uses + 1, before.failures + failed)

    def add_failures(self, result: SandboxResult, names: Container[str]) -> None:
        """Count a failed program against those of the skills `names` that its traceback names.

        A program can forge its traceback, so only a statistic may depend on it.
        """
        if not result.ok and result.traceback:
            for name in set(_FRAME.findall(result.traceback[-_MOST_CHARACTERS:])):
                if name in names:
                    self.add(name, failed=True)
