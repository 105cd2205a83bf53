"""Sources of secrets: functions that return a secret each time it is needed."""

import os
from collections.abc import Callable
from pathlib import Path

SecretSource = Callable[[], str]


def from_environment(name: str) -> SecretSource:
    """Read a secret from an environment variable, each time it is needed."""
    return lambda: os.environ[name]


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
        import keyring

        found: str | None = keyring.get_password(service, user)
        if found is None:
            raise KeyError(service)
        return found

    return read
