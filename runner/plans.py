"""Plans, compiled once per policy and host and then remembered on disk.

Compiling imports libseccomp's binding, which alone costs more than starting a launcher.
"""

import importlib.util
import os
from pathlib import Path

import msgspec

from ..policies.host import Host
from ..policies.plan import Plan
from ..policies.policy import Policy
from .cache import cached

_SOURCES = ("compile.py", "seccomp.py", "syscalls.py", "syscalls.toml", "plan.py")


def plan_for(policy: Policy, host: Host, *, learning: bool = False) -> Plan:
    """Return the plan of `policy` on `host`; raises PolicyError and Unenforceable."""
    given = msgspec.msgpack.encode((policy, host, learning), order="sorted")
    key = b"plan " + _compiler_identity() + given
    return cached(key.hex(), Plan, lambda: _compile(policy, host, learning))


def _compile(policy: Policy, host: Host, learning: bool) -> Plan:
    from ..policies.compile import compile_policy

    return compile_policy(policy, host, learning=learning)


def _compiler_identity() -> bytes:
    """Return what changes whenever the compiler does."""
    folder = Path(__file__).parents[1] / "policies"
    files = [str(folder / name) for name in _SOURCES]
    spec = importlib.util.find_spec("pyseccomp")
    if spec and spec.origin:
        files.append(spec.origin)
    return repr(
        [(file, os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files]
    ).encode()
