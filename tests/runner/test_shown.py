"""Which opens are noted: a table of names, for a made-up boot frame."""

import os
from pathlib import Path

import pytest

from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import Host
from cellwright.policies.denied import denied_by
from cellwright.policies.policy import Filesystem, Policy, Python
from cellwright.runner.kernel import mounts
from cellwright.runner.kernel import process_calls as processes
from cellwright.runner.launcher.root import _show_one
from cellwright.runner.launcher.views import ShownPath, SinglyShown, open_source
from cellwright.runner.listening.shown import Shown
from cellwright.runner.messages import Boot
from tests.forked import exit_code_of

HOST = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""})
POLICY = Policy(
    filesystem=Filesystem(
        read=("/srv/data", "/srv/output", "/tmp/y/data", "/dev/shm/y"),
        write=("/srv/out", "/tmp/y/data/out"),
    ),
    python=Python(path=("/srv/set/site",)),
)
SHOWN = Shown(
    Boot(
        compile_policy(POLICY, HOST), ("/opt/py/lib/python3.11",), (("/lib", "usr/lib"),), (), 1, 0
    )
)
READ, WRITE = os.O_RDONLY, os.O_WRONLY | os.O_CREAT
OUTSIDE, READ_ONLY, FINE = "mount_ns: not shown", "mount_ns: read-only", ""

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
    "/opt/py/lib/libz.a": (READ, FINE),
    "/opt/py/lib/python311.zip": (READ, FINE),
    "/opt/py/lib/python311.zip/numpy/lib": (READ, FINE),
    "/home/python311.zip": (READ, OUTSIDE),
    "/opt/py/lib/glibc-hwcaps/x86-64-v3/libz.so.1": (READ, FINE),
    "/opt/py/pyvenv.cfg": (READ, FINE),
    "/opt/py/bin/python3._pth": (READ, "mount_ns: not shown"),
    "/opt/py/lib/python3._pth": (READ, FINE),
    "/home/pyvenv.cfg": (READ, "mount_ns: not shown"),
    "/opt/py/lib/tls/haswell/avx512_1/x86_64/libz.so.1": (READ, FINE),
    "/opt/py/lib/x86_64/secret": (READ, OUTSIDE),
    "/root/lib/libz.so.1": (READ, OUTSIDE),
    "/root/lib/tls/libz.so.1": (READ, OUTSIDE),
    "/srv/set/site/torch/../../nvidia/cu13/lib/libcudart.so.13": (READ, FINE),
    "/srv/set/site/torch/../../nvidia/cu13/lib/tls/libcudart.so.13": (READ, FINE),
    "/srv/set/nvidia/cu13/lib/libcudart.so.13": (READ, OUTSIDE),
    "/srv/set/site/../secret": (READ, OUTSIDE),
    "/srv/set/site/../../other/secret.so": (READ, OUTSIDE),
    "/srv/set/site/../../../home/secret.so": (READ, OUTSIDE),
    "/lib/x86": (READ, FINE),
    "/proc/self/maps": (READ, FINE),
    "/proc/1/environ": (READ, FINE),
    "/proc/kcore": (READ, OUTSIDE),
    "/proc/sys/kernel/core_pattern": (READ, FINE),
    "/proc/cpuinfo": (READ, FINE),
    "/dev/null": (WRITE, FINE),
    "/dev/sda": (READ, OUTSIDE),
    "/dev/shm/x": (WRITE, FINE),
    "/var/tmp/x": (WRITE, FINE),
    "/var": (READ, FINE),
    "/var/log": (READ, OUTSIDE),
    "/etc/mtab": (READ, FINE),
    "/etc/mtab ": (WRITE, OUTSIDE),
    "/sys/kernel/security": (READ, OUTSIDE),
    "/": (READ, FINE),
    "": (READ, FINE),
}


@pytest.mark.parametrize("path", JUDGED)
def test_a_name_is_judged(path: str) -> None:
    flags, why = JUDGED[path]
    assert SHOWN.why_not(path or "/workspace/", flags) == why


@pytest.mark.needs("root")
def test_an_optional_path_may_vanish_between_its_opening_and_its_mount(tmp_path: Path) -> None:
    """What a glob matched may be removed by anybody meanwhile; what was named must be there."""
    gone, root = tmp_path / "gone", tmp_path / "root"

    def show(*, optional: bool) -> int:
        processes.unshare(processes.CLONE_NEWNS)
        mounts.make_private()
        gone.mkdir()
        (root / str(tmp_path).lstrip("/")).mkdir(parents=True, exist_ok=True)
        source = ShownPath(str(gone), str(gone), open_source(str(gone)), mounts.RDONLY)
        gone.rmdir()
        place = os.open(root, os.O_PATH)
        try:
            given = {"writable": False, "host_uid": 0, "optional": optional}
            _show_one(place, source, denied_by(()), SinglyShown(()), [], **given)
        except FileNotFoundError:
            return 2
        return 0

    assert exit_code_of(lambda: show(optional=True)) == 0
    assert exit_code_of(lambda: show(optional=False)) == 2
