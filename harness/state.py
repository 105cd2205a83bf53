"""The directory of a user's data between commands."""

import os
from pathlib import Path

from ..policies.errors import CellwrightError


def state_directory() -> Path:
    """Return `cellwright` in $XDG_STATE_HOME, else in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG Base Directory Specification: then it is to be ignored
        state = os.path.expanduser("~/.local/state")
    return Path(state, "cellwright")


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
