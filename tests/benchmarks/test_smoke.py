"""Every benchmark measures something on this host; what it measures is not judged here."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from cellwright.benchmarks import (
    callers,
    chaos,
    commands,
    conversations,
    fairness,
    killed_workers,
    leak_checks,
    lineup,
)
from cellwright.benchmarks.census import (
    GUEST,
    INIT,
    KEEPER,
    LAUNCHER,
    NURSERY,
    WORKER,
    Census,
    count,
    roles_below,
)
from cellwright.benchmarks.faults import Faults
from cellwright.benchmarks.libraries import Library
from cellwright.benchmarks.peer_base import AbsentError, Command, Isolation
from cellwright.benchmarks.programs import SUM, TEXT, SampleProgram
from cellwright.benchmarks.settings import Settings, sandbox
from cellwright.policies.errors import LauncherLost
from cellwright.policies.policy import Policy
from cellwright.runner import channel
from cellwright.runner.audit.log import AuditLog
from cellwright.runner.settings import PauseSettings
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, ROOT, soon

SETTINGS = Settings(Policy(name="strict", optional_layers=OPTIONAL), runs=2, forks=20, smoke=True)
OF_DAEMONS = (callers.HANGS_UP, callers.OF_A_DAEMON)
LONG = (
    "throughput",
    "validation",
    "soak",
    "chaos",
    "replays",
)  # they are in the smoke run of .ci/run
NEEDS = {
    "image_cells": "image",
    "peers": "bwrap",  # its criterion is a comparison with bubblewrap
    "workflows": "mcp_servers",  # its work is done with them, or not at all
}
WITH_RAY = ("fleet",)  # tests/frameworks/suite_ray_benchmark.py measures it
SHORT = [
    pytest.param(name, marks=pytest.mark.needs(NEEDS[name])) if name in NEEDS else name
    for name in commands.BENCHMARKS
    if name not in (*LONG, *WITH_RAY)
]
pytestmark = pytest.mark.needs("userns")


@pytest.mark.slow
@pytest.mark.needs("real_cpu")
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_returns_a_report_that_says_something(name: str) -> None:
    import importlib

    report = importlib.import_module(f"cellwright.benchmarks.{name}").measure(SETTINGS)
    assert report.name == name
    assert report.verdicts
    for table in report.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_peer_that_is_not_here_says_so_and_one_that_lies_is_not_believed(tmp_path: "os.PathLike[str]") -> None:  # fmt: skip
    nothing = Isolation(*["none"] * len(Isolation._fields))

    def line(place: object, program: SampleProgram) -> list[str]:
        return ["/nowhere/python3"] if program is TEXT else ["/bin/echo", "3"]

    peer = Command("liar", nothing, line, lambda: "1")
    peer.find(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(AbsentError, match="/nowhere/python3"):
        peer.run(TEXT)
    with pytest.raises(AbsentError, match="printed '3'"):
        peer.run(SUM)


def test_every_peer_that_is_missing_has_a_reason() -> None:
    found = {peer.name: peer for peer in lineup.every_peer(SETTINGS)}
    assert len(found) >= 17
    for name in ("pydantic-monty", "llm-sandbox, nsjail", "sandlock"):
        with pytest.raises(AbsentError, match="peers-setup"):
            found[name].find(None)  # type: ignore[arg-type]


def test_a_worker_that_cannot_work_says_why() -> None:
    script = "import json; print(json.dumps({'absent': 'nsjail was not found'}))"
    nothing = Isolation(*["none"] * len(Isolation._fields))
    peer = Library("a library", nothing, [sys.executable, "-c", script], "DIR")
    with pytest.raises(AbsentError, match="nsjail was not found"):
        peer.find(Path())
    peer.close()


# The judges


def census(**more: int) -> Census:
    return Census(5, 0, 52, 4, 27, 1, 0, 0, 30, 20.0, 20.0)._replace(**more)


def test_what_there_is_more_of_is_a_leak_and_memory_may_breathe() -> None:
    assert leak_checks.more(census(), census(memory_mib=24, launchers_mib=24)) == {}
    assert leak_checks.more(census(), census(memory_mib=26)) == {"memory_mib": 6}
    assert leak_checks.more(census(), census(launchers_mib=26)) == {"launchers_mib": 6}
    assert leak_checks.more(census(), census(descriptors=28)) == {"descriptors": 1}
    assert leak_checks.more(census(), census(ipc_objects=1)) == {"ipc_objects": 1}
    assert leak_checks.more(census(), census(processes=4, dying_cgroups=60)) == {}
    assert leak_checks.more(census(), census(dying_cgroups=200)) == {"dying_cgroups": 170}


def test_a_census_sees_what_is_held() -> None:
    with sandbox(SETTINGS, pool=0) as made, leak_checks.own_temporary_files():
        before = leak_checks.settled(made.settle)
        with (
            open("/dev/null") as _,
            tempfile.TemporaryDirectory(prefix="cellwright-"),
            made.session() as session,
        ):
            session.execute("1")
            now = count()
        held = {"descriptors", "files", "processes", "threads"}
        assert held <= leak_checks.more(before, now).keys()


def test_a_census_sees_a_shared_memory_segment() -> None:
    before = count().ipc_objects
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 4096, 0o600)
    assert segment >= 0, os.strerror(ctypes.get_errno())
    try:
        assert count().ipc_objects > before
    finally:
        libc.shmctl(segment, 0, None)


def test_every_process_of_a_sandbox_has_its_role() -> None:
    with sandbox(SETTINGS, pool=2) as made, made.session() as session:
        session.execute("1")
        made.settle()
        pids = inspect(made).launcher_pids()
        roles = dict(map(reversed, roles_below(os.getpid())))  # type: ignore[arg-type]
        assert [roles[pid] for pid in pids] == [KEEPER, NURSERY, LAUNCHER]
        assert list(roles.values()).count(GUEST) >= 3
        assert list(roles.values()).count(INIT) >= 3


# Calls whose result is known


@pytest.mark.parametrize("language", callers.languages())
@pytest.mark.parametrize("kind", [each for each in callers.KINDS if each not in OF_DAEMONS])
def test_a_call_ends_as_its_kind_says_in_every_language(kind: callers.Kind, language: str) -> None:
    with sandbox(SETTINGS, pool=0) as made:
        caller, call = callers.Prober(made, Path("/nowhere")), callers.Probe(kind, language)
        assert callers.complaint_about(call, caller.make(call)) == ""


def test_a_wrong_answer_is_told() -> None:
    call = callers.Probe(callers.WELL)
    with sandbox(SETTINGS, pool=0) as made:
        answer = callers.Prober(made, Path("/nowhere")).make(call)
    assert callers.complaint_about(call, answer) == ""
    assert "wanted other" in callers.complaint_about(call, answer._replace(nonce="other"))
    assert "exit" in callers.complaint_about(callers.Probe(callers.KINDS[0]), answer)
    assert chaos._judged(answer) == ("exit", "")
    assert chaos._judged(answer._replace(heard="of another"))[0] == "wrong"
    assert chaos._judged(answer._replace(heard=""))[0] == "wrong"  # it ended well


def test_a_trail_in_which_an_execution_does_not_end_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path=path) as log:
        log.record("execution", "start", execution_id="a")
        log.record("execution", "ok", execution_id="a")
        assert leak_checks.whole("", path).holds
        log.record("execution", "start", execution_id="b")
    assert not leak_checks.whole("", path).holds


# Conversations


@pytest.mark.parametrize("talk", [
    conversations.with_sessions, conversations.with_programs, conversations.with_branches, conversations.with_pauses,
])  # fmt: skip
def test_a_conversation_in_which_nothing_breaks_is_right_to_its_end(
    talk: conversations.Talk, tmp_path: Path
) -> None:
    judged: list[tuple[str, str]] = []
    over = threading.Event()

    def note(make: conversations.Make) -> None:
        judged.append(chaos._judged(make()))
        if len(judged) == 25:  # the second one of those that end has begun
            over.set()

    servers = chaos._of_servers(SETTINGS)
    with sandbox(servers, pool=0, pauses=PauseSettings(tmp_path)) as made:
        talk(made, over, note)
    wanted = "sent back" if talk is conversations.with_programs else "exit"
    assert set(judged) == {(wanted, "")}
    assert len(judged) >= 25


def test_programs_with_a_package_reach_a_server_by_its_name(tmp_path: Path) -> None:
    judged: list[tuple[str, str]] = []
    over = threading.Event()

    def note(make: conversations.Make) -> None:
        judged.append(chaos._judged(make()))
        if len(judged) == 3:
            over.set()

    with chaos._equipped(SETTINGS, tmp_path) as (made, given):
        conversations.with_servers(given)(made, over, note)
    assert judged == [("exit", "")] * 3


def test_a_lost_call_is_right_only_if_its_worker_was_killed() -> None:
    over = threading.Event()
    with sandbox(SETTINGS, tools=(conversations.repeat,), workers=2) as made:
        calls = killed_workers.PlacedCalls(made)

        def note(make: conversations.Make) -> None:
            calls._note(make)
            if calls.ends.total() == 8:  # each form twice
                over.set()

        def lose() -> callers.ProbeResult:
            raise LauncherLost(cell_began=True)

        conversations.with_calls(made, over, note)
        assert (calls.ends, calls.wrong) == ({"answered": 8}, [])
        calls._note(lose)
        assert len(calls.wrong) == 1
        calls.killed = {worker for role, worker in roles_below(os.getpid()) if role == WORKER}
        calls._note(lose)
        assert len(calls.wrong) == 1


# Faults


def test_a_fault_reaches_a_worker() -> None:
    with sandbox(SETTINGS, workers=2) as made:
        faults = Faults(random.Random(1), Path("/nowhere"))
        pid = next(pid for role, pid in roles_below(os.getpid()) if role == WORKER)
        faults._send(pid, WORKER, signal.SIGKILL)
        assert soon(lambda: pid not in [each for _, each in roles_below(os.getpid())])
        assert made.execute("1").value == 1


@pytest.mark.parametrize("role", [GUEST, INIT, LAUNCHER, NURSERY, KEEPER])
def test_a_fault_reaches_the_process_that_it_names(role: str) -> None:
    with sandbox(SETTINGS):
        faults = Faults(random.Random(1), Path("/nowhere"))
        pid = next(pid for each, pid in roles_below(os.getpid()) if each == role)
        pidfd = os.pidfd_open(pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            faults._send(pid, role, number)
            assert faults.done[number.name, role] == 1
            faults.release()
        assert channel.has_news(pidfd, 5)
        os.close(pidfd)


def test_a_fault_reaches_no_other_process() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as bystander, sandbox(SETTINGS):
        faults = Faults(random.Random(1), Path("/nowhere"))
        for pid in (bystander.pid, os.getpid(), os.getppid()):
            faults._send(pid, GUEST, signal.SIGURG)  # which, should it come, nobody minds
        assert faults.done.total() == 0
        bystander.kill()


def test_an_unordered_list_fails_the_criterion() -> None:
    assert fairness._in_order([0, 1, 2]).holds
    assert not fairness._in_order([0, 2, 1]).holds


def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    optional = [part for layer in OPTIONAL for part in ("--optional", layer)]
    command = [
        sys.executable,
        "-m",
        "cellwright",
        "bench",
        "--smoke",
        "--plain",
        *optional,
        "latency",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert soon(lambda: bool(os.listdir(tmp_path)))
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []
