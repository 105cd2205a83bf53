"""Cgroups that systemd delegates, to a scope or to a service with Delegate=yes.

The only module that imports pystemd (extra `systemd`).  Without it systemd's own command `busctl`
makes the same calls.
"""

import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cgroup_tree import CONTROLLERS, write

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_ANSWER_SECONDS = 10.0
_LOOK_MILLISECONDS = 2
_MANAGER = (
    "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
)  # fmt: skip


def delegated_scope(pid: int, name: str) -> tuple[Path | None, str]:
    """Return (the cgroup directory of a new scope that holds `pid`, ""), or (None, the reason).

    Root asks the system's manager, other users ask their own.  The scope ends with its last process
    (systemd.scope(5), "Delegate=" in systemd.resource-control(5)).
    """
    if not Path("/run/systemd/system").is_dir():
        return None, "is not running"
    unit = f"{name}.scope"
    try:
        with _manager() as manager:
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
def _manager() -> Iterator[Any]:
    try:
        from pystemd import dbuslib, systemd1
    except ImportError:
        yield _Busctl()
        return
    with dbuslib.DBus(user_mode=os.geteuid() != 0) as bus, systemd1.Manager(bus=bus) as manager:
        yield manager.Manager


class _Busctl:
    """The two methods of the manager that scopes need, called by busctl(1) instead of pystemd."""

    def StartTransientUnit(  # noqa: N802 - D-Bus names the method
        self, unit: bytes, mode: bytes, properties: dict[bytes, Any]
    ) -> None:
        given = dict(properties)
        name, signature, numbers = given.pop(b"_custom")
        words = [name, signature, len(numbers), *numbers]
        for key, value in given.items():
            words += (key, "b", "true") if value is True else (key, "s", value)
        self._call("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, mode, len(properties), *words, 0)

    def StopUnit(self, unit: bytes, mode: bytes) -> None:  # noqa: N802 - the same
        self._call("StopUnit", "ss", unit, mode)

    def _call(self, method: str, signature: str, *arguments: bytes | str | int) -> None:
        import subprocess  # not needed where systemd is not

        whose = "--user" if os.geteuid() else "--system"
        words = (each.decode() if isinstance(each, bytes) else str(each) for each in arguments)
        done = subprocess.run(
            ["busctl", whose, "call", *_MANAGER, method, signature, *words],  # noqa: S607 - of PATH
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=_ANSWER_SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise OSError(done.stderr.strip())


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


_MOUNT = Path("/sys/fs/cgroup")
_SUBGROUP = "daemon"


def take_delegation(mount: Path = _MOUNT) -> str | None:
    """Prepare the service's own cgroup for cells and return its directory; None if this process is
    in no delegated service.  Call it only where the unit delegates its cgroup: its other processes
    move too.

    This process moves into a child group: cgroup v2 gives controllers only to the children of a
    group without processes (cgroup-v2.rst, "No Internal Process Constraint").
    """
    directory = _service(mount)
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        subgroup = directory / _SUBGROUP
        subgroup.mkdir(exist_ok=True)
        for pid in (directory / "cgroup.procs").read_text().split():
            write(f"{subgroup}/cgroup.procs", pid)
        available = (directory / "cgroup.controllers").read_text().split()
        wanted = " ".join(f"+{name}" for name in CONTROLLERS if name in available)
        write(f"{directory}/cgroup.subtree_control", wanted)
        return str(directory)
    return None


def _service(mount: Path) -> Path | None:
    """Return the v2 directory of the service of this process, also with DelegateSubgroup=."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, place = line.split(":", 2)
        if number == "0":
            parts = place.strip("/").split("/")
            while parts and not parts[-1].endswith(".service"):
                parts.pop()
            return mount.joinpath(*parts) if parts else None
    return None
