"""Daemon threads: cellwright's threads never keep the embedding process from exiting."""

import threading
from collections.abc import Callable

from ..policies.errors import LaunchError


def begin(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a thread that does `work`; raises LaunchError if the system has no thread left."""
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    except RuntimeError as error:  # pthread_create(3) says EAGAIN, whatever was short
        hint = "memory, RLIMIT_NPROC or the pids cgroup of this process is used up"
        raise LaunchError(f"cannot start a thread: {error}", hint) from None
    return thread
