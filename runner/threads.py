"""Threads of ours, each a daemon: none keeps the embedding process from ending."""

import threading
from collections.abc import Callable

from ..policies.errors import LaunchError


def begin(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a thread that does `work`; raises LaunchError if there is none to be had."""
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    except RuntimeError as error:  # pthread_create(3) says EAGAIN, whatever was short
        hint = "memory, RLIMIT_NPROC or the pids cgroup of this process is used up"
        raise LaunchError(f"cannot start a thread: {error}", hint) from None
    return thread
