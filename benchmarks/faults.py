"""Random faults, injected only into processes and cgroups of the benchmark."""

import contextlib
import glob
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from ..runner import channel
from .census import EGRESS, GUEST, INIT, KEEPER, LAUNCHER, NURSERY, OTHER, WORKER, roles_below
from .report import Column, ReportTable

# The share of each kind of victim, in percent.
_VICTIMS = {
    GUEST: 24, INIT: 12, LAUNCHER: 11, NURSERY: 6, KEEPER: 6, WORKER: 6, EGRESS: 4, OTHER: 3,
}  # fmt: skip
_CGROUP, _CLIENT = "cgroup", "client"
_OTHERS = {_CGROUP: 18, _CLIENT: 10}
_SIGNALS = {
    signal.SIGKILL: 40, signal.SIGSTOP: 25, signal.SIGTERM: 5, signal.SIGINT: 5, signal.SIGSEGV: 5,
    signal.SIGHUP: 4, signal.SIGABRT: 4, signal.SIGUSR1: 4, signal.SIGPIPE: 4, signal.SIGCHLD: 4,
}  # fmt: skip
_STOPPED_SECONDS = (0.1, 1.0, 5.0)
_CLIENT_SECONDS = 10.0
_CLIENT_CODE = """
from cellwright import Sandbox
import sys
with Sandbox(connect=sys.argv[1]) as client:
    client.execute("print('up', flush=True)\\nimport time\\ntime.sleep(25)",
                   on_output=lambda *_: print('up', flush=True))
"""


class Faults:
    """Hits one victim at a time; a stopped process continues in the end."""

    def __init__(self, chance: random.Random, daemon: Path) -> None:
        self._chance = chance
        self._daemon = daemon
        self._stopped: list[tuple[float, int]] = []  # until when, pidfd
        self.done: Counter[tuple[str, str]] = Counter()  # count by fault and process

    def hit(self) -> None:
        """Do one thing to somebody, and let go on who was stopped for long enough."""
        self.release(time.monotonic())
        shares = {**_VICTIMS, **_OTHERS}
        (victim,) = self._chance.choices(list(shares), list(shares.values()))
        if victim == _CGROUP:
            self._remove_cgroup()
        elif victim == _CLIENT:
            self._kill_client()
        else:
            self._signal(victim)

    def release(self, until: float = float("inf")) -> None:
        """Let those go on whose time is over."""
        due = [each for each in self._stopped if each[0] <= until]
        self._stopped = [each for each in self._stopped if each[0] > until]
        for _, pidfd in due:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

    def _signal(self, role: str) -> None:
        (number,) = self._chance.choices(list(_SIGNALS), list(_SIGNALS.values()))
        if role == OTHER:
            number = signal.SIGSTOP  # a daemon that is killed is not replaced: nothing else is
        pids = _those(role)
        if not pids:
            return
        with contextlib.suppress(ProcessLookupError):
            self._send(self._chance.choice(pids), role, number)

    def _send(self, pid: int, role: str, number: signal.Signals) -> None:
        pidfd = os.pidfd_open(pid)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, pidfd)
            if pid not in _those(role):  # it ended, and its number may be anybody's by now
                return
            signal.pidfd_send_signal(pidfd, number)
            self.done[number.name, role] += 1
            if number is signal.SIGSTOP:
                seconds = self._chance.choice(_STOPPED_SECONDS[: -1 if role == OTHER else None])
                self._stopped.append((time.monotonic() + seconds, pidfd))
                opened.pop_all()

    def _remove_cgroup(self) -> None:
        """Remove one, as a cleaner of the host might; rmdir(2) removes only an empty one."""
        cells = glob.glob(f"/sys/fs/cgroup/**/cellwright-{os.getpid()}-*/*/", recursive=True)
        if not cells:
            return
        with contextlib.suppress(OSError):
            os.rmdir(self._chance.choice(cells))
            self.done["rmdir", _CGROUP] += 1

    def _kill_client(self) -> None:
        """Kill a process whose program runs in a cell of the daemon."""
        command = [sys.executable, "-I", "-c", _CLIENT_CODE, str(self._daemon)]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as client:
            assert client.stdout
            channel.has_news(client.stdout.fileno(), _CLIENT_SECONDS)
            client.kill()
        self.done[signal.SIGKILL.name, _CLIENT] += 1


def table(done: Counter[tuple[str, str]]) -> ReportTable:
    """Return what was done to whom, and how often."""
    whom = (*_VICTIMS, *_OTHERS)
    what = dict.fromkeys(each for each, _ in done)
    titles = ("daemon" if role == OTHER else role for role in whom)
    return ReportTable(
        title="Faults",
        columns=(Column("what"), *(Column(title, 0) for title in titles)),
        rows=tuple((each, *(done[each, role] or None for role in whom)) for each in what),
    )


def _those(role: str) -> list[int]:
    return [pid for each, pid in roles_below(os.getpid()) if each == role]
