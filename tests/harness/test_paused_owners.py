"""States that only their process can resume: kept while it lives, and removed once it has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright import HostSettings, PauseSettings, Sandbox, SessionSettings
from cellwright.harness.sandbox.sessions import pause_store, state_file
from cellwright.harness.sandbox.sessions.pause_store import OwnedDirectory, PausedStates, files_of
from cellwright.harness.sandbox.sessions.state_file import PauseToken
from tests.conftest import ROOT, policy_named, soon
from tests.forked import exit_code_of
from tests.harness.test_branching import value
from tests.harness.test_idle_pauses import states

IDLE = SessionSettings(pause_seconds=1_000_000.0)
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.harness.test_paused_owners import pausable
box = pausable(Path(sys.argv[1]))
sessions = [box.session() for _ in range(4)]
for number, session in enumerate(sessions):
    session.execute(f"x = {number}")
for session in sessions[:3]:
    session._life.try_to_pause("it was idle")
    assert session.paused
print(sessions[2].pause(), sessions[3].pause(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def pausable(directory: Path) -> Sandbox:
    settings = PauseSettings(directory)
    policy = policy_named("strict")
    return Sandbox(
        policy=policy, pool=1, sessions=IDLE, host=HostSettings(pauses=settings, pausable=True)
    )


def written(states: PausedStates) -> PauseToken:
    token = PauseToken.new()
    with states.writing(token, is_own=True) as writer:
        writer.add(state_file.END)
    return token


@pytest.mark.needs("userns")
def test_the_next_sandbox_removes_what_only_a_killed_process_could_resume(tmp_path: Path) -> None:
    ran = subprocess.run(
        (sys.executable, "-c", KILLED, tmp_path), capture_output=True, text=True,
        timeout=60, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    tokens = ran.stdout.split()
    assert len(states(tmp_path)) == 4
    with pausable(tmp_path) as box, box.session():
        kept = sorted(f"{token.split('_')[1]}.session" for token in tokens)
        assert soon(lambda: states(tmp_path) == kept)
        assert soon(lambda: not any(each.is_dir() for each in tmp_path.iterdir()))
        for number, token in enumerate(tokens, 2):
            with box.resume(token) as resumed:
                assert value(resumed, "x") == number


def test_states_of_a_living_process_stay(tmp_path: Path) -> None:
    ours, another = (PausedStates(PauseSettings(tmp_path)) for _ in range(2))
    tokens = [written(ours) for _ in range(3)]
    another.sweep()
    assert len(states(tmp_path)) == 3
    with ours.taking(tokens[0]) as pieces:
        assert list(pieces)
    ours.remove(tokens[1])
    ours.give_away(tokens[2])
    assert states(tmp_path) == [f"{tokens[2].id}.session"]
    with another.taking(tokens[2]) as pieces:
        assert list(pieces)
    ours.close()
    assert list(tmp_path.iterdir()) == []


def test_states_count_towards_the_quota_of_others(tmp_path: Path) -> None:
    ours, another = (PausedStates(PauseSettings(tmp_path)) for _ in range(2))
    written(ours)
    directory = os.open(tmp_path, os.O_RDONLY)
    sizes = [each.stat().st_size for each in tmp_path.rglob("*.session")]
    assert another._sweep(directory) == sum(sizes) > 0
    os.close(directory)
    ours.close()


KILLED_SERVER = """
import os, signal, sys
from pathlib import Path
from cellwright import HostSettings, Sandbox
from cellwright.harness.servers.services import SessionLimits
from tests.conftest import policy_named
pauses = SessionLimits().pauses._replace(directory=sys.argv[1])
with Sandbox(policy=policy_named("strict"), pool=1, host=HostSettings(pauses=pauses)) as box:
    first, second = box.session(), box.session()
    second.execute("x = 42")
    first.pause()
    print(box.resume(second.pause()).execute("x").value, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.needs("userns")
def test_nothing_stays_of_the_paused_sessions_of_a_killed_server(tmp_path: Path) -> None:
    ran = subprocess.run(
        (sys.executable, "-c", KILLED_SERVER, tmp_path), capture_output=True, text=True,
        timeout=60, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, "42\n"), ran.stderr
    assert len(states(tmp_path)) == 1
    PausedStates(PauseSettings(tmp_path)).sweep()
    assert states(tmp_path) == []


def test_a_sandbox_has_a_quota_of_its_own(tmp_path: Path) -> None:
    ours, another = (PausedStates(PauseSettings(tmp_path, sandbox_bytes=10_000)) for _ in range(2))
    directory = os.open(tmp_path, os.O_RDONLY)
    first = written(ours)
    size = next(tmp_path.rglob("*.session")).stat().st_size
    assert (ours._left(directory), another._left(directory)) == (10_000 - size, 10_000)
    ours.remove(first)
    second = written(ours)
    next(
        tmp_path.rglob(f"{second.id}.session")
    ).unlink()  # as another process that found it expired
    assert ours._left(directory) == 10_000
    os.close(directory)
    ours.close()


def test_states_that_were_given_up_are_removed(tmp_path: Path) -> None:
    ours, another = (PausedStates(PauseSettings(tmp_path)) for _ in range(2))
    written(ours)
    ours.close()
    assert len(states(tmp_path)) == 1
    another.sweep()
    assert list(tmp_path.iterdir()) == []


def test_states_that_need_their_sandbox_are_removed_when_it_is_closed(tmp_path: Path) -> None:
    ours = PausedStates(PauseSettings(tmp_path))
    tokens = [PauseToken.new() for _ in range(4)]
    for token, is_own, is_bound in zip(
        tokens, (False, False, True, True), (False, True, True, True), strict=True
    ):
        with ours.writing(token, is_own=is_own, is_bound=is_bound) as writer:
            writer.add(state_file.END)
    for token in tokens[2:]:
        ours.give_away(token, is_bound=True)
    ours.remove(tokens[3])
    assert exit_code_of(ours.close) == 0
    assert len(states(tmp_path)) == 3
    ours.close()
    assert [each.name for each in tmp_path.iterdir()] == [f"{tokens[0].id}.session"]


def test_a_forked_child_removes_nothing_of_its_parent(tmp_path: Path) -> None:
    ours = PausedStates(PauseSettings(tmp_path))
    token = written(ours)
    ours.remove(token)
    assert exit_code_of(ours.close) == 0
    written(ours)
    PausedStates(PauseSettings(tmp_path)).sweep()
    assert len(states(tmp_path)) == 1


@pytest.mark.parametrize(("place", "step"), [(os, "open"), (pause_store, "_lock")])
def test_a_directory_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, step: str
) -> None:
    parent, wrapped, swept = os.open(tmp_path, os.O_RDONLY), getattr(place, step), []

    def sweep_first(*given: object, **named: object) -> object:
        if not swept:
            swept.extend(os.listdir(parent))
            assert [files_of(parent, each) for each in swept] == [[]]
        return wrapped(*given, **named)

    monkeypatch.setattr(place, step, sweep_first)
    made = OwnedDirectory(parent)
    monkeypatch.undo()
    assert len(swept) == 1
    assert os.listdir(parent) == [made.name]
    made.close(parent)
    assert os.listdir(parent) == []
    os.close(parent)
