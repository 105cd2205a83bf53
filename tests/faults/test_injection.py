"""A system call of the set-up fails: nothing runs, or what runs has every layer.  Some calls of each kind;
`scripts/inject-faults` has them all."""

import errno
import json
import os

import pytest

from cellwright import LaunchError, Sandbox
from cellwright.runner import channel
from cellwright.testing import inspect
from tests.conftest import policy_named
from tests.faults.inject import Fault, Outcome, sound_outcome, what_comes_of
from tests.faults.injection import Call, denying_a_listener, shim

pytestmark = pytest.mark.needs("root", "landlock")

# Those without which a layer would be missing, or a cell in somebody else's place.
FATAL = (
    ("keeper", "unshare", 0, errno.EPERM), ("keeper", "clone", 0, errno.EAGAIN),
    ("nursery", "mount", 0, errno.EPERM), ("nursery", "pivot_root", 0, errno.EINVAL), ("nursery", "mount_setattr", 0, errno.ENOSYS),
    ("nursery", "setresgid", 0, errno.EPERM), ("nursery", "unshare", 2, errno.ENOSPC),
    ("nursery", "clone", 1, errno.EAGAIN), ("nursery", "clone", 2, errno.EAGAIN), ("nursery", "unshare", 3, errno.ENOSPC),
    ("launcher", "setns", 0, errno.EPERM), ("launcher", "clone3", 0, errno.EAGAIN),
    ("guest", "close_range", 0, errno.ENOSYS), ("guest", "write", 1, errno.ENOSPC), ("guest", "unshare", 0, errno.EPERM),
    ("guest", "setsid", 0, errno.EPERM), ("guest", "fsmount", 2, errno.EPERM), ("guest", "sendmsg", 0, errno.ETOOMANYREFS),
    ("guest", "unshare", 1, errno.ENOSPC), ("guest", "prlimit64", 3, errno.EPERM), ("guest", "prctl", 2, errno.EINVAL),
    ("guest", "capset", 0, errno.EPERM), ("guest", "landlock_restrict_self", 0, errno.E2BIG), ("guest", "seccomp", 0, errno.EINVAL),
)  # fmt: skip
# Those after which all is well, because there is another way, or no need.
HARMLESS = (
    ("nursery", "clone", 3, errno.EAGAIN), ("launcher", "madvise", 0, errno.EINVAL), ("guest", "process_madvise", 0, errno.ENOSYS),
)  # fmt: skip
# Those that end a launcher which may have said already that it is ready: then another one takes over.
ENDING = (
    ("nursery", "capset", 0, errno.EPERM), ("nursery", "seccomp", 0, errno.ENOMEM), ("launcher", "setns", 4, errno.ENOMEM),
)  # fmt: skip


@pytest.fixture(scope="module")
def sound() -> Outcome:
    outcome = sound_outcome()
    assert outcome.posture
    return outcome


@pytest.mark.parametrize("case", FATAL, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_what_holds_a_cell_cannot_be_had_and_nothing_runs(
    case: tuple[str, str, int, int], sound: Outcome
) -> None:
    *call, number = case
    assert what_comes_of(Fault(Call(*call), number), sound).startswith("LaunchError")


@pytest.mark.parametrize("case", HARMLESS, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_a_failed_call_with_a_fallback_leaves_a_whole_cell(
    case: tuple[str, str, int, int], sound: Outcome
) -> None:
    *call, number = case
    assert what_comes_of(Fault(Call(*call), number), sound) == "a whole cell"


@pytest.mark.parametrize("case", ENDING, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_a_launcher_that_ends_for_it_is_replaced_or_told_of(
    case: tuple[str, str, int, int], sound: Outcome
) -> None:
    *call, number = case
    what = what_comes_of(Fault(Call(*call), number), sound)
    assert what == "a whole cell" or what.startswith("Launch")


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EINVAL, errno.ENOMEM])
def test_a_cell_whose_listener_cannot_be_had_is_not_built(number: int) -> None:
    with (
        denying_a_listener(number),
        Sandbox(policy=policy_named("strict"), pool=0) as box,
        pytest.raises(LaunchError, match="cannot build a cell: seccomp"),
    ):
        box.execute("1")


# Each step of the list that confines a cell, refused by the kernel (ENOSYS)

_EACH = """
import json, os
from cellwright.benchmarks.stages import _MARKS, Stage, _Ladder
from cellwright.runner.cell.enter import TASKS
def serve(site, steps, sock, nursery, keeper, home):
    ladder = _Ladder(site, steps, sock, nursery, home)
    ladder._inputs = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(TASKS - 1 + site.joins)]
    for n, step in [*enumerate(steps.steps), (-1, "the end")]:
        program = steps.layout(site.plan.open_files, TASKS + site.joins, without=n)
        ladder._fork(Stage("", program=program, ahead=True), 0)
        words = _MARKS.unpack(ladder._marks[:_MARKS.size])[2].rstrip(b"\\0").decode()
        ladder._sock.send(json.dumps([str(step), words]).encode())
main.__defaults__ = (serve,)
"""
_ONE = """
from cellwright.runner.kernel.steps import Steps
def layout(self, status, inputs, before=Steps.layout):
    refused = [n for n, step in enumerate(self.steps) if step.layer == {layer!r}]
    return before(self, status, inputs, without=refused[{which}])
Steps.layout = layout
del Steps, layout
"""
LAYERS = (
    "descriptor sweep", "cgroup_ns", "own mounts", "user_ns", "rlimits", "capabilities", "landlock",
    "seccomp",
)  # fmt: skip


def test_each_step_that_the_kernel_refuses_ends_the_list_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, str]] = []
    with monkeypatch.context() as patch:
        shim(f"exec({_EACH!r});", patch)
        with Sandbox(policy=policy_named("strict"), pool=0) as box:
            sock = inspect(box).supervisor.generation.launcher._sock
            while not told or told[-1][0] != "the end":
                assert channel.has_news(sock.fileno(), 20), told[-1:]
                told.append(tuple(json.loads(sock.recv(4096))))
    *refused, (_, whole) = told
    assert whole == ""  # nothing but the refusals was amiss
    assert len(refused) > 100
    for step, words in refused:
        expected = f"OSError: [Errno {errno.ENOSYS}] {os.strerror(errno.ENOSYS)}: {step!r}"
        assert words == expected[:200]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_layer_of_which_a_step_is_refused_is_a_cell_that_is_not_built(
    layer: str, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        shim(f"exec({_ONE.format(layer=layer, which=which)!r});", patch)
        with (
            Sandbox(policy=policy_named("strict"), pool=0) as box,
            pytest.raises(LaunchError, match=r"cannot build a cell: .*Function not implemented"),
        ):
            box.execute("1")
