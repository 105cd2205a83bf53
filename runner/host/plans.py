"""Plans, compiled once for each policy and host, then cached on disk.

Compiling imports libseccomp's binding, which alone costs more than starting a launcher.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ...policies.host import Host
from ...policies.plan import Plan
from ...policies.policy import Policy
from ..spawn import spec_of
from .cache import cached

if TYPE_CHECKING:
    from .interpreters import HostInterpreter


def plan_for(
    policy: Policy,
    host: Host,
    *,
    learning: bool = False,
    interpreter: "HostInterpreter | None" = None,
    shows_sockets: bool = False,
) -> Plan:
    """Return the plan of `policy` on `host` for Python, or for the language of `interpreter`;
    `shows_sockets` as `compile_policy` has it.

    Raises PolicyError and Unenforceable.
    """
    values = policy, host, learning, interpreter, shows_sockets
    given = msgspec.msgpack.encode(values, order="sorted")
    key = b"plan " + _compiler_identity() + given
    return cached(key.hex(), Plan, lambda: _compile(*values))


def _compile(
    policy: Policy,
    host: Host,
    learning: bool,
    interpreter: "HostInterpreter | None",
    shows_sockets: bool,
) -> Plan:
    from ...policies.compile import CellLanguage, compile_policy

    runs = CellLanguage()
    if interpreter:
        runs = CellLanguage(interpreter.language, interpreter.executables)
    return compile_policy(policy, host, learning=learning, runs=runs, shows_sockets=shows_sockets)


def _modules_of(folder: str) -> Iterator[str]:
    """Yield the modules and profiles in and below `folder`: pathlib's globs take ten times as long."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.name.endswith((".py", ".toml")):
            yield entry.path
        elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
            yield from _modules_of(entry.path)


def _compiler_identity() -> bytes:
    """Return a hash that changes with any module of policies, since each may be part of the
    compiler."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    files = sorted(_modules_of(os.path.join(package, "policies")))
    spec = spec_of("pyseccomp")
    if spec and spec.origin:
        files.append(spec.origin)
    stats = [(file, os.stat(file)) for file in files]
    return repr([(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats]).encode()
