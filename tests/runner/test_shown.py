"""Which opens are noted: a table of names, for a made-up boot frame."""

import os

import pytest

from cellwright.policies.compile import compile_policy
from cellwright.policies.host import Host
from cellwright.policies.policy import Filesystem, Policy
from cellwright.runner.messages import Boot
from cellwright.runner.watching.shown import Shown

HOST = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""})
POLICY = Policy(
    filesystem=Filesystem(
        read=("/srv/data", "/srv/output", "/tmp/y/data", "/dev/shm/y"),
        write=("/srv/out", "/tmp/y/data/out"),
    )
)
SHOWN = Shown(
    Boot(
        compile_policy(POLICY, HOST), ("/opt/py/lib/python3.11",), (("/lib", "usr/lib"),), (), 1, 0
    )
)
READ, WRITE = os.O_RDONLY, os.O_WRONLY | os.O_CREAT
OUTSIDE, READ_ONLY, FINE = "mount_ns: not shown", "landlock: not writable", ""

JUDGED = {
    "/etc/shadow": (READ, OUTSIDE),
    "/etc/passwd": (READ, FINE),
    "/etc/passwd ": (READ, FINE),  # the host does not have it either
    "/etc/passwd  ": (WRITE, OUTSIDE),
    "/root/passwd ": (READ, OUTSIDE),
    "/usr/share": (READ, OUTSIDE),
    "/workspace/a": (WRITE, FINE),
    "/workspace": (READ, FINE),
    "/workspace/../etc/shadow": (READ, OUTSIDE),
    "/workspaces": (READ, OUTSIDE),
    "/tmp/x": (WRITE, FINE),
    "//etc//shadow": (READ, OUTSIDE),
    "/srv/data/x": (READ, FINE),
    "/srv/data/y": (WRITE, READ_ONLY),
    "/srv/out/x": (WRITE, FINE),
    "/srv/output/x": (WRITE, READ_ONLY),
    "/tmp/y/data/y": (WRITE, READ_ONLY),
    "/tmp/y/data/out/y": (WRITE, FINE),
    "/tmp/y/y": (WRITE, READ_ONLY),
    "/tmp/yz": (WRITE, FINE),
    "/dev/shm/y/y": (WRITE, READ_ONLY),
    "/dev/shm/yz": (WRITE, FINE),
    "/srv": (READ, FINE),
    "/srv/other": (READ, OUTSIDE),
    "/opt/py/lib/python3.11/json": (READ, FINE),
    "/opt/py/lib": (READ, FINE),
    "/opt/py/lib/other": (READ, OUTSIDE),
    "/opt/py/lib/libz.so.1": (READ, FINE),
    "/opt/py/lib/glibc-hwcaps/x86-64-v3/libz.so.1": (READ, FINE),
    "/opt/py/pyvenv.cfg": (READ, FINE),
    "/opt/py/bin/python3._pth": (READ, "mount_ns: not shown"),
    "/opt/py/lib/python3._pth": (READ, FINE),
    "/home/pyvenv.cfg": (READ, "mount_ns: not shown"),
    "/opt/py/lib/tls/haswell/avx512_1/x86_64/libz.so.1": (READ, FINE),
    "/opt/py/lib/x86_64/secret": (READ, OUTSIDE),
    "/root/lib/libz.so.1": (READ, OUTSIDE),
    "/root/lib/tls/libz.so.1": (READ, OUTSIDE),
    "/lib/x86": (READ, FINE),
    "/proc/self/maps": (READ, FINE),
    "/proc/1/environ": (READ, FINE),
    "/proc/kcore": (READ, OUTSIDE),
    "/proc/sys/kernel/core_pattern": (READ, FINE),
    "/proc/cpuinfo": (READ, FINE),
    "/dev/null": (WRITE, FINE),
    "/dev/sda": (READ, OUTSIDE),
    "/dev/shm/x": (WRITE, FINE),
    "/sys/kernel/security": (READ, OUTSIDE),
    "/": (READ, FINE),
    "": (READ, FINE),
}


@pytest.mark.parametrize("path", JUDGED)
def test_a_name_is_judged(path: str) -> None:
    flags, why = JUDGED[path]
    assert SHOWN.why_not(path or "/workspace/", flags) == why
