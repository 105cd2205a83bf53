"""A call in a thread of its own: cancelled from elsewhere, its result waited for."""

import os
import threading
from collections.abc import Callable

from ...runner.result import SandboxResult
from ...runner.threads import begin


class Background:
    """Does `work`, given a descriptor that is readable once it is to end, and then `on_end`."""

    def __init__(
        self, name: str, work: Callable[[int], SandboxResult], on_end: Callable[[], None]
    ) -> None:
        self._work = work
        self._on_end = on_end
        # Reentrant: a finalizer may cancel what the same thread is at this moment looking at.
        self._lock = threading.RLock()
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC)
        self.outcome: SandboxResult | None = None
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
        """Have it end, if it still runs; harmless otherwise."""
        with self._lock:
            if self._cancel >= 0:
                os.eventfd_write(self._cancel, 1)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; tell whether it has."""
        if self._thread is not threading.current_thread():  # a finalizer may run in any
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> SandboxResult:
        """Wait for the end; raises what the work raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self.outcome is not None  # noqa: S101 - the thread sets one or the other
        return self.outcome
