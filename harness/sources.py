"""Sources of secrets: functions that return a secret each time it is needed."""

import os
from collections.abc import Callable
from pathlib import Path

from ..policies.errors import PolicyError
from ..policies.extras import how_to_install
from ..policies.privacy import SOURCE_FORM, SOURCE_NAME

SecretSource = Callable[[], str]


class SecretUnreadable(Exception):  # noqa: N818 - what happened: the caller says of which secret
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
    if not SOURCE_NAME.fullmatch(name):
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
