"""Rules for system calls, read from the groups of syscalls.toml, and the settings that add a group."""

import errno
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from ..plan import FILE_WATCHING, CallAnswer, Condition, Rule

NEWEST_NUMBER = 469  # file_setattr, Linux 6.17: the filter answers ENOSYS to every later call

# compile.py omits this group if a program could reach the host's sockets, unless a policy names it.
UNIX_SOCKETS = "unix_sockets"
DEBUG = "debug"
# Setting of a policy -> the groups that it adds to base if it is true.  base has socketpair, for
# asyncio.  local_sockets can pass descriptors, which the kernel counts per uid over all cells
# (unix(7), ETOOMANYREFS), so only programs that need the group get it.
ADDED_BY = {
    "processes.threads": ("threads",),
    "processes.subprocesses": (
        "processes", "exec", "local_sockets", UNIX_SOCKETS, "sysv_ipc", "interfaces",
        FILE_WATCHING,
    ),
    "processes.terminal": ("terminal",),
    "processes.debug": (DEBUG,),
    "network.loopback": ("loopback_sockets", "local_sockets", UNIX_SOCKETS),
}  # fmt: skip
OF_IMAGES = ("ids", "one_id")  # groups of cells whose root is an image
_NO_FORM = "not with these arguments"


class SyscallTable(msgspec.Struct, frozen=True):
    """syscalls.toml, parsed."""

    groups: dict[str, tuple[Rule, ...]]
    ignored: dict[str, tuple[CallAnswer, ...]]  # by group: calls that succeed without being made
    judged: dict[str, tuple[Rule, ...]]  # by group: forms on which the listener decides
    init: tuple[Rule, ...]
    locks: dict[str, tuple[Rule, ...]]  # by kind of lock: "record", "whole", "open_file"
    refused: dict[str, str]
    answers: tuple[
        CallAnswer, ...
    ]  # the errnos of refused calls and forms; the first that holds counts
    quiet: tuple[str, ...]  # calls refused without notice to the listener
    watched: tuple[str, ...]  # calls allowed with notice to the listener
    measured: tuple[str, ...]  # allowed calls that the listener answers
    noted: tuple[str, ...]  # calls of allowed groups that the listener notes
    guarded: tuple[Rule, ...]  # forms that the guard makes for programs where paths are protected
    unguarded: tuple[Rule, ...]  # the other forms of these calls
    modes: tuple[Rule, ...]  # forms, of calls that set a mode, that leave no set-uid program
    set_uid: tuple[Rule, ...]  # forms of these calls that make a file that is one
    unknown: tuple[str, ...]
    numbers: dict[str, int]

    def answers_of(self, groups: tuple[str, ...]) -> tuple[CallAnswer, ...]:
        """Return the answers to calls that the rules of `groups` do not allow."""
        ignored = (each for group in groups for each in self.ignored[group])
        return (*ignored, *self.answers)

    def rules(self, groups: tuple[str, ...]) -> tuple[Rule, ...]:
        return tuple(rule for group in groups for rule in self.groups[group])

    def refusals(self, groups: tuple[str, ...]) -> dict[str, str]:
        """Return the reason why each call, or a form of it, is refused if only `groups` are allowed.

        `refused_forms` has the reasons that depend on the arguments.
        """
        allowed = {rule.call: rule.conditions for rule in self.rules(groups)}
        reasons = {
            rule.call: _NO_FORM if rule.conditions else needs(name, groups)
            for name in self.groups
            for rule in (*self.groups[name], *self.judged[name])
            if allowed.get(rule.call, True)  # () where every form is allowed
        }
        ignored = {each.rule.call: _NO_FORM for some in self.ignored.values() for each in some}
        return ignored | reasons | self.refused

    def beyond(self, groups: tuple[str, ...]) -> Iterator[tuple[str, Rule]]:
        """Yield the rules of all other groups, each with its group."""
        for name, rules in self.groups.items():
            if name not in groups:
                ignored = (each.rule for each in self.ignored[name])
                yield from ((name, rule) for rule in (*rules, *ignored, *self.judged[name]))


def settings_of(group: str, granted: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the settings of a policy that add `group`; each is enough.

    If the other groups of such a setting are `granted`, the policy has the setting, and that was not
    enough: then only naming the group is.
    """
    if group in OF_IMAGES:
        return ("an image",)
    if group.startswith("gpu_"):
        return (f'devices.gpu = "{group.removeprefix("gpu_")}"',)
    others = {name: {*added} - {group} for name, added in ADDED_BY.items() if group in added}
    if not others or any(each and each <= {*granted} for each in others.values()):
        return (f'syscalls.groups = ["{group}"]',)
    settings = tuple(f"{setting} = true" for setting in others)
    # Without a named group, programs that start no other program get the least.
    return (f'syscalls.groups = ["{group}"]', *settings) if group == FILE_WATCHING else settings


def needs(group: str, granted: Sequence[str] = ()) -> str:
    """Return the reason why a call of `group` is refused if only `granted` groups are allowed."""
    return f"needs {' or '.join(settings_of(group, granted))}"


@cache
def refused_forms(groups: tuple[str, ...]) -> dict[str, tuple[tuple[Rule, str], ...]]:
    """Return, by call, the forms that other groups than `groups` allow, each with the reason."""
    forms: dict[str, tuple[tuple[Rule, str], ...]] = {}
    for name, rule in syscall_table().beyond(groups):
        if rule.conditions:
            forms[rule.call] = (*forms.get(rule.call, ()), (rule, needs(name, groups)))
    return forms


@cache
def syscall_table() -> SyscallTable:
    """Return syscalls.toml, parsed; equal on every host."""
    import tomllib  # a plan that was compiled before needs no table

    data = tomllib.loads(Path(__file__).with_name("syscalls.toml").read_text())
    parts = data["refused"].values()
    refused = {call: reason for part in parts for call, reason in part["calls"].items()}
    wholly = (
        CallAnswer(Rule(call), getattr(errno, part["answer"]))
        for part in parts
        if "answer" in part
        for call in part["calls"]
    )
    forms = (
        CallAnswer(rule, getattr(errno, entry["answer"]), quiet="quiet" in entry)
        for entry in data["answers"]
        for rule in _conditional([entry])
    )
    return SyscallTable(
        groups={name: _rules(group) for name, group in data["groups"].items()},
        ignored={
            name: _successes(group.get("ignored", ())) for name, group in data["groups"].items()
        },
        judged={
            name: _conditional(group.get("judged", ())) for name, group in data["groups"].items()
        },
        init=_rules(data["init"]),
        locks={
            kind: _conditional(data["locks"][kind]) for kind in ("record", "whole", "open_file")
        },
        refused={call: _spelled_out(reason, refused) for call, reason in refused.items()},
        answers=(*forms, *wholly),
        quiet=tuple(call for part in parts if "quiet" in part for call in part["calls"]),
        watched=tuple(data["watched"]["calls"]),
        measured=tuple(data["measured"]["calls"]),
        noted=tuple(data["noted"]["calls"]),
        guarded=_conditional(data["guarded"]["forms"]),
        unguarded=_conditional(data["guarded"]["others"]),
        modes=_conditional(data["without_set_uid"]["forms"]),
        set_uid=_conditional(data["without_set_uid"]["refused"]),
        unknown=tuple(data["unknown"]["calls"]),
        numbers=data["numbers"],
    )


def _spelled_out(reason: str, refused: dict[str, str]) -> str:
    """Return the reason of the call `setuid` for the reason "as setuid"."""
    word, _, other = reason.partition(" ")
    return refused.get(other, reason) if word == "as" else reason


def _rules(group: dict[str, Any]) -> tuple[Rule, ...]:
    plain = (Rule(call) for call in group.get("calls", {}))
    return (*plain, *_conditional(group.get("conditional", ())))


def _successes(entries: Sequence[dict[str, Any]]) -> tuple[CallAnswer, ...]:
    return tuple(
        CallAnswer(
            rule,
            0,
            pointer=entry.get("at_most", {}).get("argument", -1),
            at_most=tuple(entry.get("at_most", {}).get("values", ())),
        )
        for entry in entries
        for rule in _conditional([entry])
    )


def _conditional(entries: Sequence[dict[str, Any]]) -> tuple[Rule, ...]:
    """Return a rule for each choice of values, where an entry lists several for an argument."""
    return tuple(
        Rule(entry["call"], conditions)
        for entry in entries
        for conditions in product(*map(_choices, entry["when"]))
    )


def _choices(when: dict[str, Any]) -> list[Condition]:
    equals = when["equals"]
    values = equals if isinstance(equals, list) else [equals]
    return [Condition(when["argument"], int(when["masked"], 0), int(each, 0)) for each in values]
