"""The list of fonts of a set that has matplotlib, made in a cell when the set is built.

Without it the first plot in each cell looks for fonts of the host, which takes a second, and reports
the attempts that are refused.  The list is data of the set: only cells read it.
"""

from pathlib import Path

from ....policies.errors import CellwrightError, PackageError
from ....policies.policy import MIB, Limits, Policy, Python
from ....runner.host.packages import FONT_LISTS, is_font_list
from ....runner.request import Request
from ....runner.settings import PoolSettings
from ....runner.spawn import Spawned, interpreter
from ....runner.supervisor import Supervisor
from ....runner.workspace import list_all_files, read_file
from .deadline import Deadline
from .opening import DIRECTORY_MODE, Files, write_sealed

_SECONDS = 60.0
_MEMORY = 1024 * MIB
_MOST_BYTES = 4 * MIB
_PROGRAM = """
import os
os.environ["MPLCONFIGDIR"] = "/workspace"
import matplotlib.font_manager
"""


def add_font_list(site: Path, optional_layers: tuple[str, ...], deadline: Deadline) -> Files:
    """Add the list of fonts to the set in `site` if it has matplotlib, and return the new files.

    A matplotlib that cannot be imported adds none.  Raises PackageError after the deadline.
    """
    place = site / FONT_LISTS
    if place.exists() or not (site / "matplotlib" / "font_manager.py").is_file():
        return {}
    limits = Limits(wall_seconds=deadline.left(_SECONDS), memory_bytes=_MEMORY)
    policy = Policy(
        name="list fonts", python=Python(path=(str(site),)), limits=limits,
        optional_layers=optional_layers,
    )  # fmt: skip
    made: dict[str, bytes] = {}

    def keep(workspace: int) -> None:
        made.update(_font_lists(workspace))

    supervisor = Supervisor(policy, Spawned(interpreter()), settings=PoolSettings(size=0))
    try:
        supervisor.execute(Request(code=_PROGRAM, limits=limits), cancel=deadline.cancel, keep=keep)
    except CellwrightError as error:
        raise PackageError(f"cannot list the fonts of matplotlib: {error}") from error
    finally:
        supervisor.close()
    deadline.left()
    if made:
        place.mkdir(DIRECTORY_MODE)
        place.chmod(DIRECTORY_MODE)  # whatever the umask is
    return {
        f"{FONT_LISTS}/{name}": write_sealed(place / name, content)
        for name, content in made.items()
    }


def _font_lists(workspace: int) -> dict[str, bytes]:
    """Return the lists below /workspace of a cell at rest, by name."""
    return {
        path: read_file(workspace, path, seen.size_bytes)
        for path, seen in list_all_files(workspace).items()
        if is_font_list(path) and seen.size_bytes <= _MOST_BYTES
    }
