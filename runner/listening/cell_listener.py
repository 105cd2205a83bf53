"""`Listener`: the supervisor's end of a cell's seccomp listener, which reports refused attempts.

The cell's filter has already decided which calls are refused. The listener returns the plan's errno and
records the attempt; calls that would change nothing succeed. A guest that floods the listener costs
little: the first attempts are noted in full, then counted per call, and past the limit the cell is
killed. Opening files and locking them is legitimate, so a cell that does it a great many times is
slowed down instead.
"""

import contextlib
import errno
import operator
import os
import struct
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ...policies.errors import InternalError
from ...policies.plan import CallAnswer, Plan, Rule
from ..cgroups.cgroup_tree import Cgroup
from ..kernel import notifications
from ..kernel.notifications import Notification
from ..requests.result import SEVERAL, Violation
from . import evidence
from .evidence import OpenAttempt
from .locks import Locks
from .shown import Shown
from .waiting_call import bytes_at

if TYPE_CHECKING:
    from .file_watches import FileWatches
    from .guarded_calls import OpenGuard
    from .interfaces import NetlinkSockets
    from .machine_files import MachineFiles
    from .waiting_call import Giver


# The kernel decides by ids, dumpability and Landlock whether one process may trace another. That
# leaves two attachments that would reach beyond the cell. (1) The parent of the guest's own process
# is the launcher: PTRACE_TRACEME would make that its tracer, which never waits for a stop, and
# never reaps a thread. (2) SIGKILL does not pass PTRACE_EVENT_EXIT (tried on Linux 6.18): the
# tracee ends when its tracer goes on or ends; where the tracer's own tracer is its tracee, maybe
# through others, nothing ends either. The kernel attaches after the answer, so the last request of
# a thread counts as done until its next one. A parent that ends meanwhile leaves its child to init,
# which never stops it at its end, or to another guest: so a process that may have tracees gets no
# PTRACE_TRACEME.
_TRACEME = 0
_INIT = 1
_MOST_REMEMBERED = 64
_NO_SHARING = "locks: a record lock of this process is in doubt for a second"
_NOT_BY_US = "ptrace: the parent is no program of the cell"
_NO_CIRCLE = "ptrace: a tracer may not be traced by what it traces"

# arguments: the call's notification, its name, the rule that refuses it
Note = Callable[[Notification, str, str], None]


class _Task(NamedTuple):
    """A thread: as the cell numbers it, in how many pid namespaces, and others as the host does."""

    number: int
    depth: int
    process: int
    parent: int
    tracer: int


class _Grant(NamedTuple):
    tracers: tuple[int, ...]  # one of these threads traces
    target: int  # pid in the cell's pid namespace


class Tracing:
    """Judges the attachments of one cell."""

    def __init__(
        self,
        listener: int,
        judged: dict[int, tuple[Rule, ...]],
        note: Note,
        share: Callable[[int], bool],
    ) -> None:
        """`judged` as in `Plan`; `note` records a refusal while the call still waits; `share` is
        called with a process that will share its descriptors with another, and returns whether it
        may."""
        self._share = share
        self._listener = listener
        self._judged = judged
        self._note = note
        self._latest: dict[int, _Grant] = {}  # the latest grant of each thread that asked
        self._tracers: set[int] = set()  # processes that may have tracees

    def answer(self, notification: Notification) -> None:
        """Let a call go on, or refuse it."""
        try:
            why = self._why_not(notification)
        except OSError:  # the caller or its parent has ended
            why = _NOT_BY_US
        if why:
            self._note(notification, self._judged[notification.number][0].call, why)
            notifications.refuse(self._listener, notification, errno.EPERM)
        else:
            notifications.let_go_on(self._listener, notification)

    def _why_not(self, notification: Notification) -> str:
        caller = _task(notification.thread)
        if self._judged[notification.number][0].call == "clone":
            return "" if self._share(caller.process) else _NO_SHARING
        if notification.arguments[0] & 0xFFFFFFFF == _TRACEME:
            parent = _task(caller.parent)
            if parent.depth != caller.depth or parent.number == _INIT:
                return _NOT_BY_US
            if caller.process in self._tracers:
                return _NO_CIRCLE
            grant = _Grant(_threads(parent.process), caller.number)
            tracer = parent.process
        else:
            grant = _Grant((notification.thread,), notification.arguments[1] & 0xFFFFFFFF)
            tracer = caller.process
        if self._traces(grant.target, grant.tracers):
            return _NO_CIRCLE
        self._remember(notification.thread, grant, tracer)
        return ""

    def _traces(self, target: int, tracers: Iterable[int]) -> bool:
        """Tell whether `target` is one of `tracers`, or traces one of them, maybe through others."""
        seen: set[int] = set()
        further = list(tracers)
        while further:
            if (thread := further.pop()) in seen:
                continue
            seen.add(thread)
            with contextlib.suppress(OSError):  # it has ended
                task = _task(thread)
                if task.number == target:
                    return True
                further += [task.tracer] if task.tracer else []
                for grant in self._latest.values():
                    further += grant.tracers if grant.target == task.number else ()
        return False

    def _remember(self, thread: int, grant: _Grant, tracer: int) -> None:
        if len(self._latest) + len(self._tracers) > _MOST_REMEMBERED:
            living = {each: of for each, of in self._latest.items() if _lives(each)}
            self._latest, self._tracers = living, set(filter(_lives, self._tracers))
        self._latest[thread] = grant
        self._tracers.add(tracer)


def _task(thread: int) -> _Task:
    with open(f"/proc/{thread}/status", "rb") as file:
        lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    numbers = lines[b"NSpid"].split()
    host = (int(lines[name]) for name in (b"Tgid", b"PPid", b"TracerPid"))
    return _Task(int(numbers[-1]), len(numbers), *host)


def _threads(process: int) -> tuple[int, ...]:
    return tuple(map(int, os.listdir(f"/proc/{process}/task")))


def _lives(task: int) -> bool:
    return os.path.exists(f"/proc/{task}")


_OPENS = ("open", "openat", "creat")
_NOTED_IN_FULL = 100  # distinct attempts kept in full; of further ones only the call's name
_OPENS_AT_ONCE = 20_000
_OPENS_BETWEEN_RESTS = 100
DOOR = "/dev/tools"  # no file has this path; open_calls.py handles its opens
MACHINE_PLACES = ("/proc/", "/sys/fs/cgroup/")
REST_SECONDS = 0.01  # limits a cell to 10,000 opens a second, 8 % of a CPU (measured: 8 µs each)


class Listener:
    """Answers the notifications of one cell and records the refused attempts."""

    def __init__(
        self, descriptor: int, plan: Plan, shown: Shown, limit: int, cgroup: Cgroup,
        open_guard: "OpenGuard | None" = None,
    ) -> None:  # fmt: skip
        self._descriptor = descriptor
        self._plan = plan
        self._cgroup = cgroup
        self._machine: MachineFiles | None = None
        self._watches: FileWatches | None = None
        self._netlink: NetlinkSockets | None = None
        self._measured = plan.measured
        self._noted_calls = plan.noted
        # True once a process may have made System V objects that outlive it
        self.has_system_v = False
        self._refusals = plan.refusals
        self._answers = plan.answers
        self._groups = plan.groups
        self._watched = plan.watched
        self._shown = shown
        self._giver: Giver | None = None
        self.locks = Locks(descriptor, plan.locks, self._note_call)
        self._tracing = Tracing(descriptor, plan.judged, self._note_call, self.locks.share)
        self._judged = plan.judged
        self._guarded = None
        if plan.guarded:
            if open_guard is None:  # opens would go on
                raise InternalError("a cell has protected paths, but can have no guard")
            from .guarded_calls import GuardedCalls  # few policies protect paths

            self._guarded = GuardedCalls(descriptor, plan.guarded, self._note, open_guard)
        self._noting = threading.Lock()  # guarded calls are noted by a thread of their own
        self._left = self._limit = limit
        self.has_refused = False  # since `take_violations`
        self._opens = 0
        self._noted: dict[tuple[str, tuple[str, ...]], Violation] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], int] = {}
        # Set while tools can be called: handles an open of DOOR with its flags.
        self.on_door: Callable[[Notification, int], None] | None = None
        notifications.wake_in_sync(descriptor)

    def answer(self) -> None:
        """Answer the next notification."""
        notification = notifications.receive(self._descriptor)
        if notification is None:
            return
        if (call := self._watched.get(notification.number)) == "connect":
            self._on_connect(notification)
        elif call:
            self._on_open(notification, call)
        elif self._guarded and (call := self._guarded.name_of(notification)):
            self._on_guarded(notification, call)
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
        elif form := self._judged_form(notification):
            self._opens += 1
            if form.call == "socket":
                self._answer_netlink(notification)
            elif form.call == "ioctl":
                from . import interfaces  # few programs ask

                interfaces.answer_request(self._descriptor, notification)
            elif form.call == "prlimit64":
                self._answer_limits(notification)
            elif form.call == "inotify_add_watch":
                self._file_watches().answer(notification)
            else:
                self._tracing.answer(notification)
        else:
            self._refuse(notification)

    @property
    def is_flooded(self) -> bool:
        return self._left < 0

    def needs_rest(self) -> bool:
        """Tell whether the guest has opened so much that it should wait for REST_SECONDS."""
        return self._opens > _OPENS_AT_ONCE and self._opens % _OPENS_BETWEEN_RESTS == 0

    def take_violations(self) -> tuple[Violation, ...]:
        """Return the attempts refused since the last call, in order of the first; the limit starts
        again."""
        with self._noting:
            taken = tuple(
                Violation(each.syscall, each.arguments, each.rule, each.process, self._counts[key])
                for key, each in self._noted.items()
            )
            self.has_refused = False
            self._noted.clear()
            self._counts.clear()
            self._left = self._limit
        return taken

    def _on_open(self, notification: Notification, call: str) -> None:
        self._opens += 1
        attempt = evidence.open_attempt(call, notification)
        if self.on_door and attempt.path == DOOR:
            self.on_door(notification, attempt.flags)
        elif not self._is_of_machine(notification, attempt):
            if notification.number in self._watched:
                self._look_at_open(notification, attempt)
            if self._guarded and self._guarded.name_of(notification):
                self._guarded.answer(notification)
            else:
                self._let_go_on(notification)

    def _on_guarded(self, notification: Notification, call: str) -> None:
        if call in _OPENS:
            self._on_open(notification, call)
            return
        self._opens += 1
        if self._guarded:
            self._guarded.answer(notification)

    def _on_connect(self, notification: Notification) -> None:
        self._opens += 1
        words = evidence.describe("connect", notification)
        if evidence.leads_outside(words[1]):
            self._note(notification, "connect", words[1:], "network: no rule names an address")
        self._let_go_on(notification)

    def _is_of_machine(self, notification: Notification, attempt: OpenAttempt) -> bool:
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

    def _file_watches(self) -> "FileWatches":
        if self._watches is None:  # few programs watch files
            from .file_watches import FileWatches

            self._watches = FileWatches(self._descriptor, self._plan)
        return self._watches

    @property
    def giver(self) -> "Giver":
        """Gives descriptors to callers, in a thread."""
        if self._giver is None:  # few programs open files that need a giver
            from .waiting_call import Giver

            self._giver = Giver(self._descriptor)
        return self._giver

    def close(self) -> None:
        """Free the resources of the listener; its descriptor belongs to the cell."""
        self.locks.close()
        if self._guarded:
            self._guarded.close()
        if self._giver:
            self._giver.close()
        if self._machine:
            self._machine.close()
        if self._watches:
            self._watches.close()

    def _note_call(self, notification: Notification, call: str, rule: str) -> None:
        self._note(notification, call, evidence.describe(call, notification), rule)

    def _look_at_open(self, notification: Notification, attempt: OpenAttempt) -> None:
        if rule := self._shown.why_not(attempt.path, attempt.flags):
            words = (evidence.quoted(attempt.name), evidence.flag_names(attempt.flags))
            self._note(notification, self._watched[notification.number], words, rule)

    def _let_go_on(self, notification: Notification) -> None:
        notifications.let_go_on(self._descriptor, notification)

    def _judged_form(self, notification: Notification) -> Rule | None:
        forms = self._judged.get(notification.number, ())
        return next((each for each in forms if each.holds(notification.arguments)), None)

    def _answer_netlink(self, notification: Notification) -> None:
        from . import interfaces  # few programs ask

        self._netlink = self._netlink or interfaces.NetlinkSockets()
        if self._netlink.may_have_another(notification.thread, notification.number):
            self._let_go_on(notification)
        else:
            self._note_call(notification, "socket", interfaces.TOO_MANY)
            notifications.refuse(self._descriptor, notification, errno.ENOBUFS)

    def _answer_limits(self, notification: Notification) -> None:
        """Let a process set its own limits; for another one answer EPERM, or ESRCH if there is none."""
        from .machine_files import ids_of  # few programs name themselves

        thread, number = notification.thread, notification.arguments[0] & 0xFFFFFFFF
        try:
            is_own = number in ids_of(thread)
            os.stat(f"/proc/{thread}/root/proc/{number}")
        except FileNotFoundError:
            notifications.refuse(self._descriptor, notification, errno.ESRCH)
            return
        except OSError:  # the host forbids to look
            is_own = False
        if is_own:
            self._let_go_on(notification)
        else:
            self._refuse(notification)

    def _is_answered(self, notification: Notification) -> bool:
        answers = self._answers.get(notification.number, ())
        return any(_holds(each, notification) for each in answers)

    def _refuse(self, notification: Notification) -> None:
        """Give the answer that the plan has for the call; record all but success and quiet answers."""
        number = notification.number
        answers = self._answers.get(number, ())
        fit = next((each for each in answers if _holds(each, notification)), None)
        answer = fit.errno if fit else errno.EPERM
        if answer == 0:
            self._opens += 1  # a flood of these is slowed down like a flood of opens
            notifications.succeed(self._descriptor, notification)
            return
        if fit and fit.quiet:
            self._opens += 1
            notifications.refuse(self._descriptor, notification, answer)
            return
        call, why = self._refusals.get(number, (f"call {number}", "not on the list"))
        words: tuple[str, ...] = ()
        if self._has_room:
            from ...policies.compiling.syscalls import refused_forms  # reads TOML

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
        with self._noting:
            self._left -= 1
            self.has_refused = True
            key = (call, words)
            if key not in self._noted:
                key = key if self._has_room else (call, ())
                if not notifications.is_waiting(self._descriptor, notification):
                    return  # the thread died, so the data may be another process's
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
