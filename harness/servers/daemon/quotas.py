"""`TenantQuota`: what one tenant of the daemon may use at once, or in a minute."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....policies.errors import BusyError, QuotaExceeded
from ....runner.concurrency import ConcurrencyLimit

UNLIMITED = 1_000_000
_MINUTE = 60.0


class QuotaSettings(NamedTuple):
    """None: no such quota."""

    calls: int | None = None  # that run at once
    queue: int = 64  # further calls that wait for their turn
    queue_seconds: float = 30.0  # at most
    sessions: int | None = None
    cpu_seconds_per_minute: float | None = None
    paused_bytes: int | None = None  # of the states of paused sessions


class TenantQuota:
    """Counts the calls, sessions and CPU time of a tenant; safe from many threads."""

    def __init__(
        self, tenant: str, settings: QuotaSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tenant = tenant
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = ConcurrencyLimit(
            settings.calls or UNLIMITED, settings.queue_seconds, settings.queue
        )
        self._opening = 0  # sessions that are being opened
        self._settings = settings
        self._cpu_left = settings.cpu_seconds_per_minute or 0.0
        self._filled_at = clock()

    @property
    def settings(self) -> QuotaSettings:
        return self._settings

    def change(self, settings: QuotaSettings) -> None:
        """Apply other quotas from now on; calls that run already go on."""
        with self._lock:
            self._refill()
            rate = settings.cpu_seconds_per_minute
            if rate is not None:
                before = self._settings.cpu_seconds_per_minute
                self._cpu_left = rate if before is None else min(self._cpu_left, rate)
            self._settings = settings
        self._calls.resize(settings.calls or UNLIMITED, settings.queue_seconds, settings.queue)

    @contextlib.contextmanager
    def turn(self, cancel: int) -> Iterator[bool]:
        """Wait for the turn of a call and hold it during the block; yield False if the descriptor
        `cancel` was readable first.  Raises QuotaExceeded."""
        self._check_cpu()
        try:
            taken = self._calls.acquire(cancel)
        except BusyError as error:
            limit = "queue" if isinstance(error, QuotaExceeded) else "calls"
            raise self._exceeded(limit, f"calls: {error.what}") from None
        try:
            yield taken
        finally:
            if taken:
                self._calls.release()

    def spend(self, cpu_seconds: float) -> None:
        """Count the CPU time of a call that ended."""
        with self._lock:
            if self._settings.cpu_seconds_per_minute is not None:
                self._refill()
                self._cpu_left -= cpu_seconds

    @contextlib.contextmanager
    def room_for_session(self, count: Callable[[], int], n: int = 1) -> Iterator[None]:
        """Keep room for `n` more sessions during the block; `count` returns how many are open.  Raises
        QuotaExceeded."""
        with self._lock:
            most = self._settings.sessions
            if most is not None and count() + self._opening + n > most:
                raise self._exceeded("sessions", f"at most {most} sessions at once")
            self._opening += n
        try:
            yield
        finally:
            with self._lock:
                self._opening -= n

    def load(self) -> tuple[int, int]:
        """Return how many calls run, and how many wait."""
        return self._calls.load()

    def cpu_seconds_left(self) -> float | None:
        """Return the CPU time that may be used now; None without a quota."""
        with self._lock:
            self._refill()
            return None if self._settings.cpu_seconds_per_minute is None else self._cpu_left

    def close(self) -> None:
        self._calls.close()

    def _check_cpu(self) -> None:
        with self._lock:
            most = self._settings.cpu_seconds_per_minute
            if most is None:
                return
            self._refill()
            if self._cpu_left <= 0:
                wait = (0.001 - self._cpu_left) / most * _MINUTE
                raise self._exceeded(
                    "cpu", f"at most {most:g} CPU seconds a minute", f"try again in {wait:.1f} s"
                )

    def _refill(self) -> None:
        now = self._clock()
        most = self._settings.cpu_seconds_per_minute
        if most is not None:
            filled = self._cpu_left + (now - self._filled_at) * most / _MINUTE
            self._cpu_left = min(most, filled)
        self._filled_at = now

    def _exceeded(self, limit: str, words: str, hint: str = "try again later") -> QuotaExceeded:
        return QuotaExceeded(f"quota of tenant {self._tenant}: {words}", hint, limit=limit)
