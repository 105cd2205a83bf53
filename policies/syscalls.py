"""Rules for system calls, read from the groups of syscalls.toml, and the settings that add a group."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

NEWEST_NUMBER = 469  # file_setattr, Linux 6.17: the filter answers ENOSYS to every later call

# Setting of a policy -> the groups that it adds to base if it is true.  base has socketpair, for
# asyncio.  local_sockets can pass descriptors, which the kernel counts per uid over all cells
# (unix(7), ETOOMANYREFS), so only programs that need the group get it.
ADDED_BY = {
    "processes.threads": ("threads",),
    "processes.subprocesses": ("processes", "exec", "local_sockets"),
    "processes.terminal": ("terminal",),
    "network.loopback": ("loopback_sockets", "local_sockets"),
}
_NO_FORM = "not with these arguments"


class Condition(msgspec.Struct, frozen=True):
    """One argument must equal `value` in the bits of `mask`."""

    argument: int
    mask: int
    value: int


class Rule(msgspec.Struct, frozen=True):
    """A call that is allowed if every condition holds; several rules for one call are alternatives."""

    call: str
    conditions: tuple[Condition, ...] = ()

    def holds(self, arguments: Sequence[int]) -> bool:
        """Tell whether the rule allows the call with these arguments."""
        return all(arguments[each.argument] & each.mask == each.value for each in self.conditions)


class SyscallTable(msgspec.Struct, frozen=True):
    """syscalls.toml, parsed."""

    groups: dict[str, tuple[Rule, ...]]
    ignored: dict[str, tuple[Rule, ...]]  # by group: calls that succeed and are not made
    init: tuple[Rule, ...]
    locks: dict[str, tuple[Rule, ...]]  # by kind of lock: "record", "whole", "open_file"
    refused: dict[str, str]
    quiet: tuple[str, ...]  # refused without notice to the listener
    watched: tuple[str, ...]  # allowed with notice to the listener
    unknown: tuple[str, ...]
    numbers: dict[str, int]

    def rules(self, groups: tuple[str, ...]) -> tuple[Rule, ...]:
        return tuple(rule for group in groups for rule in self.groups[group])

    def refusals(self, groups: tuple[str, ...]) -> dict[str, str]:
        """Return the reason why each call, or a form of it, is refused if only `groups` are allowed.

        `refused_forms` has the reasons that depend on the arguments.
        """
        allowed = {rule.call: rule.conditions for rule in self.rules(groups)}
        reasons = {
            rule.call: _NO_FORM if rule.conditions else needs(name)
            for name, rules in self.groups.items()
            for rule in rules
            if allowed.get(rule.call, True)  # () where every form is allowed
        }
        return reasons | self.refused

    def beyond(self, groups: tuple[str, ...]) -> Iterator[tuple[str, Rule]]:
        """Yield the rules of all other groups, each with its group."""
        for name, rules in self.groups.items():
            if name not in groups:
                yield from ((name, rule) for rule in (*rules, *self.ignored[name]))


def settings_of(group: str) -> tuple[str, ...]:
    """Return the settings of a policy that add `group`; each is enough."""
    found = tuple(f"{setting} = true" for setting, added in ADDED_BY.items() if group in added)
    return found or (f'syscalls.groups = ["{group}"]',)


def needs(group: str) -> str:
    """Return the reason why a call of `group` is refused: no setting of the policy adds the group."""
    return f"needs {' or '.join(settings_of(group))}"


@cache
def refused_forms(groups: tuple[str, ...]) -> dict[str, tuple[tuple[Rule, str], ...]]:
    """Return, by call, the forms that other groups than `groups` allow, each with the reason."""
    forms: dict[str, tuple[tuple[Rule, str], ...]] = {}
    for name, rule in syscall_table().beyond(groups):
        if rule.conditions:
            forms[rule.call] = (*forms.get(rule.call, ()), (rule, needs(name)))
    return forms


@cache
def syscall_table() -> SyscallTable:
    """Return syscalls.toml, parsed; equal on every host."""
    import tomllib  # a plan that was compiled before needs no table

    data = tomllib.loads(Path(__file__).with_name("syscalls.toml").read_text())
    parts = data["refused"].values()
    refused = {call: reason for part in parts for call, reason in part["calls"].items()}
    return SyscallTable(
        groups={name: _rules(group) for name, group in data["groups"].items()},
        ignored={
            name: tuple(map(_conditional, group.get("ignored", ())))
            for name, group in data["groups"].items()
        },
        init=_rules(data["init"]),
        locks={
            kind: tuple(map(_conditional, data["locks"][kind]))
            for kind in ("record", "whole", "open_file")
        },
        refused={call: _spelled_out(reason, refused) for call, reason in refused.items()},
        quiet=tuple(call for part in parts if "quiet" in part for call in part["calls"]),
        watched=tuple(data["watched"]["calls"]),
        unknown=tuple(data["unknown"]["calls"]),
        numbers=data["numbers"],
    )


def _spelled_out(reason: str, refused: dict[str, str]) -> str:
    """Return the reason of the call `setuid` for the reason "as setuid"."""
    word, _, other = reason.partition(" ")
    return refused.get(other, reason) if word == "as" else reason


def _rules(group: dict[str, Any]) -> tuple[Rule, ...]:
    plain = [Rule(call) for call in group.get("calls", {})]
    return tuple(plain + [_conditional(entry) for entry in group.get("conditional", [])])


def _conditional(entry: dict[str, Any]) -> Rule:
    conditions = (
        Condition(each["argument"], _integer(each["masked"]), _integer(each["equals"]))
        for each in entry["when"]
    )
    return Rule(entry["call"], tuple(conditions))


def _integer(value: int | str) -> int:
    return value if isinstance(value, int) else int(value, 0)
