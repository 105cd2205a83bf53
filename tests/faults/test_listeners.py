"""The listener is lost on its way, or later: no cell is lent without it, and no guest hangs for it."""

import errno
import os

import pytest

from cellwright import LaunchError, Sandbox, SandboxStatus
from cellwright.policies.errors import InternalError
from cellwright.runner.watching.listener import Listener
from tests.conftest import policy_named
from tests.faults.injection import shim
from tests.faults.test_ends import nothing_left

pytestmark = pytest.mark.needs("userns")

# What guests do instead, where their listener is sent: the descriptor is there, and every layer is on.
LOSING = {
    "it cannot be sent": "raise OSError(109, 'Too many references: cannot splice')",
    "it is closed before": "os.close(descriptor); send(status, encode(frame), (descriptor,))",
    "none is sent": "send(status, encode(frame), ())",
    "it is sent twice": "send(status, encode(frame), (descriptor,)); send(status, encode(frame), (descriptor,))",
    "nobody speaks of it": "os.close(descriptor)",
    "its sender is killed": "os.kill(os.getpid(), 9)",
    "its sender is killed, once it is sent": "send(status, encode(frame), (descriptor,)); os.kill(os.getpid(), 9)",
}
_INSTEAD = """
from cellwright.runner.cell import guest as g, enter as e
def hand_over(status, frame, descriptor, before=g._hand_over, os=g.os, send=g.send, encode=g.encode):
    if type(frame).__name__ != "Listening":
        return before(status, frame, descriptor)
    {losing}
g._hand_over = hand_over
del g, e, hand_over
"""


@pytest.mark.parametrize("losing", LOSING)
def test_a_cell_whose_listener_is_lost_on_its_way_is_not_lent(
    losing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = _INSTEAD.format(losing=LOSING[losing])
    with nothing_left(), monkeypatch.context() as patch:
        shim(f"exec({code!r});", patch)
        with (
            Sandbox(policy=policy_named("strict"), pool=0) as box,
            pytest.raises((LaunchError, InternalError)),
        ):
            box.execute("1")


TRYING = """
import socket
def errno_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
errnos = [errno_of(lambda: open("/etc/passwd")), errno_of(socket.socket), errno_of(lambda: open("/workspace/f", "w"))]
errnos
"""


def test_a_guest_whose_listener_is_closed_under_it_is_refused_everything_and_hangs_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that nobody answers any more fail, those that would have gone on too (seccomp_unotify(2))."""
    quiet, write = os.pipe()

    def close(listener: Listener) -> None:
        os.dup2(quiet, listener._descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(Listener, "answer", close)
        with Sandbox(policy=policy_named("strict"), pool=0) as box:
            result = box.execute(TRYING)
    for descriptor in (quiet, write):
        os.close(descriptor)
    assert (result.status, result.value) == (SandboxStatus.COMPLETED, [errno.ENOSYS] * 3)
