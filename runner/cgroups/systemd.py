"""Delegated scopes of systemd.  The only module that imports pystemd (extra `systemd`)."""

import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_ANSWER_SECONDS = 10.0
_LOOK_MILLISECONDS = 2


def delegated_scope(pid: int, name: str) -> tuple[Path | None, str]:
    """Return (the cgroup directory of a new scope that holds `pid`, ""), or (None, the reason).

    Root asks the system's manager, other users ask their own.  The scope ends with its last process
    (systemd.scope(5), "Delegate=" in systemd.resource-control(5)).
    """
    if not Path("/run/systemd/system").is_dir():
        return None, "is not running"
    try:
        from pystemd import dbuslib, systemd1
    except ImportError:
        from ...policies.extras import how_to_install

        return None, f"cannot be asked without pystemd ({how_to_install('systemd')})"
    unit = f"{name}.scope"
    try:
        with _manager(dbuslib, systemd1) as manager:
            _start_scope(manager, pid, unit)
            directory, refusal = _wait_until_moved(pid, unit)
            if directory is None:
                _let_go(manager, unit)
            return directory, refusal
    except Exception as error:  # noqa: BLE001 - pystemd raises a class per D-Bus error name
        return None, _words(error)


def _words(error: Exception) -> str:
    if os.geteuid() and not os.environ.get(
        "XDG_RUNTIME_DIR"
    ):  # the directory of the user manager's socket
        return "has no session of this user (log in, or loginctl enable-linger USER)"
    return f"refused a delegated scope: {str(error).partition(chr(10))[0]}"


@contextlib.contextmanager
def _manager(dbuslib: Any, systemd1: Any) -> Iterator[Any]:
    with dbuslib.DBus(user_mode=os.geteuid() != 0) as bus, systemd1.Manager(bus=bus) as manager:
        yield manager.Manager


def _start_scope(manager: Any, pid: int, unit: str) -> None:
    properties = {
        b"Description": b"cells of cellwright",
        b"Delegate": True,
        b"CPUAccounting": True,
        b"MemoryAccounting": True,
        b"TasksAccounting": True,
        b"CollectMode": b"inactive-or-failed",
        b"_custom": (b"PIDs", b"au", [pid]),
    }
    manager.StartTransientUnit(unit.encode(), b"fail", properties)


def _let_go(manager: Any, unit: str) -> None:
    """Stop a scope that did not get its process.

    The kernel reports an ending process as moved and moves nothing (cgroup_migrate_add_task).  The
    scope would stay forever: systemd notices cgroups that become empty, and this one never had a
    process.
    """
    with contextlib.suppress(Exception):  # systemd did not make it, or has removed it
        manager.StopUnit(unit.encode(), b"replace")


def _wait_until_moved(pid: int, unit: str) -> tuple[Path | None, str]:
    """Wait until the manager has moved `pid`: its answer to the call is only a promise."""
    end = time.monotonic() + _ANSWER_SECONDS
    died = select.poll()
    pidfd = os.pidfd_open(pid)
    died.register(pidfd, select.POLLIN)
    try:
        while time.monotonic() < end:
            path = _v2_path(pid)
            if path.endswith(f"/{unit}"):
                return _CGROUP_MOUNT / path.lstrip("/"), ""
            if died.poll(_LOOK_MILLISECONDS):
                return None, "was too late: the launcher is gone"
        return None, f"did not start {unit} within {_ANSWER_SECONDS:g} s"
    finally:
        os.close(pidfd)


def _v2_path(pid: int) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return ""
