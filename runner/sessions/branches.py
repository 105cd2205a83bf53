"""Copies of a session: branches of it in fresh cells, and its state, which is kept and restored.

All raise CannotBranch; fresh sessions are of no use then, and the other is as it was.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ...policies.errors import LaunchError
from ...policies.languages import PYTHON
from ...runner import channel
from ..cells.cell import pid_of
from ..cells.held_cell import HeldCell
from ..cells.tree_copy import WRITER, Uncopied, batches, is_untouched
from ..confined.confined_process import ConfinedProcess, ProcessOnDemand
from ..kernel import process_calls as processes
from ..messages import (
    BranchCells,
    Branched,
    BranchingBoot,
    BranchRefused,
    Failed,
    KeepMemory,
    Kept,
    RestoreMemory,
    decode,
    encode,
)
from ..requests.request import Request
from .session_cell import SessionCell

_MODULE = "cellwright.runner.branching.main"
_NO_ANSWER = LaunchError, OSError, EOFError, msgspec.DecodeError, channel.ProtocolError
_ANSWER_SECONDS = 10.0  # time for a copy; a gigabyte takes one or two seconds


class CannotBranch(Exception):  # noqa: N818 - the caller replays the session's calls instead
    """The memory of a session cannot be copied, and why."""


class BranchingProcess:
    """Starts the process when it is needed, and another one when it has ended."""

    def __init__(self, executable: str, uid: int) -> None:
        """`uid` is whom the process becomes if this one is root, else 0."""
        self._executable = executable
        self._uid = uid
        self._process = ProcessOnDemand()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return self._process.pid

    def branch(self, source: HeldCell, targets: Sequence[HeldCell], seccomp_filter: bytes) -> None:
        """Make the process of each fresh cell equal to that of the session's cell `source`.

        Raises CannotBranch; the targets are of no use then, and the source is as it was.
        """
        cells = [each.cell for each in targets]
        guests = [cell.guest for cell in cells]
        descriptors = (source.cell.guest, source.cell.pidfd, *guests)
        with _page_maps(source.cell.guest, *guests) as maps:
            asked = BranchCells(len(guests), bool(maps))
            self._ask(asked, (*descriptors, *maps), seccomp_filter)

    def keep(
        self, held: HeldCell, image: int, file: int, most_bytes: int, seccomp_filter: bytes
    ) -> None:
        """Write the difference between a session's memory and an image to `file`, or the whole
        memory if `image` is -1. Raises CannotBranch; the session goes on in any case."""
        given = (held.cell.guest, held.cell.pidfd, file, *([] if image < 0 else [image]))
        self._ask(KeepMemory(image >= 0, most_bytes), given, seccomp_filter)

    def restore(self, fresh: HeldCell, image: int, kept: int, seccomp_filter: bytes) -> None:
        """Restore a kept session in the process of a fresh cell.

        Raises CannotBranch, after which the cell must not be used.
        """
        self._ask(RestoreMemory(), (fresh.cell.guest, image, kept), seccomp_filter)

    def _ask(
        self, asked: msgspec.Struct, descriptors: tuple[int, ...], seccomp_filter: bytes
    ) -> None:
        with self._process.lock:
            try:
                process = self._process.ready(lambda: self._start(seccomp_filter))
                channel.send(process.control, encode(asked), descriptors)
                answer = _answer_of(process)
            except _NO_ANSWER as error:
                self._process.end()
                raise CannotBranch(f"the branching process failed: {error}") from None
            if isinstance(answer, Failed):
                self._process.end()
        if isinstance(answer, BranchRefused):
            raise CannotBranch(answer.why)
        if isinstance(answer, Failed):
            raise CannotBranch(f"the copy failed: {answer.words}")

    def _start(self, seccomp_filter: bytes) -> ConfinedProcess:
        boot = BranchingBoot(seccomp_filter, self._uid)
        return ConfinedProcess(self._executable, _MODULE, boot, "the branching process")

    def close(self) -> None:
        """End the process; does nothing in a forked child of the owner."""
        self._process.close()


@contextlib.contextmanager
def _page_maps(*guests: int) -> Iterator[list[int]]:
    """Yield the page maps of processes, or none where this process is not root: only in a file that
    root has opened does the kernel show where pages are (pagemap_read, fs/proc/task_mmu.c)."""
    with contextlib.ExitStack() as closing:
        opened: list[int] = []
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):
                for guest in guests:
                    path = f"/proc/{pid_of(guest)}/pagemap"
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    closing.callback(os.close, opened[-1])
                    pid_of(guest)  # raises if the number now belongs to another process
        yield opened if len(opened) == len(guests) else []


_Answer = Branched | Kept | BranchRefused | Failed


def _answer_of(process: ConfinedProcess) -> _Answer:
    control = process.control
    if not channel.has_news(control.fileno(), _ANSWER_SECONDS):
        raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
    frame = channel.Receiver(control, channel.PACKET_BYTES).receive_whole()
    if not frame:
        raise EOFError("it ended")
    answer: _Answer = decode(frame, _Answer)
    return answer


def branch_sessions(
    held: HeldCell, fresh: Sequence[SessionCell], process: BranchingProcess
) -> None:
    """Make `fresh` sessions equal to the one whose cell is `held`, and at rest."""
    if held.plan.language != PYTHON:
        raise CannotBranch(f"sessions of {held.plan.language} are branched by replay")
    try:
        _require_alone(held)
        write_files(fresh, files_to_keep(held))
    except OSError as error:
        raise CannotBranch(str(error)) from None
    with contextlib.ExitStack() as open_cells:  # their descriptors stay open meanwhile
        targets = [open_cells.enter_context(each.fresh()) for each in fresh]
        if any(each.origin is not held.origin for each in targets):
            raise CannotBranch("its launcher was replaced")
        process.branch(held, targets, held.plan.branching_filter)


def _require_alone(held: HeldCell) -> None:
    """Raise CannotBranch if a GPU is open, if there may be System V objects, or if something runs that
    changes the files after their copy: it may have ended when the process is stopped, which would not
    show it then."""
    if node := open_gpu(held):
        raise CannotBranch(f"it has {node} open, and what a GPU holds is not copied")
    if held.listener and held.listener.has_system_v:
        raise CannotBranch("it made System V shared memory or semaphores, which are not copied")
    if company := processes.company_of(pid_of(held.cell.guest), pid_of(held.cell.pidfd)):
        raise CannotBranch(f"it {company}")


def open_gpu(held: HeldCell) -> str:
    """Return the path of a GPU's node that the session has open; empty if there is none."""
    devices = held.plan.devices
    return processes.open_device(pid_of(held.cell.guest), devices) if devices else ""


def write_files(fresh: Sequence[SessionCell], files: Iterable[bytes]) -> None:
    """Have programs in fresh cells write what `batches` yields; raises CannotBranch."""
    for batch in files:
        for target in fresh:
            result = target.execute(Request(code=WRITER, stdin=batch))
            if not result.ok:
                raise CannotBranch(f"its files cannot be written: {result.error or result.reason}")


def require_keepable(held: HeldCell) -> None:
    """Check that the state of a session can be kept."""
    if held.plan.language != PYTHON:
        raise CannotBranch(
            f"sessions of {held.plan.language} keep their state in no way that can be read"
        )
    _require_alone(held)


def files_to_keep(held: HeldCell) -> Iterator[bytes]:
    """Yield the files of a session for `write_files`."""
    places = tuple(each.target for each in held.plan.tmpfs)
    try:
        if not is_untouched(held.cell.workspace, places):
            yield from batches(held.cell.workspace, places)
    except (Uncopied, OSError) as error:
        raise CannotBranch(str(error)) from None


def memory_to_keep(held: HeldCell, image: int, process: BranchingProcess, most_bytes: int) -> int:
    """Return a memory file with the difference between a session and an image; with -1, a whole
    image."""
    file = os.memfd_create("kept", os.MFD_CLOEXEC)
    try:
        process.keep(held, image, file, most_bytes, held.plan.branching_filter)
    except BaseException:
        os.close(file)
        raise
    return file


def restore_session(
    fresh: SessionCell, files: Iterable[bytes], image: int, memory: int, process: BranchingProcess
) -> None:
    """Give a fresh session the files and the memory of one that was kept; raises SessionLost too."""
    write_files((fresh,), files)
    with fresh.fresh() as held:
        process.restore(held, image, memory, held.plan.branching_filter)
