"""Hints: advice for a person after a refused attempt, a failed import, or a reached limit.  Pure.

They are made from the words of the guest, which may lie: a hint is text for people, and nothing is
decided by it.  hints.toml has the patterns and the texts.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

_NOT_HERE = ("mount_ns: not shown", "mount_ns: read-only")  # listening/shown.py
_HOST_PERMISSIONS = "host permissions: "  # prefix of rules in listening/shown.py
_SAID = 4000  # read characters of standard error
_SHELLS = ("bash", "sh", "dash")
_NO_PYTHON_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]{1,100})'")
_NO_PROCESS = re.compile(  # messages without a cgroup
    r"RuntimeError: can't start new thread|\bfork: (?:retry: )?Resource temporarily unavailable"
)
_CHILD = "_execute_child"  # name of subprocess's function in a traceback
_CANNOT_EXECUTE = "exit code 126"  # sh(1)
_INSTALLERS = ("apt", "apt-get", "dnf", "apk", "brew", "npm", "conda")
_PIP = ("pip", "pip3")
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_NAME = "to let programs reach "


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _text(name: str, *words: str, **named: str) -> str:
    text: str = _table()["texts"][name]
    return text.format(*words, **named)


def hints(
    error: str | None, refused: Iterable[Any], used: Any = None,
    *, timed_out: bool = False, stderr: str = "",
) -> tuple[str, ...]:  # fmt: skip
    """Return the hints for a program that ended with `error`, had attempts `refused` (Violation), and
    `used` so much (Usage); the message of a command is at the end of its `stderr`."""
    error, stderr = error or "", stderr[-_SAID:]
    starts_child = _CHILD in stderr
    said = f"{error}\n{stderr}"
    found = [*_of_limits(said, used, timed_out=timed_out)]
    if missed := missed_module(error):
        found.append(missing_module(missed))
    found += _matching("error", error, is_own=not starts_child)
    if stderr:
        is_refused = error == _CANNOT_EXECUTE or starts_child
        found += _matching("command", stderr, is_refused=is_refused)
    for each in refused:
        found += _of_refusal(each, said)
    if any(hint.startswith(_NAME) or hint == _text("loopback") for hint in found):
        found = [hint for hint in found if hint != _text("network")]
    return tuple(dict.fromkeys(found))


def for_exec(hint: str) -> str:
    """Return a hint with the options of `cellwright exec` in place of those that it lacks."""
    for words, others in _table()["exec"].items():
        hint = hint.replace(words, others)
    return hint


def _of_limits(error: str, used: Any, *, timed_out: bool) -> Iterator[str]:
    """Yield the hints about limits.  A program at its memory limit waits for memory that the kernel
    reclaims, until its time is up."""
    if used and (used.killed_for_memory or (timed_out and used.memory_limit_reached)):
        yield _text("memory")
    if (used and used.forks_refused) or _NO_PROCESS.search(error):
        yield _text("processes")


def _matching(kind: str, said: str, **conditions: bool) -> Iterator[str]:
    """Yield the hints of a kind whose pattern occurs, and whose conditions hold."""
    for entry in _table()[kind]:
        found = re.search(entry["pattern"], said, re.MULTILINE)
        if found and all(holds or name not in entry for name, holds in conditions.items()):
            name = next(filter(None, found.groups()), "")
            if entry.get("text") == "no_command":
                yield _missing_command(name)
            else:
                yield entry["hint"].format(name) if "hint" in entry else _text(entry["text"], name)


def _missing_command(name: str) -> str:
    if name in _PIP:
        return _text("no_install")
    return _text("installer" if name in _INSTALLERS else "no_command", name)


def missing_module(name: str) -> str:
    """Return the hint for a Python program that imports the module `name`, which its cell lacks."""
    top = name.partition(".")[0]
    if top in _PIP:
        return _text("no_install")
    package = _table()["packages"].get(top, top.replace("_", "-"))
    return _text("no_module", name, package=package)


def missed_module(error: str) -> str:
    """Return the name of the module whose import failed with `error` in Python; empty for others."""
    found = _NO_PYTHON_MODULE.search(error)
    return found[1] if found else ""


def _of_refusal(refused: Any, error: str) -> Iterator[str]:
    if "processes.subprocesses" in refused.rule and "network.loopback" not in refused.rule:
        is_shell = refused.process.partition(" ")[0] in _SHELLS
        yield (_text("shell") if is_shell else "") + _text("subprocesses")
    for name in ("processes.threads", "processes.terminal", "processes.debug", "network.loopback"):
        if name in refused.rule:
            yield _text(name.partition(".")[2])
    if "unix_sockets" in refused.rule and "not permitted" in error:  # glibc itself looks for nscd
        yield _text("unix_sockets")
    if refused.rule.startswith("network: "):
        yield from _of_network(refused)
    path = refused.arguments[0].strip("'") if refused.arguments else ""
    if path not in error or not path.startswith("/"):
        return
    is_read = "RDONLY" in refused.arguments[-1]
    if path.startswith(_GPUS):
        yield _text("gpu")
    elif refused.rule in _NOT_HERE:
        yield _text("not_shown" if is_read else "not_writable", path)
    elif refused.rule.startswith(_HOST_PERMISSIONS):
        yield _text("not_readable" if is_read else "not_permitted", path)


def _of_network(refused: Any) -> Iterator[str]:
    name = refused.arguments[0] if refused.arguments else "it"
    hint = next((hint for words, hint in _table()["network"].items() if words in refused.rule), "")
    if hint and (name.startswith("127.") or not hint.startswith("localhost")):
        yield hint.format(name)
