"""Lessons: the needs of an observed program, and the smallest policy that grants them.  Pure."""

import os
from collections import Counter

import msgspec

from .policy import Python, lies_in
from .syscalls import UNIX_SOCKETS, settings_of

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
    mapped: set[str] = msgspec.field(default_factory=set)  # libraries: their pages are executed
    groups: dict[str, str] = msgspec.field(default_factory=dict)  # group -> a call that needs it
    impossible: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # call -> reason of the refusal
    withheld: set[str] = msgspec.field(default_factory=set)  # groups that were refused meanwhile
    hosts: set[str] = msgspec.field(default_factory=set)  # names that were looked up, in vain
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
