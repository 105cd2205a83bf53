"""`Listener`: the supervisor's end of a cell's seccomp listener, which reports refused attempts.

The cell's filter has already decided what is refused; the listener returns the plan's errno and
records the attempt, but for calls that would change nothing: those succeed.  A
guest that floods the listener costs little: the first attempts are noted in full, then counted per
call, and past the limit the cell is killed.  Opening files and locking them is legitimate, so a cell
that does it a great many times is slowed down instead.
"""

import errno
import operator
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...policies.plan import CallAnswer, Plan
from ..cgroups.tree import Cgroup
from ..kernel import notifications
from ..kernel.notifications import Notification
from ..result import SEVERAL, Violation
from . import evidence
from .evidence import OpenAttempt
from .guest_memory import bytes_at
from .locks import Locks
from .shown import Shown

if TYPE_CHECKING:
    from .giver import Giver
    from .machine_files import MachineFiles

_NOTED_IN_FULL = 100  # distinct attempts; after them only the call's name is kept
_OPENS_AT_ONCE = 20_000
_OPENS_BETWEEN_RESTS = 100
DOOR = "/dev/tools"  # which no file has: an open of it is for doors.py
MACHINE_PLACES = ("/proc/", "/sys/fs/cgroup/")
REST_SECONDS = 0.01  # so at most 10,000 opens a second, 8 % of a CPU (measured: 8 µs each)


class Listener:
    """Answers the notifications of one cell and remembers what was refused."""

    def __init__(
        self, descriptor: int, plan: Plan, shown: Shown, limit: int, cgroup: Cgroup
    ) -> None:
        self._descriptor = descriptor
        self._plan = plan
        self._cgroup = cgroup
        self._machine: MachineFiles | None = None
        self._measured = plan.measured
        self._noted_calls = plan.noted
        self.has_system_v = False  # whether a process may have made objects that outlive it
        self._refusals = plan.refusals
        self._answers = plan.answers
        self._groups = plan.groups
        self._watched = plan.watched
        self._shown = shown
        self._giver: Giver | None = None
        self.locks = Locks(descriptor, plan.locks, self._note_lock)
        self._left = self._limit = limit
        self._opens = 0
        self._noted: dict[tuple[str, tuple[str, ...]], Violation] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], int] = {}
        # While tools can be called: takes an open of DOOR, with its flags.
        self.on_door: Callable[[Notification, int], None] | None = None
        notifications.wake_in_sync(descriptor)

    def answer(self) -> None:
        """Answer the next notification."""
        notification = notifications.receive(self._descriptor)
        if notification is None:
            return
        if (call := self._watched.get(notification.number)) == "connect":
            self._hear_of_connect(notification)
        elif call:
            self._hear_of_open(notification)
        elif notification.number in self._measured:
            self._opens += 1
            self._machine_files().answer_call(notification, self._measured[notification.number])
        elif notification.number in self._noted_calls and not self._is_answered(notification):
            self._opens += 1
            self.has_system_v = True
            self._let_go_on(notification)
        elif self.locks.takes(notification):
            self._opens += 1
            self.locks.answer(notification)
        else:
            self._refuse(notification)

    @property
    def is_flooded(self) -> bool:
        return self._left < 0

    def needs_rest(self) -> bool:
        """Tell whether the guest has opened so much that it should wait for REST_SECONDS."""
        return self._opens > _OPENS_AT_ONCE and self._opens % _OPENS_BETWEEN_RESTS == 0

    def take_violations(self) -> tuple[Violation, ...]:
        """Return what was refused since the last time, in order of the first attempt; the limit counts
        anew."""
        taken = tuple(
            Violation(each.syscall, each.arguments, each.rule, each.process, self._counts[key])
            for key, each in self._noted.items()
        )
        self._noted.clear()
        self._counts.clear()
        self._left = self._limit
        return taken

    def _hear_of_open(self, notification: Notification) -> None:
        self._opens += 1
        attempt = evidence.open_attempt(self._watched[notification.number], notification)
        if self.on_door and attempt.path == DOOR:
            self.on_door(notification, attempt.flags)
        elif not self._is_of_machine(notification, attempt):
            self._look_at_open(notification, attempt)
            self._let_go_on(notification)

    def _hear_of_connect(self, notification: Notification) -> None:
        self._opens += 1
        words = evidence.describe("connect", notification)
        if evidence.leads_outside(words[1]):
            self._note(notification, "connect", words[1:], "network: no rule names an address")
        self._let_go_on(notification)

    def _is_of_machine(self, notification: Notification, attempt: OpenAttempt) -> bool:
        """Answer an open of a file that tells the size of the machine; return whether it was one."""
        return attempt.path.startswith(MACHINE_PLACES) and self._machine_files().answer_open(
            notification, attempt.path, attempt.flags
        )

    def _machine_files(self) -> "MachineFiles":
        if self._machine is None:  # few programs ask
            from .machine_files import MachineFiles

            self._machine = MachineFiles(
                self._descriptor, self._plan, self._cgroup, self.giver.give
            )
        return self._machine

    @property
    def giver(self) -> "Giver":
        """Gives descriptors to callers, in a thread."""
        if self._giver is None:  # few programs open what needs one
            from .giver import Giver

            self._giver = Giver(self._descriptor)
        return self._giver

    def close(self) -> None:
        """Free what the listener holds; its descriptor is the cell's."""
        self.locks.close()
        if self._giver:
            self._giver.close()
        if self._machine:
            self._machine.close()

    def _note_lock(self, notification: Notification, call: str, rule: str) -> None:
        self._note(notification, call, evidence.describe(call, notification), rule)

    def _look_at_open(self, notification: Notification, attempt: OpenAttempt) -> None:
        if rule := self._shown.why_not(attempt.path, attempt.flags):
            words = (evidence.quoted(attempt.name), evidence.flag_names(attempt.flags))
            self._note(notification, self._watched[notification.number], words, rule)

    def _let_go_on(self, notification: Notification) -> None:
        notifications.let_go_on(self._descriptor, notification)

    def _is_answered(self, notification: Notification) -> bool:
        """Tell whether the plan has an answer to this form of a call."""
        answers = self._answers.get(notification.number, ())
        return any(_holds(each, notification) for each in answers)

    def _refuse(self, notification: Notification) -> None:
        """Give the answer that the plan has for the call, and record it unless it is success."""
        number = notification.number
        answers = self._answers.get(number, ())
        fit = (each.errno for each in answers if _holds(each, notification))
        answer = next(fit, errno.EPERM)
        if answer == 0:
            self._opens += 1  # a flood of these is slowed down, as that of opens is
            notifications.succeed(self._descriptor, notification)
            return
        call, why = self._refusals.get(number, (f"call {number}", "not on the list"))
        words: tuple[str, ...] = ()
        if self._has_room:
            from ...policies.syscalls import refused_forms  # reads a table of TOML

            words = evidence.describe(call, notification)
            forms = refused_forms(self._groups).get(call, ())
            fitting = (reason for form, reason in forms if form.holds(notification.arguments))
            why = next(fitting, why)
        self._note(notification, call, words, f"seccomp: {why}")
        notifications.refuse(self._descriptor, notification, answer)

    @property
    def _has_room(self) -> bool:
        return len(self._noted) < _NOTED_IN_FULL

    def _note(
        self, notification: Notification, call: str, words: tuple[str, ...], rule: str
    ) -> None:
        self._left -= 1
        key = (call, words)
        if key not in self._noted:
            key = key if self._has_room else (call, ())
            if not notifications.is_waiting(self._descriptor, notification):
                return  # it died: what was read may have been another's
            who = evidence.who(notification.thread) if self._has_room else SEVERAL
            self._noted.setdefault(key, Violation(call, key[1], rule, who))
        self._counts[key] = self._counts.get(key, 0) + 1


def _holds(answer: CallAnswer, notification: Notification) -> bool:
    """Tell whether the answer is for this call.

    A guest that changes the numbers meanwhile gains nothing: the call is not made.
    """
    if not answer.rule.holds(notification.arguments):
        return False
    if not answer.at_most:
        return True
    size = 8 * len(answer.at_most)
    data = bytes_at(notification.thread, notification.arguments[answer.pointer], size)
    numbers = struct.unpack(f"={len(data) // 8}Q", data[: len(data) // 8 * 8])
    return len(data) == size and all(map(operator.le, numbers, answer.at_most))
