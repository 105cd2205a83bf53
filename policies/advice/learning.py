"""Lessons: the needs of an observed program, and the smallest policy that grants them;
and network rules that a person adds to the text of a policy.  Pure."""

import os
import tomllib
from collections import Counter
from typing import Any

import msgspec

from ..compiling.syscalls import UNIX_SOCKETS, settings_of
from ..errors import PolicyError
from ..network.rule import NetworkDenial, NetworkRule
from ..policy import Network, Policy, Python, check_policy, lies_in

_LOOPBACK = "network.loopback = true"  # a setting, as settings_of names it
_SAME_DIRECTORY = 4  # from this many files of one directory, the policy names the directory instead


_WITHOUT_SOCKETS = [
    "# Unix sockets were refused during this run: the program would have reached those of the host.",
    "# So it may need more than it could try.  With paths below [filesystem] it needs",
    '# syscalls.groups = ["unix_sockets"], and then reaches the sockets that lie there.',
]


class Lessons(msgspec.Struct):
    """Observations of a run: opened paths, executed programs, groups of system calls used beyond plain
    computation, and calls that no policy can allow."""

    read: set[str] = msgspec.field(default_factory=set)
    written: set[str] = msgspec.field(default_factory=set)
    executed: set[str] = msgspec.field(default_factory=set)
    mapped: set[str] = msgspec.field(default_factory=set)  # libraries, whose pages are executed
    groups: dict[str, str] = msgspec.field(default_factory=dict)  # group -> a call that needs it
    impossible: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # call -> reason of the refusal
    withheld: set[str] = msgspec.field(default_factory=set)  # groups refused during the observation
    hosts: set[str] = msgspec.field(default_factory=set)  # names whose lookup failed
    serves: bool = False  # a socket was given an address, as servers do and resolvers do not


def policy_text(name: str, lessons: Lessons, python: Python = Python()) -> str:  # noqa: B008
    """Return a policy as TOML, with a reason beside every entry, for a person to review.

    `python` has the packages that the observed program could import.  A directory is kept if the
    program opened a file in it; all are kept if modules are preloaded, because the launcher imports
    them unobserved.
    """
    seen = lessons.read | lessons.executed | lessons.mapped
    packages = tuple(
        each
        for each in python.path
        if python.preload or any(lies_in(path, (each,)) for path in seen)
    )

    def outside(paths: set[str]) -> set[str]:
        return {path for path in paths if not lies_in(path, packages)}

    executable = outside(lessons.executed | lessons.mapped)
    sections = {
        "filesystem": [
            *_paths("read", outside(lessons.read - executable - lessons.written), "opened"),
            *_paths("write", lessons.written, "opened for writing"),
        ],
        "processes": [*_switches("processes", lessons), *_paths("execute", executable, "executed")],
        "network": [*_switches("network", lessons), *_hosts(lessons.hosts)],
        "syscalls": _switches("syscalls", lessons),
        "python": [
            *_paths("path", set(packages), "imported from"),
            *_paths("preload", set(python.preload), "imported ahead"),
        ],
    }
    lines = ["# Learned from one run: read it, and keep what you agree with.", ""]
    lines += [
        f"# {call} was refused and stays refused: {why}" for call, why in lessons.impossible.items()
    ]
    if UNIX_SOCKETS in lessons.withheld:
        lines += _WITHOUT_SOCKETS
    lines += [f"name = {quoted(name)}"]
    for section, entries in sections.items():
        if entries:
            lines += ["", f"[{section}]", *entries]
    return "\n".join(lines) + "\n"


def _switches(section: str, lessons: Lessons) -> list[str]:
    needed: dict[str, str] = {}
    for setting, call in _settings(lessons).items():
        where, _, switch = setting.partition(".")
        if where == section:
            needed[switch] = call
    lines = [f"{switch}  # {call}" for switch, call in needed.items()]
    if section == "processes" and "threads = true" not in needed:
        lines.append("threads = false  # none was started")
    return lines


def _settings(lessons: Lessons) -> dict[str, str]:
    """Return the fewest settings that add the groups, each with a call that needs it: for a group that
    several settings add, one that another group needs anyway.

    Rules for hosts add the groups of sockets, so a program that looked up hosts needs no more for them.
    """
    settings = {group: settings_of(group) for group in sorted(lessons.groups)}
    if lessons.hosts and not lessons.serves:
        settings = {group: of for group, of in settings.items() if _LOOPBACK not in of}
    needed: dict[str, str] = {}
    for group, of in sorted(settings.items(), key=lambda item: len(item[1])):
        if not needed.keys() & set(of):
            needed[of[0]] = lessons.groups[group]
    return needed


def _hosts(names: set[str]) -> list[str]:
    """Return rules for hosts as comments: a person decides which may be reached, and at which ports."""
    if not names:
        return []
    rules = (f"#     {{ host = {quoted(name)} }},  # looked up" for name in sorted(names))
    return ["# allow = [", *rules, "# ]"]


def _paths(key: str, paths: set[str], why: str) -> list[str]:
    if not paths:
        return []
    entries = [f"    {quoted(path)},  # {why}" for path in collapse(paths)]
    return [f"{key} = [", *entries, "]"]


def quoted(text: str) -> str:
    """Return `text` as a basic string of TOML, on one line and without invisible characters."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08X}"


def collapse(paths: set[str]) -> list[str]:
    """Return `paths` with a directory in place of many of its files, and no path twice."""
    counts = Counter(os.path.dirname(path) for path in paths)
    named = {
        directory if counts[directory := os.path.dirname(path)] >= _SAME_DIRECTORY else path
        for path in paths
    }
    return sorted(path for path in named if not _parents(path) & named)


def _parents(path: str) -> set[str]:
    found = set()
    while (path := os.path.dirname(path)) not in ("", "/"):
        found.add(path)
    return found


def text_with_rule(text: str, policy: Policy, rule: NetworkRule | NetworkDenial) -> str:
    """Return the TOML `text` of `policy` with a network rule at its end; unchanged if it has the rule.

    Raises PolicyError if the policy would be invalid, if the file has its rules in another form, or if
    it inherits them: the rules of a file replace those of the policy that it extends.
    """
    key = "allow" if isinstance(rule, NetworkRule) else "deny"
    own = _rules_in(text, key)
    if not own and getattr(policy.network, key):
        raise PolicyError(
            f"network.{key}: the file inherits its rules, which one of its own would replace",
            "add the rule to the file that it extends",
        )
    written = _written(rule)
    if written in own:
        return text
    _check_with(policy, rule)
    block = "\n".join(f"{name} = {_value(value)}" for name, value in written.items())
    longer = f"{text.rstrip()}\n\n[[network.{key}]]\n{block}\n".lstrip()
    try:
        is_there = _rules_in(longer, key) == [*own, written]
    except PolicyError:
        is_there = False
    if not is_there:
        raise PolicyError(
            f"network.{key}: a rule cannot be added to how the file has them",
            f"write a table for each host: [[network.{key}]], then host = ...",
        )
    return longer


def _rules_in(text: str, key: str) -> list[dict[str, Any]]:
    try:
        return list(tomllib.loads(text).get("network", {}).get(key, []))
    except (ValueError, AttributeError, TypeError) as error:
        raise PolicyError(f"not the text of a policy: {error}") from None


def _written(rule: NetworkRule | NetworkDenial) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as TOML has them."""
    found = {}
    for field in msgspec.structs.fields(rule):
        value = getattr(rule, field.name)
        if value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _check_with(policy: Policy, rule: NetworkRule | NetworkDenial) -> None:
    network: Network = policy.network
    if isinstance(rule, NetworkRule):
        network = msgspec.structs.replace(network, allow=(*network.allow, rule))
    else:
        network = msgspec.structs.replace(network, deny=(*network.deny, rule))
    check_policy(msgspec.structs.replace(policy, network=network))


def _value(value: object) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
