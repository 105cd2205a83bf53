"""The directory of a user's data between commands."""

import os
from pathlib import Path


def state_directory() -> Path:
    """Return `cellwright` in $XDG_STATE_HOME, else in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG Base Directory Specification: then it is to be ignored
        state = os.path.expanduser("~/.local/state")
    return Path(state, "cellwright")
