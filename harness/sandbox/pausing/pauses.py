"""`PauseSettings`: where paused sessions are kept, for how long, and how many bytes of them."""

import os
from typing import NamedTuple

from ....policies.errors import PolicyError
from ....policies.policy import check_limit
from ...encryption import key_of
from ...sources import SecretSource

_WEEK = 7 * 86_400.0


class PauseSettings(NamedTuple):
    """Where paused sessions are kept, for how long, and how many bytes of them."""

    directory: str | os.PathLike[str] | None = None  # default ~/.local/state/cellwright/paused
    # At least 32 characters, or a source of them: then the state is encrypted (extra `privacy`).
    key: str | SecretSource | None = None
    keep_seconds: float = _WEEK  # after which a paused session cannot be resumed and is removed
    most_bytes: int = 1 << 30  # of one session, its memory and files
    quota_bytes: int = 10 << 30  # of all in the directory


def check_pauses(given: object) -> PauseSettings:
    """Return the settings; raises PolicyError naming an invalid one."""
    if not isinstance(given, PauseSettings):
        raise PolicyError(f"pauses: must be PauseSettings, got {given!r}")
    if not isinstance(given.directory, str | os.PathLike | None):
        raise PolicyError(f"pauses.directory: must be a path, got {given.directory!r}")
    check_limit("pauses.keep_seconds", given.keep_seconds)
    check_limit("pauses.most_bytes", given.most_bytes, whole=True)
    check_limit("pauses.quota_bytes", given.quota_bytes, whole=True)
    if given.key is not None:
        key_of(given.key)
    return given
