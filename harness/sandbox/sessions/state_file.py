"""The file of a paused session: pieces that are sealed with the secret of its token, in order.

Each piece is encrypted (AES-256-GCM) if there is a key, and else carries an HMAC.  Without the token
nobody can forge, change, reorder, shorten or extend the file unnoticed.  All of it is verified before
any of it is used.

The errors that name the difference that keeps a paused session from being resumed.

The check of the settings of paused sessions.
"""

import hashlib
import hmac
import os
import re
import secrets
import struct
from collections.abc import Iterator
from typing import NamedTuple, Self

from ....policies.errors import PauseDiffers, PauseError, PolicyError
from ....policies.policy import check_limit
from ....runner.settings import PauseSettings
from ...user_data import Cipher, WrongKey, key_of

HEADER, FILES, MEMORY, END = b"H", b"F", b"M", b"E"  # the kinds of pieces, which come in this order
_MAGIC = b"cellwright paused session 1\n"
_PREFIX = struct.Struct("=28s?d")  # fields: magic, is encrypted, kept until
_LENGTH = struct.Struct("=I")
_NUMBER = struct.Struct("=Q")
MOST_PIECE_BYTES = 64 << 20
_TAG_BYTES = 32
_SEAL_BYTES = 64  # bytes that sealing adds at most
_TOKEN = re.compile(r"cwp_([0-9a-f]{32})_([0-9a-f]{64})", re.ASCII)


class PauseToken(NamedTuple):
    """Names a paused session; with it, and the key if there is one, any caller resumes the session."""

    id: str
    secret: bytes

    @classmethod
    def new(cls) -> Self:
        return cls(secrets.token_hex(16), secrets.token_bytes(32))

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return the token of a text; raises PauseError, without it."""
        found = _TOKEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise PauseError("token: is no token of a paused session", "session.pause() returns it")
        return cls(found[1], bytes.fromhex(found[2]))

    def __str__(self) -> str:
        return f"cwp_{self.id}_{self.secret.hex()}"

    def __repr__(self) -> str:
        return f"<PauseToken {self.id}>"


class _Seal:
    """Seals the pieces of one file, each bound to its place in that file."""

    def __init__(self, token: PauseToken, key: bytes | None, until: float) -> None:
        self._prefix = _PREFIX.pack(_MAGIC, key is not None, until)
        self._key = hmac.digest(token.secret, b"paused session", "sha256")
        self._cipher = None
        if key is not None:
            own = hmac.digest(key, self._key, "sha256")
            self._cipher = Cipher(own, "pauses.key: an encrypted paused session")
        self._about = token.id.encode() + self._prefix
        self._number = 0

    @property
    def prefix(self) -> bytes:
        return self._prefix

    def _bound(self) -> bytes:
        self._number += 1
        return self._about + _NUMBER.pack(self._number)

    def seal(self, kind: bytes, data: bytes) -> tuple[bytes, ...]:
        """Return a sealed piece in parts, because joining them would copy many megabytes."""
        if self._cipher:
            return (self._cipher.seal(kind + data, self._bound()),)
        return self._tag(kind, data), kind, data

    def open(self, sealed: bytes) -> memoryview:
        """Return the data, which begins with its kind; raises WrongKey."""
        if self._cipher:
            return memoryview(self._cipher.open(sealed, self._bound()))
        data = memoryview(sealed)[_TAG_BYTES:]
        if not hmac.compare_digest(self._tag(data), sealed[:_TAG_BYTES]):
            raise WrongKey
        return data

    def _tag(self, *parts: bytes | memoryview) -> bytes:
        tag = hmac.new(self._key, self._bound(), hashlib.sha256)
        for each in parts:
            tag.update(each)
        return tag.digest()


class StateWriter:
    """Writes the file of a paused session, up to a number of bytes."""

    def __init__(
        self, file: int, token: PauseToken, key: bytes | None, until: float, most_bytes: int
    ) -> None:
        self._file = file
        self._seal = _Seal(token, key, until)
        self.left = most_bytes
        self._write(self._seal.prefix)

    def add(self, kind: bytes, data: bytes = b"") -> None:
        """Write a piece; raises PauseError if there is no room for it."""
        if len(data) > MOST_PIECE_BYTES:
            raise PauseError("pause: the list of its files is too long to be kept")
        parts = self._seal.seal(kind, data)
        self._write(_LENGTH.pack(sum(map(len, parts))), *parts)

    def _write(self, *parts: bytes) -> None:
        self.left -= sum(map(len, parts))
        if self.left < 0:
            raise PauseError(
                "pause: the session has more memory and files than may be kept",
                "raise most_bytes, quota_bytes or sandbox_bytes of pauses, or resume what was paused",
            )
        for each in parts:
            rest = memoryview(each)
            while rest:
                rest = rest[os.write(self._file, rest) :]


def is_encrypted_until(file: int) -> tuple[bool, float]:
    """Return the header of a file, which is verified with its pieces; raises PauseError."""
    prefix = os.pread(file, _PREFIX.size, 0)
    if len(prefix) != _PREFIX.size or not prefix.startswith(_MAGIC):
        raise PauseError(
            "token: the state of this paused session is of another version, or damaged",
            is_final=True,
        )
    _, is_encrypted, until = _PREFIX.unpack(prefix)
    return bool(is_encrypted), float(until)


def pieces(
    file: int, token: PauseToken, key: bytes | None, until: float
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the pieces of a file with their kinds, each verified; raises PauseError after the last one
    too, if the file does not end there."""
    seal, at, size = _Seal(token, key, until), _PREFIX.size, os.fstat(file).st_size
    if os.pread(file, at, 0) != seal.prefix:
        raise _damaged()
    kind = b""
    while kind != END:
        length = os.pread(file, _LENGTH.size, at)
        at += len(length)
        expected = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        if not 0 < expected <= MOST_PIECE_BYTES + _SEAL_BYTES or at + expected > size:
            raise _damaged()
        try:
            data = seal.open(os.pread(file, expected, at))
        except WrongKey:
            raise _damaged() from None
        at += expected
        kind = bytes(data[:1])
        yield kind, data[1:]
    if at != size:
        raise _damaged()


def _damaged() -> PauseError:
    return PauseError(
        "token: the state of this paused session was changed, or is another one's",
        "if it was paused with pauses.key, the same key must be given",
        is_final=True,
    )


OTHER_LAUNCHER = (
    "its launcher ended or was replaced, and it does not have the addresses of another one"
)
_HINT = "HostSettings(pausable=True) pauses sessions that can be resumed after a restart"


def differing(differs: tuple[str, ...], *, is_final: bool = True) -> PauseDiffers:
    """Return the error; `is_final`: the session can never be resumed here."""
    message = f"token: the paused session cannot be resumed here: {'; '.join(differs)}"
    hint = _HINT if OTHER_LAUNCHER in differs else ""
    return PauseDiffers(message, hint, differs=differs, is_final=is_final)


def launcher_ended() -> PauseDiffers:
    return differing((OTHER_LAUNCHER,))


def check_pauses(given: object) -> PauseSettings:
    """Return the settings; raises PolicyError naming an invalid one."""
    if not isinstance(given, PauseSettings):
        raise PolicyError(f"pauses: must be PauseSettings, got {given!r}")
    if not isinstance(given.directory, str | os.PathLike | None):
        raise PolicyError(f"pauses.directory: must be a path, got {given.directory!r}")
    check_limit("pauses.keep_seconds", given.keep_seconds)
    check_limit("pauses.most_bytes", given.most_bytes, whole=True)
    check_limit("pauses.quota_bytes", given.quota_bytes, whole=True)
    if given.sandbox_bytes is not None:
        check_limit("pauses.sandbox_bytes", given.sandbox_bytes, whole=True)
    if given.key is not None:
        key_of(given.key)
    return given
