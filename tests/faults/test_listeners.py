"""The listener is lost on its way, or later: no cell is lent without it, and no guest hangs for it."""

import errno
import os

import pytest

from cellwright import LaunchError, Sandbox, SandboxStatus
from cellwright.policies.errors import InternalError
from cellwright.runner.cells import held_cell
from cellwright.runner.listening.cell_listener import Listener
from cellwright.runner.messages import Ready, encode
from tests.conftest import policy_named
from tests.faults.injection import numbers, shim
from tests.faults.test_ends import nothing_left

pytestmark = pytest.mark.needs("userns")

# What becomes of the step `at`, which sends the listener: it is there, and every layer is on.
LOSING = {
    "it cannot be sent": "steps[at] = with_arguments(*sent[:-1], do.input(14))",
    "it is closed before": "steps.insert(at, call('close', sent[-1]))",
    "none is sent": "steps[at] = with_arguments(*sent[:-1])",
    "it is sent twice": "steps.insert(at, steps[at])",
    "nobody speaks of it": "steps[at] = quietly(*sent[2:-1])",
    "nothing is sent": "steps[at] = call('getpid')",
    "its sender is killed": "steps[at] = call('kill', 0, 9)",
}
_INSTEAD = """
from cellwright.runner.kernel import _steps
from cellwright.runner.launcher import main as launcher
_steps.NUMBERS["kill"] = {kill}
def confinement(site, before=launcher.confinement):
    do = before(site)
    steps = do.steps
    at = next(n for n, step in enumerate(steps) if step.name == "sendmsg")
    sent = steps[at].arguments
    def with_arguments(*arguments):
        return steps[at]._replace(arguments=arguments)
    def call(name, *arguments):
        return steps[at]._replace(name=name, operation=0, arguments=arguments)
    def quietly(*descriptors):
        frame = {quiet!r}
        return with_arguments(do.structure(frame), len(frame), *descriptors)
    {losing}
    return do
launcher.confinement = confinement
del _steps, launcher, confinement
"""


@pytest.mark.parametrize("losing", LOSING)
def test_a_cell_whose_listener_is_lost_on_its_way_is_not_lent(
    losing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = b"\0" + encode(Ready(listens=False))
    code = _INSTEAD.format(losing=LOSING[losing], kill=numbers()["kill"], quiet=quiet)
    with nothing_left(), monkeypatch.context() as patch:
        patch.setattr(
            held_cell, "_SETUP_SECONDS", 2.0
        )  # for a cell that never reports that it is ready
        shim(f"exec({code!r});", patch)
        with (
            Sandbox(policy=policy_named("strict"), pool=0) as box,
            pytest.raises((LaunchError, InternalError)),
        ):
            box.execute("1")


def test_a_guest_that_is_killed_once_its_listener_is_sent_runs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = _INSTEAD.format(
        losing="steps.insert(at + 1, call('kill', 0, 9))", kill=numbers()["kill"], quiet=b""
    )
    with nothing_left(), monkeypatch.context() as patch:
        shim(f"exec({code!r});", patch)
        with Sandbox(policy=policy_named("strict"), pool=0) as box:
            result = box.execute("1")
    assert (result.status, result.value) == (SandboxStatus.FAILED, None)


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


# A launcher that is not what it was: it hands over other descriptors than those of the cell

_OTHER = """
from cellwright.runner.kernel.steps import Result
from cellwright.runner.launcher import main as launcher
def confinement(site, before=launcher.confinement):
    do = before(site)
    steps = do.steps
    chdir, sent = (next(n for n, step in enumerate(steps) if step.name == name) for name in ("chdir", "sendmsg"))
    steps[chdir] = steps[chdir]._replace(name="openat", arguments=(-100, {path!r}, {flags}))
    arguments = list(steps[sent].arguments)
    arguments[2 + {slot}] = Result(16 + chdir)
    steps[sent] = steps[sent]._replace(arguments=tuple(arguments))
    return do
launcher.confinement = confinement
del launcher, confinement
"""
SLOTS = ("init", "guest", "workspace", "listener")


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("path", ["/dev/zero", "/", "/proc/self/ns/mnt"])
def test_a_launcher_that_sends_other_descriptors_is_ended_and_replaced(
    slot: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = _OTHER.format(path=path.encode(), flags=os.O_RDONLY, slot=SLOTS.index(slot))
    with nothing_left():
        with monkeypatch.context() as patch:
            shim(f"exec({code!r});", patch)
            box = Sandbox(policy=policy_named("strict"), pool=0)
            with pytest.raises(InternalError, match=f"the {slot} of a cell"):
                box.execute("1")
        with box:
            assert box.execute("1 + 1").value == 2
