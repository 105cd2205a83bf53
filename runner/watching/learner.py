"""A listener that lets a program go on and records what it needs."""

import os

from ...policies.host import SOCKETS_ABI
from ...policies.languages import SHEBANG_BYTES, shebang_of
from ...policies.learning import Lessons
from ...policies.plan import Plan, Rule
from ...policies.policy import lies_in
from ...policies.seccomp import number_of
from ...policies.syscalls import UNIX_SOCKETS, syscall_table
from ..cgroups.tree import Cgroup
from ..kernel.notifications import Notification
from .evidence import OpenAttempt
from .guest_memory import text_at
from .listener import Listener
from .shown import Shown

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EXECUTES = ("execve", "execveat")


class Learner(Listener):
    """Allows what some policy could allow; refuses the rest, as always."""

    def __init__(
        self, descriptor: int, plan: Plan, shown: Shown, lessons: Lessons, cgroup: Cgroup
    ) -> None:
        """`shown` is what the smallest cell shows anyway; `lessons` is added to."""
        super().__init__(descriptor, plan, shown, limit=2**31, cgroup=cgroup)
        self._lessons = lessons
        self._grants = _grants()
        # An observed program sees directories with the host's sockets; only this ABI refuses those.
        self._withheld = () if plan.landlock_abi >= SOCKETS_ABI else (UNIX_SOCKETS,)
        # To `shown` all of /tmp is the cell's own, so it takes files of the host there for the cell's.
        binds = (bind.path for bind in plan.binds)
        self._in_tmp = tuple(path for path in binds if path.startswith("/tmp/"))  # noqa: S108

    def _look_at_open(self, notification: Notification, attempt: OpenAttempt) -> None:
        path = os.path.normpath(attempt.path)
        why = self._shown.why_not(path, attempt.flags) or lies_in(path, self._in_tmp)
        if not why or not os.path.exists(path):
            return
        real = os.path.realpath(path)
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
    """Return the file that `program` names and, for a script, its interpreter."""
    if not (os.path.isabs(program) and os.path.isfile(program)):
        return []
    real = os.path.realpath(program)
    with open(real, "rb") as file:
        words = shebang_of(file.read(SHEBANG_BYTES))
    return [real, *_with_interpreter(words[0])] if words else [real]


def _grants() -> dict[int, list[tuple[str, Rule]]]:
    """Return, by call number, the rules of every group beyond plain computation."""
    table = syscall_table()
    found: dict[int, list[tuple[str, Rule]]] = {}
    for group, rule in table.beyond(("base",)):
        found.setdefault(number_of(rule.call, table), []).append((group, rule))
    return found
