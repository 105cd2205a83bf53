"""`Background`: a call in a thread of its own, which other threads can cancel and wait for."""

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from ...runner.threads import begin

T = TypeVar("T")


class Background(Generic[T]):
    """Calls `work` with a descriptor that becomes readable on `cancel`, and then `on_end`."""

    def __init__(self, name: str, work: Callable[[int], T], on_end: Callable[[], None]) -> None:
        self._work = work
        self._on_end = on_end
        # Reentrant: a finalizer may call `cancel` in a thread that holds it.
        self._lock = threading.RLock()
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC)
        self.outcome: T | None = None
        self._error: BaseException | None = None
        try:
            self._thread = begin(name, self._run)
        except BaseException:
            os.close(self._cancel)
            self._cancel = -1
            raise

    def _run(self) -> None:
        try:
            self.outcome = self._work(self._cancel)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        with self._lock:
            os.close(self._cancel)
            self._cancel = -1
        self._on_end()

    def cancel(self) -> None:
        """End the call, if it still runs."""
        with self._lock:
            if self._cancel >= 0:
                os.eventfd_write(self._cancel, 1)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end; tell whether the call has ended."""
        if (
            self._thread is not threading.current_thread()
        ):  # a finalizer may run in this very thread
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for the end and return the result; raises what `work` raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return cast("T", self.outcome)  # the thread sets one or the other
