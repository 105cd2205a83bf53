"""Warnings on the command line: those of cellwright are one line each on stderr, printed once."""

import os
import sys
import warnings
from typing import TextIO

from ..text.terminal import harmless

_OURS = os.path.join(os.path.dirname(__file__).removesuffix("harness/cli"), "")
_shown: set[str] = set()


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """Print a warning; one of other code, such as a file of --tools, with its file and line."""
    text = " ".join(str(message).split())
    if not filename.startswith(_OURS):
        shown = warnings.formatwarning(message, category, filename, lineno, line)
    elif text not in _shown:
        _shown.add(text)
        shown = f"cellwright: {harmless(text)}\n"
    else:
        return
    (file or sys.stderr).write(shown)
