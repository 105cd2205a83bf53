"""The two sides of a comparison: a cell, and an ordinary user outside.

Both start with empty `/tmp` and `/dev/shm`, a loopback of their own and no other network, and the same
environment, so that what differs is the cell.
"""

import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from cellwright import HostSettings, Sandbox

from .outcomes import Outcomes, read_outcomes
from .suites import Suite, policy_data

_UID = 1000  # programs in cells have this id
_MARK = "-- conformance: the file of outcomes --"
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_SCRIPT = f"""
export SUITE={{folder}} UNIT={{unit}} RESULT=/tmp/outcomes HOME=/tmp/home TMPDIR=/tmp PATH={_PATH}
export LANG=C.UTF-8 TZ=UTC0 SHELL=/bin/bash
mkdir -p /tmp/home /tmp/work && cd /tmp/work
{{command}}
status=$?
echo
echo '{_MARK}'
cat "$RESULT" 2>/dev/null
exit $status
"""
# As root in new namespaces, which end with the process: then as the user, without a privilege.  The first bash
# stays, because process 1 has to reap orphans, as the init of a cell does.
_OUTSIDE = """
mount --make-rprivate / && mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up; ip address add 127.0.0.2/8 dev lo; ip address add fe80::1/128 dev lo
{ cat /etc/passwd; echo cell:x:1000:1000::/tmp/home:/bin/sh; } > /tmp/passwd && mount --bind /tmp/passwd /etc/passwd
{ cat /etc/group; echo cell:x:1000:; } > /tmp/group && mount --bind /tmp/group /etc/group
{ cat /etc/hosts; echo ::1 localhost; } > /tmp/hosts && mount --bind /tmp/hosts /etc/hosts
rm /tmp/passwd /tmp/group /tmp/hosts
setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=-all --bounding-set=-all \
    timeout --kill-after 5 "$SECONDS_LIMIT" bash -c "$SCRIPT"
exit $?
"""


class Ran(NamedTuple):
    """What became of one unit on one side."""

    outcomes: Outcomes
    ended: str  # "exit 0", "timeout", "killed (memory)"
    printed: str
    refused: dict[str, int]  # refused attempts, by call and rule


def _script(suite: Suite, folder: Path, unit: str) -> str:
    words = {"folder": shlex.quote(str(folder)), "unit": shlex.quote(unit)}
    return _SCRIPT.format(command=f"( {suite.command}\n)", **words)


def run_outside(suite: Suite, folder: Path, unit: str) -> Ran:
    namespaces = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--net",
        "--ipc",
    ]
    ran = subprocess.run(
        [*namespaces, "bash", "-ec", _OUTSIDE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": _PATH, "SCRIPT": _script(suite, folder, unit), "SECONDS_LIMIT": str(suite.seconds)},
        check=False, timeout=suite.seconds + 60,
    )  # fmt: skip
    ended = "timeout" if ran.returncode in (124, 137) else f"exit {ran.returncode}"
    return _ran(suite, ran.stdout.decode(errors="replace"), ran.returncode, ended, {})


def run_inside(suite: Suite, folder: Path, unit: str, sandbox: Sandbox) -> Ran:
    result = sandbox.execute(f"exec 2>&1\n{_script(suite, folder, unit)}", language="bash")
    status = result.exit_code if result.exit_code is not None else 1
    ended = (
        f"exit {status}"
        if result.exit_code is not None
        else f"{result.status.name.lower()} ({result.reason})"
    )
    refused: dict[str, int] = {}
    for each in result.violations:
        named = f"{each.syscall}: {each.rule}"
        refused[named] = refused.get(named, 0) + each.count
    return _ran(suite, result.stdout, status, ended, refused)


def sandbox_for(suite: Suite, folder: Path) -> Sandbox:
    return Sandbox(policy=policy_data(suite, folder), pool=0, host=HostSettings(language="bash"))


def _ran(suite: Suite, printed: str, status: int, ended: str, refused: dict[str, int]) -> Ran:
    before, _, file = printed.partition(f"\n{_MARK}\n")
    outcomes = read_outcomes(suite.reads, file if file.strip() else before, suite.patterns, status)
    return Ran(outcomes, ended, printed, refused)
