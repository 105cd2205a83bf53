"""`branch_sessions`: fresh sessions become branches of another one: its files, its memory, its past."""

from collections.abc import Iterable, Sequence

from ..policies.languages import PYTHON
from ..policies.plan import Plan
from .branching_process import BranchingProcess, CannotBranch
from .cells import pid_of
from .concurrency import NEVER
from .held_cell import HeldCell
from .kernel import processes
from .request import Request
from .session import SessionCell
from .tree_copy import WRITER, Uncopied, batches, is_untouched

_WORKSPACE = "/workspace"


def branch_sessions(
    held: HeldCell, fresh: Sequence[SessionCell], process: BranchingProcess, plan: Plan
) -> None:
    """Make `fresh` sessions equal to the one whose cell is `held`, and at rest.

    Raises CannotBranch: the fresh sessions are of no use then, and the other is as it was.
    """
    if plan.language != PYTHON:
        raise CannotBranch(f"sessions of {plan.language} are branched by replay")
    try:
        require_alone(held)
        _copy_files(held, fresh, tuple(each.target for each in plan.tmpfs))
    except (Uncopied, OSError) as error:
        raise CannotBranch(str(error)) from None
    _copy_memory(held, list(fresh), [], process, plan)


def _copy_memory(
    held: HeldCell, fresh: list[SessionCell], targets: list[HeldCell], process: BranchingProcess,
    plan: Plan,
) -> None:  # fmt: skip
    """Keep the descriptors of each fresh cell open, then copy."""
    if fresh:
        with fresh[0].fresh() as target:
            if not target.is_sibling_of(held):
                raise CannotBranch("its launcher was replaced")
            _copy_memory(held, fresh[1:], [*targets, target], process, plan)
        return
    process.branch(held, targets, plan.branching_filter)


def require_alone(held: HeldCell) -> None:
    """Raise CannotBranch if there may be System V objects, or if something runs that changes the files
    after their copy: it may have ended when the process is stopped, which would not show it then."""
    if held.listener and held.listener.has_system_v:
        raise CannotBranch("it made System V shared memory or semaphores, which are not copied")
    if company := processes.company_of(pid_of(held.cell.guest), pid_of(held.cell.pidfd)):
        raise CannotBranch(f"it {company}")


def _copy_files(held: HeldCell, fresh: Sequence[SessionCell], places: tuple[str, ...]) -> None:
    workspace = held.cell.workspace
    if is_untouched(workspace, places):
        return
    write_files(fresh, batches(workspace, places))


def write_files(fresh: Sequence[SessionCell], files: Iterable[bytes]) -> None:
    """Have programs in fresh cells write what `batches` yields; raises CannotBranch."""
    for batch in files:
        for target in fresh:
            result = target.execute(Request(code=WRITER, stdin=batch), None, NEVER)
            if not result.ok:
                raise CannotBranch(f"its files cannot be written: {result.error or result.reason}")
