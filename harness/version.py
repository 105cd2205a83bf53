"""The installed version of cellwright, found when first needed, because that reads directories."""

import os
import sys

NAME = "cellwright"
_METADATA = ".dist-info"  # NAME-VERSION.dist-info: PyPA, "Recording installed projects"


_found: list[str] = []  # caches the version; functools takes longer to import


def installed_version() -> str:
    """Return the version that pip installed, which is that of pyproject.toml; "" in a bare checkout.

    `importlib.metadata` would do the same, but takes longer to import than a command to start.
    """
    if not _found:
        _found.append(_read())
    return _found[0]


def _read() -> str:
    for path in sys.path:
        try:
            names = os.listdir(path or ".")
        except OSError:  # sys.path may name missing directories and archives
            continue
        for name in names:
            if name.startswith(f"{NAME}-") and name.endswith(_METADATA):
                return name.removeprefix(f"{NAME}-").removesuffix(_METADATA)
    return ""


def version_line() -> str:
    """Return what `--version` prints."""
    return f"{NAME} {installed_version() or '(not installed)'}"
