"""`OpenCells`: the cells that `cellwright exec --keep` left open, each for one project and its options.

Their clients are processes of the daemon's own user: such a cell shows files of that user.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ....policies.errors import BusyError, CellwrightError, PolicyError, SessionLost
from ....runner.settings import SessionSettings
from ...sandbox.remote import frames
from .service import Requester

if TYPE_CHECKING:
    from ...sandbox.projects.open_cell import OpenCell
    from ...sandbox.projects.project_policy import ProjectPolicy

_MOST = 16
_SAME = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")  # paths of the policy are below them


class PreparedCommand(NamedTuple):
    """The meaning of the arguments of `cellwright exec`. `key` has all that the cell depends on;
    `options` are the words before the command. `why`: the reason why it cannot use an open cell."""

    shown: "ProjectPolicy"
    command: Sequence[str]
    key: bytes
    options: str
    keep: bool = False
    close: bool = False
    why: str = ""


Prepare = Callable[[Sequence[str], str, Mapping[str, str]], PreparedCommand]


class OpenCells:
    """Safe from many threads."""

    def __init__(self, prepare: Prepare | None, settings: SessionSettings) -> None:
        self._prepare = prepare
        self._settings = settings._replace(pause_seconds=None, memory_bytes=None)
        self._lock = threading.Lock()  # held while a cell is opened: the next command may use it
        self._cells: dict[bytes, tuple[OpenCell, str]] = {}

    def answer(
        self, asked: frames.RunOnProject, uid: int, requester: Requester
    ) -> frames.NoOpenCell:
        """Run a command; return only if there is no cell for it, or the client has its streams."""
        if uid != os.geteuid():
            raise PolicyError(f"exec: open cells are those of user {os.geteuid()}, not of {uid}")
        if self._prepare is None:
            raise PolicyError("exec: this daemon keeps no cells of projects open")
        environment = dict(os.fsdecode(each).partition("=")[::2] for each in asked.environment)
        for name in _SAME:
            if environment.get(name) != os.environ.get(name):
                return frames.NoOpenCell(f"{name} is another one than that of the daemon")
        cwd = os.fsdecode(asked.cwd)
        given = self._prepare([os.fsdecode(each) for each in asked.arguments], cwd, environment)
        if given.close:
            return frames.NoOpenCell(closed=self._close_those_of(given.shown.project.root))
        if given.why:
            return frames.NoOpenCell(given.why)
        from ...sandbox.projects.open_cell import ProjectCommand  # imported at its first command

        command, lost = ProjectCommand(given.command, cwd, asked.terminal), ""
        while cell := self._cell_of(given):
            try:
                cell.run(
                    command, given.shown,
                    lambda descriptors: requester.hand_over(frames.CommandStarted(), descriptors),
                    requester.await_end,
                )  # fmt: skip
            except SessionLost as error:  # no command was started
                self._forget(given.key, cell)
                if lost:
                    raise
                lost = str(error)
            else:
                return frames.NoOpenCell()
        return frames.NoOpenCell(lost or self._difference(given))

    def _cell_of(self, given: PreparedCommand) -> "OpenCell | None":
        with self._lock:
            self._forget_lost()
            if known := self._cells.get(given.key):
                return known[0]
            if not given.keep:
                return None
            if len(self._cells) >= _MOST:
                raise BusyError(
                    f"exec: {_MOST} cells of projects are open",
                    "close one: cellwright exec --close",
                )
            from ...sandbox.projects.open_cell import OpenCell

            made = OpenCell(given.shown, self._settings)
            self._cells[given.key] = made, given.options
            return made

    def _difference(self, given: PreparedCommand) -> str:
        with self._lock:
            others = [words for cell, words in self._cells.values() if _is_of(cell, given)]
        if not others:
            return ""
        return f"the open cell of this project has other options: {others[0] or 'none'}"

    def _close_those_of(self, root: str) -> int:
        with self._lock:
            keys = [key for key, (cell, _) in self._cells.items() if cell.root == root]
            closing = [self._cells.pop(key)[0] for key in keys]
        for cell in closing:
            cell.close()
        return len(closing)

    def _forget(self, key: bytes, cell: "OpenCell") -> None:
        with self._lock:
            if key in self._cells and self._cells[key][0] is cell:
                del self._cells[key]
        cell.close()

    def sweep(self) -> bool:
        """Free what ended cells had; return whether any is left."""
        with self._lock:
            self._forget_lost()
            return bool(self._cells)

    def _forget_lost(self) -> None:
        for key, (cell, _) in tuple(self._cells.items()):
            if cell.lost:
                del self._cells[key]
                cell.close()

    def close(self) -> None:
        """End every cell."""
        with self._lock:
            cells, self._cells = self._cells, {}
        for cell, _ in cells.values():
            try:
                cell.close()
            except CellwrightError:
                continue


def _is_of(cell: "OpenCell", given: PreparedCommand) -> bool:
    return cell.root == given.shown.project.root
