"""The check of the settings of paused sessions."""

import os

from ....policies.errors import PolicyError
from ....policies.policy import check_limit
from ....runner.settings import PauseSettings
from ...encryption import key_of


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
