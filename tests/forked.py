"""Children that tests fork: none outlives its test, and none goes on as a second run of the tests."""

import contextlib
import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

from cellwright.runner.kernel import syscall

_SECONDS = 60.0
_FAILED = 70
_PR_SET_PDEATHSIG = 1


class Child:
    """A forked child, which is killed and reaped at the end of `forked`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self) -> int:
        """Return its exit status, or the negative number of the signal that ended it."""
        if self._code is None:
            if not select.select([self.pidfd], [], [], _SECONDS)[0]:
                raise TimeoutError(f"a forked child did not end within {_SECONDS:g} s")
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.wait()


@contextlib.contextmanager
def forked(work: Callable[[], int | None]) -> Iterator[Child]:
    """Fork a child that does `work` and ends with the status that it returns."""
    with warnings.catch_warnings():  # warnings about threads, which some tests need
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _do(work)
    child = Child(pid)
    try:
        yield child
    finally:
        child.kill()
        os.close(child.pidfd)


def exit_code_of(work: Callable[[], int | None]) -> int:
    """Do `work` in a forked child and return its exit status."""
    with forked(work) as child:
        return child.wait()


def _do(work: Callable[[], int | None]) -> NoReturn:
    status = _FAILED
    try:
        syscall("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        status = work() or 0
    except BaseException:  # noqa: BLE001 - the line before os._exit
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
