"""Load beyond the capacity: sessions that are opened and closed, and a burst larger than the pool."""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sessions.session import Session
from ..policies.errors import BusyError, SessionLost
from ..policies.policy import MIB
from ..runner.requests.result import SandboxResult
from ..runner.settings import PoolSettings, SessionSettings
from .callers import said
from .census import guests_of, private_bytes
from .leak_checks import LeakCheck, settled
from .measuring import median
from .report import Criterion, Value
from .settings import Settings, sandbox

_SEED = 20260103


def leak_checks(settings: Settings, rows: list[tuple[Value, ...]]) -> Iterator[LeakCheck]:
    """Yield one check of each load; add to `rows` what else is to be told of it."""
    yield _sessions(settings, rows)
    yield _burst(settings, rows)


# Sessions

_ALIVE, _SMOKE_ALIVE = 64, 24
_REQUESTS = 20  # requests of one session
_SESSION_MIB = 8.0  # private memory of an idle session
_THREADS = 8


def _sessions(settings: Settings, rows: list[tuple[Value, ...]]) -> LeakCheck:
    """Ask sessions, each of which remembers a nonce, while they are closed, crash, or are evicted."""
    alive = _SMOKE_ALIVE if settings.smoke else _ALIVE
    count = max(alive, settings.amount(1000, 40))
    with sandbox(settings, sessions=SessionSettings(alive=alive, evict=True)) as made:
        _use_sessions(made, alive + _THREADS, alive)
        before = settled(made.settle)
        wrong, ends, memory = _use_sessions(made, count, alive)
        after = settled(made.settle, before)
    rows.append(("sessions", f"private MiB of an idle one, p50 of {len(memory)}", median(memory)))
    rows.append(("sessions", "private MiB of an idle one, the most", max(memory)))
    rows += [("sessions", f"ended because {why}", number) for why, number in sorted(ends.items())]
    bounded = Criterion(
        f"sessions: an idle one has less than {_SESSION_MIB:g} MiB of its own",
        max(memory) < _SESSION_MIB,
        f"at most {max(memory):.1f} MiB after up to {_REQUESTS} requests",
    )
    name = f"{count:,} sessions of {_REQUESTS} requests"
    return LeakCheck(name, count * _REQUESTS, wrong, before, after, (bounded,))


def _use_sessions(
    made: Sandbox, count: int, alive: int
) -> tuple[list[str], Counter[str], list[float]]:
    """Have so many sessions live; return complaints, how they ended, and memory of idle ones in MiB."""
    # sessions of a thread: together more than may live, so the oldest is evicted
    most = alive // _THREADS + 1
    loads = [SessionLoad(made, number, most) for number in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda load: load.use(count // _THREADS), loads))
    memory = [(private_bytes(guest) or 0) / MIB for guest in guests_of(made)]
    for load in loads:
        load.close()
    ends = sum((load.ends for load in loads), Counter[str]())
    return [complaint for load in loads for complaint in load.wrong], ends, memory


class SessionLoad:
    """Sessions of one thread: opened one after the other, asked in any order, ended in several ways."""

    def __init__(self, made: Sandbox, number: int, most: int) -> None:
        self._made = made
        self._most = most
        self._chance = random.Random(_SEED + number)
        self._living: dict[str, Session] = {}  # by the nonce that it has to remember
        self.wrong: list[str] = []
        self.ends: Counter[str] = Counter()

    def use(self, count: int) -> None:
        for _ in range(count):
            if len(self._living) >= self._most:
                self._end_one()
            self._open()
            for _ in range(_REQUESTS - 1):
                self._ask()

    def close(self) -> None:
        for session in self._living.values():
            session.close()

    def _open(self) -> None:
        nonce = os.urandom(8).hex()
        with contextlib.suppress(SessionLost):  # in this very moment
            session = self._made.session()
            self._living[nonce] = session
            self._judge(session.execute(f"x = {nonce!r}\nx"), nonce)

    def _ask(self) -> None:
        if not self._living:
            return
        nonce, session = self._chance.choice(list(self._living.items()))
        try:
            self._judge(session.execute("x"), nonce)
        except SessionLost:
            self.ends["others were opened"] += 1
            del self._living[nonce]

    def _judge(self, result: SandboxResult, nonce: str) -> None:
        if result.value != nonce and not result.session_lost:
            self.wrong.append(f"wanted {nonce}, {said(result)}, {result.value!r}")

    def _end_one(self) -> None:
        nonce, session = self._chance.choice(list(self._living.items()))
        del self._living[nonce]
        if self._chance.random() < 0.5:
            session.close()
            self.ends["it was closed"] += 1
            return
        with contextlib.suppress(SessionLost):
            session.execute("import os\nos._exit(0)")
        self.ends["its process ended"] += 1


# A burst

_RUNNING = 16
_QUEUE_SECONDS = 2.0
_RECOVERS_SECONDS = 2.0


def _burst(settings: Settings, rows: list[tuple[Value, ...]]) -> LeakCheck:
    """Have many more callers come at once than can be served in time."""
    callers = 200 if settings.smoke else 1000
    pool = PoolSettings(size=_RUNNING, running=_RUNNING, queue_seconds=_QUEUE_SECONDS)
    with sandbox(settings, pool) as made:
        _call_at_once(made, callers)
        before = settled(made.settle)
        wrong, served, refused = _call_at_once(made, callers)
        began = time.monotonic()
        result = made.execute("1 + 1")
        recovered = time.monotonic() - began
        wrong += [] if result.value == 2 else [said(result)]
        after = settled(made.settle, before)
    rows.append(("burst", f"served of {callers:,}, {_RUNNING} at once", served))
    rows.append(("burst", f"told BusyError after {_QUEUE_SECONDS:g} s", refused))
    rows.append(("burst", "next call, seconds after the last of them", recovered))
    told = (
        Criterion(
            "burst: who cannot be served in time is told BusyError, and nobody anything else",
            bool(refused) and served + refused == callers,
            f"{served:,} served, {refused:,} refused",
        ),
        Criterion(
            f"burst: the next call takes less than {_RECOVERS_SECONDS:g} s",
            recovered < _RECOVERS_SECONDS,
            f"{recovered:.3f} s",
        ),
    )
    further = told[:1] if settings.smoke else told
    return LeakCheck(f"burst over a pool of {_RUNNING}", callers, wrong, before, after, further)


def _call_at_once(made: Sandbox, callers: int) -> tuple[list[str], int, int]:
    """Have them call at once; return complaints, and how many were served and refused."""
    barrier = threading.Barrier(callers)

    def call(number: int) -> str:
        barrier.wait()
        try:
            result = made.execute(f"import time; time.sleep(0.5)\n{number}")
        except BusyError:
            return _BUSY
        return "" if result.value == number else said(result)

    with ThreadPoolExecutor(callers) as threads:
        told = list(threads.map(call, range(callers)))
    wrong = [each for each in told if each not in ("", _BUSY)]
    return wrong, told.count(""), told.count(_BUSY)


_BUSY = "busy"
