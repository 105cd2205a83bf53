"""A listener that allows the program's calls and records its needs."""

import os
from typing import TYPE_CHECKING

from ...policies.advice.learning import Lessons
from ...policies.compiling.host import SOCKETS_ABI
from ...policies.compiling.seccomp import number_of
from ...policies.compiling.syscalls import DEBUG, UNIX_SOCKETS, syscall_table
from ...policies.languages import SHEBANG_BYTES, shebang_of
from ...policies.plan import FILE_WATCHING, Plan, Rule
from ...policies.policy import lies_in
from ..cgroups.cgroup_tree import Cgroup
from ..fixed_root import LIKE_TMP
from ..kernel.notifications import Notification
from .cell_listener import Listener
from .evidence import OpenAttempt
from .shown import Shown
from .waiting_call import text_at

if TYPE_CHECKING:
    from .guarded_calls import OpenGuard

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EXECUTES = ("execve", "execveat")
# Files of the host that no program needs: a cell has its own, or a setting of the policy adds them.
_OF_THE_MACHINE = ("/proc", "/sys", "/dev/console", "/dev/ptmx", "/dev/pts", "/dev/tty")


class Learner(Listener):
    """Allows what some policy could allow; refuses the rest, as always."""

    def __init__(
        self, descriptor: int, plan: Plan, shown: Shown, lessons: Lessons, cgroup: Cgroup,
        open_guard: "OpenGuard | None" = None,
    ) -> None:  # fmt: skip
        """`shown`: the paths of the smallest cell. `lessons`: new needs are added to it."""
        super().__init__(descriptor, plan, shown, 2**31, cgroup, open_guard)
        self._lessons = lessons
        self._grants = _grants()
        # An observed program sees directories with sockets of the host; only this ABI refuses
        # connections to them.
        sockets = () if plan.landlock_abi >= SOCKETS_ABI else (UNIX_SOCKETS,)
        # Calls that attach a tracer or add a watch continue only after a decision.
        self._withheld = (DEBUG, FILE_WATCHING, *sockets)
        # `shown` treats all of /tmp and its like as the cell's own, files of the host there included.
        binds, own = tuple(bind.path for bind in plan.binds), ("/tmp", *LIKE_TMP)  # noqa: S108
        self._in_tmp = tuple(
            path for path in (*binds, *LIKE_TMP) if lies_in(path, own) and lies_in(path, binds)
        )

    def _look_at_open(self, notification: Notification, attempt: OpenAttempt) -> None:
        path = os.path.normpath(attempt.path)
        why = self._shown.why_not(path, attempt.flags) or lies_in(path, self._in_tmp)
        if not why or not os.path.exists(path):
            return
        real = os.path.realpath(path)
        if lies_in(real, _OF_THE_MACHINE):
            return
        if attempt.flags & _WRITES:
            self._lessons.written.add(real)
        elif ".so" in os.path.basename(real):
            self._lessons.mapped.add(real)
        else:
            self._lessons.read.add(real)

    def _refuse(self, notification: Notification) -> None:
        for group, rule in self._grants.get(notification.number, ()):
            if rule.holds(notification.arguments):
                self._learn(group, rule.call, notification)
                if group in self._withheld:
                    self._lessons.withheld.add(group)
                    break
                return self._let_go_on(notification)
        call, why = self._refusals.get(notification.number, ("", ""))
        if call in syscall_table().refused:
            self._lessons.impossible[call] = why
        return super()._refuse(notification)

    def _learn(self, group: str, call: str, notification: Notification) -> None:
        self._lessons.groups.setdefault(group, call)
        self._lessons.serves |= call == "bind"
        if call in _EXECUTES:
            path = notification.arguments[0 if call == "execve" else 1]
            program = os.fsdecode(text_at(notification.thread, path))
            self._lessons.executed.update(_with_interpreter(program))


def _with_interpreter(program: str) -> list[str]:
    if not (os.path.isabs(program) and os.path.isfile(program)):
        return []
    real = os.path.realpath(program)
    with open(real, "rb") as file:
        words = shebang_of(file.read(SHEBANG_BYTES))
    return [real, *_with_interpreter(words[0])] if words else [real]


def _grants() -> dict[int, list[tuple[str, Rule]]]:
    table = syscall_table()
    found: dict[int, list[tuple[str, Rule]]] = {}
    for group, rule in table.beyond(("base",)):
        found.setdefault(number_of(rule.call, table), []).append((group, rule))
    return found
