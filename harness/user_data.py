"""Sources of secrets: functions that return a secret each time it is needed.

A user's data between commands: its directory, and its encryption.

`Cipher`: AES-256-GCM for data on disk, with a key that a user names.  Needs the extra `privacy`.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..policies.errors import CellwrightError, PolicyError
from ..policies.extras import how_to_install
from ..policies.privacy_rules import SOURCE_FORM, SOURCE_NAME

SecretSource = Callable[[], str]


class SecretUnreadable(Exception):  # noqa: N818 - the caller adds the name of the secret
    """A secret cannot be read; the text says why, without the secret."""


def read_secret(given: str | SecretSource) -> str:
    """Return a secret, which is text or comes from a source; raises SecretUnreadable."""
    try:
        return given if isinstance(given, str) else given()
    except SecretUnreadable:
        raise
    except OSError as error:
        raise SecretUnreadable(str(error)) from None
    except Exception as error:  # noqa: BLE001 - a source may raise anything, also with the secret
        raise SecretUnreadable(type(error).__name__) from None


def named_source(name: str, where: str = "key") -> SecretSource:
    """Return the source that a text names: env:NAME, file:/PATH or keyring:SERVICE/USER.

    Raises PolicyError, without the text, for another one: it may be the secret itself.
    """
    if not re.fullmatch(SOURCE_NAME, name):
        raise PolicyError(
            f"{where}: must be {SOURCE_FORM}", "name the place of the secret, not itself"
        )
    kind, _, rest = name.partition(":")
    if kind == "keyring":
        service, _, user = rest.partition("/")
        return from_keyring(service, user)
    return from_environment(rest) if kind == "env" else from_file(rest)


def from_environment(name: str) -> SecretSource:
    """Read a secret from an environment variable, each time it is needed."""

    def read() -> str:
        if (found := os.environ.get(name)) is None:
            raise SecretUnreadable(f"the environment has no {name}")
        return found

    return read


def from_file(path: str | os.PathLike[str]) -> SecretSource:
    """Read a secret from a file that only its owner may read, each time it is needed."""

    def read() -> str:
        if os.stat(path).st_mode & 0o077:
            raise PermissionError(f"{path} is readable by users other than its owner: chmod 600")
        return Path(path).read_text().strip()

    return read


def from_keyring(service: str, user: str) -> SecretSource:
    """Read a secret from the desktop keyring; needs the extra `keyring`."""

    def read() -> str:
        try:
            import keyring
        except ImportError:
            raise SecretUnreadable(how_to_install("keyring")) from None
        found: str | None = keyring.get_password(service, user)
        if found is None:
            raise SecretUnreadable(f"the keyring has nothing of {user!r} for {service!r}")
        return found

    return read


def state_directory() -> Path:
    """Return `cellwright` in $XDG_STATE_HOME, else in ~/.local/state."""
    return _directory("XDG_STATE_HOME", "~/.local/state")


def cache_directory() -> Path:
    """Return `cellwright` in $XDG_CACHE_HOME, else in ~/.cache."""
    return _directory("XDG_CACHE_HOME", "~/.cache")


def _directory(variable: str, otherwise: str) -> Path:
    above = os.environ.get(variable, "")
    if not os.path.isabs(above):  # the XDG Base Directory Specification says to ignore these
        above = os.path.expanduser(otherwise)
    return Path(above, "cellwright")


def make_private_directory(directory: Path, error: type[CellwrightError]) -> None:
    """Make `directory`, with access for its owner alone, if it is missing.

    Raises `error` if it cannot be made, or others may write to it.
    """
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as failure:
        raise error(f"cannot make {directory}: {failure.strerror}") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise error(
            f"directory: others may write to {directory}",
            "use a directory of your own, or change its mode with chmod 700",
        )


@contextlib.contextmanager
def locked(path: Path, error: type[CellwrightError]) -> Iterator[None]:
    """Hold the lock of the file `path`, which is made if it is missing, against other processes.

    Raises `error` if it cannot be opened; the kernel releases it when the process ends.
    """
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as failure:
        raise error(f"cannot write {path}: {failure.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole and durably, or leave the old one as it was; raises OSError."""
    import tempfile

    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


_NONCE_BYTES = 12  # as SP 800-38D recommends
_SHORTEST_KEY = 32  # characters


class WrongKey(Exception):  # noqa: N818 - the caller adds the name of the file
    """Another key was used, or the data was changed."""


class Cipher:
    """Encrypts pieces of data, each bound to a text that is not encrypted."""

    def __init__(self, key: bytes, what: str) -> None:
        """`key`: 32 bytes. `what`: the feature that an error about a missing extra names."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise PolicyError(
                f"{what} needs the extra `privacy`", how_to_install("privacy")
            ) from None
        self._cipher: Any = AESGCM(key)

    def seal(self, data: bytes | memoryview, bound: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._cipher.encrypt(nonce, data, bound)
        return nonce + sealed

    def open(self, sealed: bytes, bound: bytes) -> bytes:
        """Return the data; raises WrongKey."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._cipher.decrypt(
                sealed[:_NONCE_BYTES], memoryview(sealed)[_NONCE_BYTES:], bound
            )
        except (InvalidTag, ValueError):  # ValueError: a nonce that is too short
            raise WrongKey from None
        return opened


def key_of(given: str | SecretSource) -> bytes:
    """Return the key; raises PolicyError, without it, if it is missing or too short."""
    try:
        text = read_secret(given)
    except SecretUnreadable as error:
        raise PolicyError(f"key: cannot be read: {error}") from None
    if len(text) < _SHORTEST_KEY:
        raise PolicyError(
            f"key: must have at least {_SHORTEST_KEY} characters, got {len(text)}",
            "python3 -c 'import secrets; print(secrets.token_hex(32))' makes one",
        )
    return text.encode()
