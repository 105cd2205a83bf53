"""Units that have systemd start the daemon when the first client connects."""

import os
import sys
from importlib import resources
from pathlib import Path

from ...policies.errors import PolicyError

NAMES = ("cellwright.socket", "cellwright.service")


def write_units(directory: Path) -> tuple[Path, ...]:
    """Write the units of the system, for root, or of this user; return where.  Raises PolicyError."""
    kind = "system" if os.geteuid() == 0 else "user"
    written = []
    for name in NAMES:
        template = resources.files(__package__).joinpath(f"{kind}.{name.rpartition('.')[2]}")
        path = directory / name
        try:
            path.write_text(template.read_text().replace("@COMMAND@", _command()))
        except OSError as error:
            raise PolicyError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return tuple(written)


def _command() -> str:
    """Return how to start us, as systemd splits it (systemd.service(5), "Command lines")."""
    executable = sys.executable.replace("%", "%%").replace("$", "$$")
    return f'"{executable}" -I -m cellwright serve --delegated'
