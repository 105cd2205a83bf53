"""Every step of the list that confines a cell, left out one at a time: somebody notices each.

A launcher of the test forks one launcher more for each step, whose list lacks it.  What a cell without
the step is like is compared with a whole one: either there is no cell, or its posture, seen from the
host, or what a program in it can do, is another.
"""

import contextlib
import errno
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import CellwrightError, PoolSettings, Sandbox, SandboxStatus
from cellwright.benchmarks.census import children
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import MIB, Filesystem, Policy, Validation
from cellwright.runner import channel
from cellwright.runner.cells import held_cell
from cellwright.runner.messages import Booted, encode
from cellwright.testing import inspect
from tests.conftest import policy_named, with_limits
from tests.escapes.live_cell import LiveCell
from tests.faults.injection import shim
from tests.faults.posture import PROGRAM, posture
from tests.network import policy as network_policy
from tests.runner.test_leftovers import cgroups_of, descriptors

pytestmark = pytest.mark.needs("root", "cgroup", "landlock", "real_cpu")

QUICKER = "pages"  # a layer that saves time, and without which a cell is as it is with it
# `test_forked.py` sends SIGINT to a cell that waits for its program.
MISSED_ELSEWHERE = ["own mounts: rt_sigaction: SIGINT ignored"]
# Without these a cell says nothing, and is given up after some time.
HANGING = ("dup3: descriptor 1", "dup3: the control channel", "sendmsg: ")
PATIENCE = 2.0

# What a launcher does in the place of serving.  An order names the step that the next cell lacks, -1 for
# none; before it, anything that is no Fork frame ends the launcher's own launcher.
_BOOTED = encode(Booted())
_END, _ORDER = b"\0end", b"\0order "
_LEAVES_OUT = f"""
import json, os, signal, socket
from functools import partial
from cellwright.runner import channel
from cellwright.runner.kernel import steps as kinds
from cellwright.runner.launcher import main as launcher
from cellwright.runner.messages import Booted, encode
AHEAD = 2  # inits that a new launcher has the nursery make beyond those that it takes
def serve(site, steps, sock, nursery, keeper, home, serve=launcher.serve):
    os.umask(0o077)  # as a preloaded module may leave it
    supervisor, inits = (socket.socket(fileno=os.dup(each)) for each in (sock, nursery))
    left_out = -1
    channel.send(supervisor, encode(Booted()))
    while packet := supervisor.recv(99, socket.MSG_PEEK):
        if packet.startswith({_ORDER!r}):
            layer, which, is_refused = json.loads(supervisor.recv(99)[{len(_ORDER)}:])
            steps_of = [n for n, step in enumerate(steps.steps) if step.layer == layer]
            left_out = steps_of[which] if layer else -1
            words = [(step.layer, str(step)) for step in steps.steps]
            channel.send(supervisor, json.dumps(words).encode())
        elif packet == {_END!r}:
            supervisor.recv(99)
        else:
            pid = os.fork()
            if pid == 0:
                os.close(supervisor.detach())
                os.close(inits.detach())
                if left_out >= 0 and is_refused:
                    steps.layout = partial(steps.layout, without=left_out)
                elif left_out >= 0:
                    nothing = dict(operation=kinds._CALL, name="close", flags=kinds.MAY_FAIL, arguments=(-1,))
                    steps.steps[left_out] = steps.steps[left_out]._replace(**nothing)
                serve(site, steps, sock, nursery, keeper, home)
                os._exit(0)
            os.waitpid(pid, 0)
            for _ in range(AHEAD):
                _, received = channel.receive_with_descriptors(inits)
                signal.pidfd_send_signal(received[0], signal.SIGKILL)
                for descriptor in received:
                    os.close(descriptor)
main.__defaults__ = (serve,)
"""


class Proof:
    """A sandbox of which the next cell lacks one step."""

    def __init__(self, sandbox: Sandbox, policy: Policy) -> None:
        self._sandbox = sandbox
        self._writable = policy.filesystem.write

    def order(
        self, layer: str = "", which: int = 0, *, is_refused: bool = False
    ) -> list[tuple[str, str]]:
        """Have the next cell lack a step, or the kernel refuse it; return layer and words of all."""
        order = _ORDER + json.dumps((layer, which, is_refused)).encode()
        try:
            return self._order(order)
        except (BrokenPipeError, ConnectionResetError):  # the last cell cost its launcher
            self._sandbox.execute("1")
            return self._order(order)

    def _order(self, order: bytes) -> list[tuple[str, str]]:
        sock = inspect(self._sandbox).generation.launcher.socket
        sock.send(_END)
        sock.send(order)
        assert channel.has_news(sock.fileno(), 20)
        answers = channel.Receiver(sock, 1 << 20)
        while (words := answers.receive_whole()) == _BOOTED:  # of earlier launchers
            assert channel.has_news(sock.fileno(), 20)
        if not words:
            raise ConnectionResetError
        return [tuple(each) for each in json.loads(words)]

    def outcome(self, timeout: float = 30.0) -> Any:
        """Return why there is no cell, or what one is like and what a program in it could do."""
        before = inspect(self._sandbox).launcher_pids()
        try:
            run = self._sandbox.start(PROGRAM, inputs={"writable": self._writable}, timeout=timeout)
            seen = {}
            # A guest that ends has no files in /proc, or files that say EINVAL, as mountinfo does.
            with contextlib.suppress(OSError, IndexError):
                if next(run.output(), None):
                    living = LiveCell(self._sandbox, self._guest())
                    seen = posture(living)
                    os.kill(living.guest, signal.SIGUSR1)
            result = run.result()
        except CellwrightError as error:
            return f"{type(error).__name__}: {error.what}"
        if inspect(self._sandbox).launcher_pids() != before:
            return "the supervisor ended the launcher and started another one"
        return seen, result.status, result.value

    def _outcome_without(self, step: str) -> Any:
        if not step.startswith(HANGING):
            return self.outcome()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(held_cell, "_SETUP_SECONDS", PATIENCE)
            return self.outcome(PATIENCE)

    def _guest(self) -> int:
        (launcher,) = inspect(self._sandbox).cell_pids()
        return children(launcher)[0]

    def unnoticed(self, chosen: list[tuple[str, str]]) -> list[str]:
        """Leave out each of the `chosen` steps and return those without which a cell is a whole one."""
        words = self.order()
        whole = self.outcome()
        assert whole[:2] == (whole[0], SandboxStatus.COMPLETED), whole
        found = []
        for layer in dict.fromkeys(layer for layer, _ in chosen):
            steps = [step for each, step in words if each == layer]
            for which, step in enumerate(steps):
                if (layer, step) not in chosen:
                    continue
                self.order(layer, which)
                if self._outcome_without(step) == whole:
                    found.append(f"{layer}: {step}")
        self.order()
        assert self.outcome() == whole
        return found


@contextlib.contextmanager
def proving(policy: Policy, **given: Any) -> Iterator[Proof]:
    """A sandbox whose steps can be left out."""
    with pytest.MonkeyPatch.context() as patch:
        shim(f"exec({_LEAVES_OUT!r});", patch)
        with Sandbox(
            policy=with_limits(policy, wall_seconds=60.0, memory_bytes=128 * MIB),
            **{"pool": 0, **given},
        ) as box:
            yield Proof(box, policy)


def inherited() -> list[str]:
    """Return the steps that lower a limit to what this process, and so a launcher, has anyway."""
    numbers = {"NICE": resource.RLIMIT_NICE, "RTPRIO": resource.RLIMIT_RTPRIO}  # 0 by default
    low = [name for name, number in numbers.items() if resource.getrlimit(number) == (0, 0)]
    return [f"rlimits: prlimit64: {name} 0" for name in low]


def test_each_step_that_is_refused_is_named_and_leaves_nothing() -> None:
    with proving(policy_named("strict")) as proof:
        words = [step for step in proof.order() if step[0] != QUICKER]
        assert proof.outcome()[1] is SandboxStatus.COMPLETED
        before = cgroups_of(os.getpid()), descriptors(os.getpid())
        for layer in dict.fromkeys(layer for layer, _ in words):
            for which, step in enumerate(step for each, step in words if each == layer):
                proof.order(layer, which, is_refused=True)
                expected = f"LaunchError: cannot build a cell: {step}: {os.strerror(errno.ENOSYS)}"
                assert proof.outcome() == expected
        assert (cgroups_of(os.getpid()), descriptors(os.getpid())) == before


@pytest.fixture(scope="module")
def steps_of_strict() -> list[tuple[str, str]]:
    with proving(policy_named("strict")) as proof:
        return proof.order()


def test_each_step_is_missed(steps_of_strict: list[tuple[str, str]]) -> None:
    chosen = [step for step in steps_of_strict if step[0] != QUICKER]
    assert len(chosen) > 100
    with proving(policy_named("strict")) as proof:
        assert proof.unnoticed(chosen) == MISSED_ELSEWHERE + inherited()


@pytest.fixture
def shown() -> Iterator[Filesystem]:
    """Paths where cells mount a file system of their own, and one to write to elsewhere."""
    with contextlib.ExitStack() as stack:
        temporary, other = (
            Path(stack.enter_context(tempfile.TemporaryDirectory("", "cellwright-step-", parent)))
            for parent in ("/tmp", "/srv")
        )
        temporary.chmod(0o755)
        (temporary / "directory").mkdir()
        (temporary / "file").touch()
        other.chmod(0o777)
        read = (f"{temporary}/directory", f"{temporary}/file")
        yield Filesystem(read=read, write=(str(other),))


@pytest.mark.parametrize(
    "name", ["standard", "server", "tool", "trusted-read", "workshop", "shown paths"]
)
def test_each_step_that_another_policy_has_is_missed(
    name: str, steps_of_strict: list[tuple[str, str]], shown: Filesystem
) -> None:
    if name == "shown paths":
        policy = policy_named("strict", filesystem=shown)
    else:
        policy = policy_named(name, validation=Validation(mode="off"))
    with proving(policy) as proof:
        chosen = [step for step in proof.order() if step not in steps_of_strict]
        chosen = [step for step in chosen if step[0] != QUICKER]
        assert chosen or name == "trusted-read"
        assert proof.unnoticed(chosen) == []


def test_each_step_that_the_network_needs_is_missed(steps_of_strict: list[tuple[str, str]]) -> None:
    with proving(network_policy(NetworkRule(host="api.example.org"))) as proof:
        chosen = [step for step in proof.order() if step not in steps_of_strict]
        chosen = [step for step in chosen if step[0] != QUICKER]
        assert len(chosen) > 10
        assert proof.unnoticed(chosen) == []


@pytest.mark.parametrize("given", [{"pool": PoolSettings(size=0, cells_per_launcher=1)}], ids=str)
def test_the_list_is_the_policys_whatever_else_a_sandbox_is_told(
    given: dict[str, Any], steps_of_strict: list[tuple[str, str]]
) -> None:
    with proving(policy_named("strict"), **given) as proof:
        assert [step for step in proof.order() if step[0] != QUICKER] == [
            step for step in steps_of_strict if step[0] != QUICKER
        ]
