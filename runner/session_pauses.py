"""The files and the memory of a session: read from its cell to be kept, and given to a fresh one."""

import os
from collections.abc import Iterable, Iterator

from ..policies.languages import PYTHON
from ..policies.plan import Plan
from .branching_process import BranchingProcess, CannotBranch
from .held_cell import HeldCell
from .session import SessionCell
from .session_branches import require_alone, write_files
from .tree_copy import Uncopied, batches, is_untouched


def require_keepable(held: HeldCell, plan: Plan) -> None:
    """Raise CannotBranch if the state of a session cannot be kept."""
    if plan.language != PYTHON:
        raise CannotBranch(
            f"sessions of {plan.language} keep their state in no way that can be read"
        )
    require_alone(held)


def files_to_keep(held: HeldCell, plan: Plan) -> Iterator[bytes]:
    """Yield the files of a session for `write_files`; raises CannotBranch."""
    places = tuple(each.target for each in plan.tmpfs)
    try:
        if not is_untouched(held.cell.workspace, places):
            yield from batches(held.cell.workspace, places)
    except (Uncopied, OSError) as error:
        raise CannotBranch(str(error)) from None


def memory_to_keep(
    held: HeldCell, image: int, process: BranchingProcess, plan: Plan, most_bytes: int
) -> int:
    """Return a file in memory of what a session has beyond an image; with -1, a whole image.

    Raises CannotBranch.
    """
    file = os.memfd_create("kept", os.MFD_CLOEXEC)
    try:
        process.keep(held, image, file, most_bytes, plan.branching_filter)
    except BaseException:
        os.close(file)
        raise
    return file


def restore_session(
    fresh: SessionCell, files: Iterable[bytes], image: int, memory: int, process: BranchingProcess,
    plan: Plan,
) -> None:  # fmt: skip
    """Give a fresh session the files and the memory of one that was kept.

    Raises CannotBranch, SessionLost; the fresh session is of no use then.
    """
    write_files((fresh,), files)
    with fresh.fresh() as held:
        process.restore(held, image, memory, plan.branching_filter)
