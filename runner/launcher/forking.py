"""The launcher once it has left the host: it forks cells, and reports how they end."""

from ..cell import interpreter, privileges
from ..cell.enter import CONTROL, TASKS, Site, confinement
from ..kernel import _steps, memory
from ..kernel.now import Now
from ..kernel.steps import Steps


def serve(site: Site, steps: Steps, sock: int, nursery: int, keeper: int, home: list[int]) -> None:
    """Fork cells until the supervisor closes `sock` or the process behind `keeper` is gone."""
    program = steps.layout(site.plan.open_files, TASKS + site.joins)
    if _steps.serve(program, sock, nursery, keeper, tuple(home), interpreter.has_hooks()):
        interpreter.serve(CONTROL)


def list_of_steps(site: Site) -> Steps:
    """Return the steps of each guest's process, with the pages that a rehearsed child has written."""
    privileges.make_dumpable(Now())  # or /proc/self is not ours to read
    memory.share_page_tables()
    pages = memory.pages_written_by(interpreter.rehearsal())
    privileges.make_undumpable(Now())
    return confinement(site, pages)
