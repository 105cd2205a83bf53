"""The groups of system calls in syscalls.toml, as rules."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

NEWEST_NUMBER = 469  # file_setattr, Linux 6.17: what comes after is unknown here, and so ENOSYS


class Condition(msgspec.Struct, frozen=True):
    """One argument must equal `value` in the bits of `mask`."""

    argument: int
    mask: int
    value: int


class Rule(msgspec.Struct, frozen=True):
    """A call is allowed if every condition holds; several rules for one call are alternatives."""

    call: str
    conditions: tuple[Condition, ...] = ()


class Table(msgspec.Struct, frozen=True):
    """syscalls.toml, parsed."""

    groups: dict[str, tuple[Rule, ...]]
    init: tuple[Rule, ...]
    refused: dict[str, str]
    unknown: tuple[str, ...]
    numbers: dict[str, int]

    def rules(self, groups: tuple[str, ...]) -> tuple[Rule, ...]:
        return tuple(rule for group in groups for rule in self.groups[group])


@cache
def syscall_table() -> Table:
    """Read syscalls.toml; the same for every host."""
    data = tomllib.loads(Path(__file__).with_name("syscalls.toml").read_text())
    refused = {
        call: reason for part in data["refused"].values() for call, reason in part["calls"].items()
    }
    return Table(
        groups={name: _rules(group) for name, group in data["groups"].items()},
        init=_rules(data["init"]),
        refused=refused,
        unknown=tuple(data["unknown"]["calls"]),
        numbers=data["numbers"],
    )


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
