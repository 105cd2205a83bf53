"""`BranchingProcess`: the supervisor's end of the process that copies and keeps the memory of sessions.

The process starts with the first branch.  It serves one branch after the other; when one fails it ends,
and the next branch gets a new process.  The kernel lets a session go on whose tracer ends.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

import msgspec

from ..policies.errors import LaunchError
from . import channel
from .cells import pid_of
from .confined_process import ConfinedProcess, ProcessOnDemand
from .held_cell import HeldCell
from .messages import (
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

_MODULE = "cellwright.runner.branching.main"
_NO_ANSWER = LaunchError, OSError, EOFError, msgspec.DecodeError, channel.ProtocolError
_ANSWER_SECONDS = 10.0  # for a copy; a gigabyte takes one or two


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
        """Write to `file` what the memory of a session has beyond an image, or all of it if `image` is
        -1.  Raises CannotBranch; the session goes on in any case."""
        given = (held.cell.guest, held.cell.pidfd, file, *([] if image < 0 else [image]))
        self._ask(KeepMemory(image >= 0, most_bytes), given, seccomp_filter)

    def restore(self, fresh: HeldCell, image: int, kept: int, seccomp_filter: bytes) -> None:
        """Make the process of a fresh cell equal to what was kept of a session.

        Raises CannotBranch; the cell is of no use then.
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
            words = f": {os.strerror(answer.errno)}" if answer.errno else ""
            raise CannotBranch(f"the copy failed: {answer.message}{words}")

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
                    pid_of(guest)  # raises where the number is another process's by now
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
