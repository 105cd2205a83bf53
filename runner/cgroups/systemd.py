"""Ask systemd for a delegated scope.  The only module that imports pystemd (extra `systemd`)."""

import os
import select
import time
from pathlib import Path
from typing import Any

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_ANSWER_SECONDS = 10.0
_LOOK_MILLISECONDS = 2


def delegated_scope(pid: int, name: str) -> tuple[Path | None, str]:
    """Return (the cgroup directory of a new scope that holds `pid`, ""), or (None, why not).

    The manager asked is the system's for root and the user's own for anyone else; the scope goes
    with its last process (systemd.scope(5), "Delegate=" in systemd.resource-control(5)).
    """
    if not Path("/run/systemd/system").is_dir():
        return None, "is not running"
    try:
        from pystemd import dbuslib, systemd1
    except ImportError:
        return None, "cannot be asked without pystemd (pip install 'cellwright[systemd]')"
    try:
        _start_scope(dbuslib, systemd1, pid, f"{name}.scope")
    except Exception as error:  # noqa: BLE001 - pystemd raises a class per D-Bus error name
        return None, _words(error)
    return _wait_until_moved(pid, f"{name}.scope")


def _words(error: Exception) -> str:
    if os.geteuid() and not os.environ.get("XDG_RUNTIME_DIR"):  # where a user's manager listens
        return "has no session of this user (log in, or loginctl enable-linger USER)"
    return f"refused a delegated scope: {str(error).partition(chr(10))[0]}"


def _start_scope(dbuslib: Any, systemd1: Any, pid: int, unit: str) -> None:
    properties = {
        b"Description": b"cells of cellwright",
        b"Delegate": True,
        b"CPUAccounting": True,
        b"MemoryAccounting": True,
        b"TasksAccounting": True,
        b"CollectMode": b"inactive-or-failed",
        b"_custom": (b"PIDs", b"au", [pid]),
    }
    with dbuslib.DBus(user_mode=os.geteuid() != 0) as bus, systemd1.Manager(bus=bus) as manager:
        manager.Manager.StartTransientUnit(unit.encode(), b"fail", properties)


def _wait_until_moved(pid: int, unit: str) -> tuple[Path | None, str]:
    """Wait until the manager has moved `pid`: its answer to the call only promises to."""
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
