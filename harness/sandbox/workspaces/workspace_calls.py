"""Calls and sessions in a named workspace: its files are put into the cell, and saved at the end."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ....policies.errors import CellwrightError, PolicyError, WorkspaceError
from ....runner.cells.workspace import KeptWorkspace
from ....runner.requests.execution import called_off
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ....runner.sessions.session_cell import SessionCell
from ....runner.supervisor import Supervisor
from ..calls.call_request import with_files
from .workspace_files import LockCancelled
from .workspace_store import OpenWorkspace, ShownFiles, Workspaces

_WAIT_SECONDS = 30.0


class NamedWorkspace(NamedTuple):
    """A workspace that a caller names.

    `clean`: remove it once the call completed or the session is closed.  `show` returns its files as
    programs of a session see them: with privacy, with tokens in place of values.
    """

    store: Workspaces
    name: str
    clean: bool
    show: Callable[[Mapping[str, bytes], str | None], ShownFiles] | None = None

    def files(self, opened: OpenWorkspace, session_id: str | None = None) -> dict[str, bytes]:
        """Return its files as a call or a session gets them."""
        show = self.show
        return opened.shown(None if show is None else lambda files: show(files, session_id))


def execute_in(wanted: NamedWorkspace, supervisor: Supervisor, request: Request) -> SandboxResult:
    """Run `request` in a cell with the files of a workspace, and save them when the program has ended.

    Nothing is saved if the cell is lost with its launcher.  Raises BusyError, WorkspaceError,
    PolicyError if the files do not fit into the cell, and what `Supervisor.execute` raises.
    """
    asked_at = time.monotonic()
    try:
        opened = wanted.store.open(wanted.name, request.cancel)
    except LockCancelled:
        return called_off(request, asked_at, supervisor.plan.layers)
    with opened:
        filled = _with_files_of(wanted.name, request, wanted.files(opened))
        result = supervisor.execute(filled, opened.keep)
        if wanted.clean and result.ok:
            opened.remove()
        return replace(result, workspace=opened.kept)


def _with_files_of(name: str, request: Request, files: Mapping[str, bytes]) -> Request:
    try:
        return with_files(request, files)
    except PolicyError as error:
        raise PolicyError(
            f"workspace {name!r}: {error.what}",
            "use a policy with larger limits, or remove files with `cellwright workspace remove`",
        ) from None


class SessionWorkspace:
    """The workspace of a session: saved when its cell ends, however it ends."""

    def __init__(
        self, wanted: NamedWorkspace, note: Callable[[KeptWorkspace | None], None], session_id: str
    ) -> None:
        self.name = wanted.name
        self._wanted, self._session_id = wanted, session_id
        self._clean = wanted.clean
        self._opened: OpenWorkspace = wanted.store.open(wanted.name)
        self._note = note
        self._laid = self._completed = False
        self._ended = threading.Event()

    @property
    def kept(self) -> KeptWorkspace | None:
        """The outcome of the last save."""
        return self._opened.kept

    def lay(self, write: Callable[[Mapping[str, bytes]], None]) -> None:
        """Write the files into the cell; from then on its files are saved."""
        if files := self._wanted.files(self._opened, self._session_id):
            write(files)
        self._laid = True

    def save(self, cell: SessionCell) -> KeptWorkspace:
        """Save the files as they are now; raises WorkspaceError if that is refused, SessionLost."""
        cell.at_rest(self._opened.keep)
        self._note(self.kept)
        return self.saved()

    def complete(self) -> None:
        """Note that the session is closed by its caller, and was not lost."""
        self._completed = True

    def finish(self) -> KeptWorkspace:
        """Wait for the last save, which the last user of the cell makes; raises WorkspaceError."""
        if not self._ended.wait(_WAIT_SECONDS):
            raise WorkspaceError("not saved yet: the cell of the session is still in use")
        return self.saved()

    def saved(self) -> KeptWorkspace:
        """Return the outcome of the last save; raises WorkspaceError if it was refused."""
        kept = self.kept or KeptWorkspace(self.name, "refused", "no save was attempted")
        if kept.state == "refused":
            raise WorkspaceError(f"not saved: {kept.why}", "the workspace is unchanged")
        return kept

    def release(self) -> None:
        """Release it without saving."""
        self._opened.close()

    def keep_for_good(self, workspace_at_rest: Callable[[], int]) -> None:
        """Save the files that the session left, and release the workspace; failures are in `kept`."""
        try:
            if self._completed and self._clean:
                self._opened.remove()
            elif self._laid:
                self._opened.keep(workspace_at_rest())
        except CellwrightError as error:
            self._opened.refuse(str(error))
        finally:
            self._opened.close()
            self._note(self.kept)
            self._ended.set()
