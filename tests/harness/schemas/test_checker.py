"""The checker: what it may do once it is confined, and that one which ends is replaced."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cellwright.harness.schemas import checker_pool
from cellwright.harness.schemas.checker import CheckerBoot
from cellwright.harness.schemas.validation import compile_schema
from cellwright.policies.compiling.compile import computing_filter
from cellwright.runner.kernel import landlock
from cellwright.runner.messages import encode
from tests.conftest import ROOT

_PROGRAM = """
import errno, json, os, socket, sys
sys.path.insert(0, ROOT)
from cellwright.harness.schemas import checker
from cellwright.runner.confined import confinement
from cellwright.runner.messages import decode
def attempt(work):
    try:
        work()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
def fork():
    if os.fork() == 0: os._exit(0)
def everything():
    return {
        "write": attempt(lambda: open(PLACE + "/new", "w").close()),
        "read": attempt(lambda: open(PLACE + "/secret").close()),
        "tcp": attempt(lambda: socket.socket().close()),
        "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
        "fork": attempt(fork),
        "become root": attempt(lambda: os.setuid(0)),
    }
before = everything()
boot = decode(bytes.fromhex(BOOT), checker.CheckerBoot)
confinement.confine("cell-checker", boot.uid, checker._LIMITS, boot.filter, boot.landlock_abi)
after = everything()
print(json.dumps([before, after]))
"""


@pytest.mark.needs("root", "landlock")
def test_a_checker_has_no_files_sockets_and_processes(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    boot = encode(CheckerBoot("", 0x7000_0001, landlock.abi(), computing_filter())).hex()
    given = f"ROOT, PLACE, BOOT = {str(ROOT)!r}, {str(tmp_path)!r}, {boot!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", given + _PROGRAM],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert set(before.values()) == {"done"}
    assert set(after.values()) == {"EPERM"}


def test_a_checker_that_was_killed_is_replaced() -> None:
    validator = compile_schema({"minimum": 2})
    assert len(validator.complaints(1)) == 1
    for process in checker_pool.checkers._idle:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert len(validator.complaints(1)) == 1
    assert validator.complaints(2) == ()


def test_only_four_checkers_run_and_further_callers_wait() -> None:
    schema = {"minimum": 2, "title": "many callers"}
    compile_schema(schema)
    found: list[tuple[str, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(compile_schema(schema).complaints(1)))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert set(found) == {("1 is less than the minimum of 2",)}
    assert len(checker_pool.checkers._idle) <= 4


def test_a_forked_child_starts_its_own() -> None:
    """The sockets of its parent's would mix the answers."""
    compile_schema({"minimum": 2}).complaints(1)
    before = checker_pool.checkers
    if (pid := os.fork()) == 0:
        fresh = checker_pool.checkers is not before and checker_pool.checkers._idle == []
        os._exit(0 if fresh else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
