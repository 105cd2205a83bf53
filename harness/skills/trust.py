"""`TrustStore`: the skills that a person trusts, each with the digest of its whole tree.

Trust belongs to files and not to a folder or a name: whatever changes them ends it.
"""

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...policies.errors import SkillError, SkillInvalid
from ..state import make_private_directory, state_directory
from .manifest import check_name

_MOST_BYTES = 4 * 1024 * 1024
_MOST_HASHES = 50  # of one name; the oldest are forgotten
_HASH = re.compile(r"[0-9a-f]{32}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
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
        with open(os.open(self.directory / "trust.lock", _LOCK, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            trusted = self.all()
            yield trusted
            descriptor, new = tempfile.mkstemp(dir=self.directory)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(trusted), indent=2))
                file.flush()
                os.fsync(descriptor)
            os.rename(new, self._file)


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
