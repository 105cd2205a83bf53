"""A fleet on two Ray nodes of this host: calls, sessions, what Ray sees of them, and a node's loss.

The last test kills a node.
"""

import functools
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.serialization import SerializationContext

from cellwright import Fleet, PolicyError, SandboxResult, Unenforceable
from cellwright.errors import OutcomeUnknown, QuotaExceeded, SessionNodeLost
from cellwright.harness.fleet.ray_nodes import LocalCluster
from cellwright.harness.servers.daemon.quotas import QuotaSettings

SLOTS = 4
PROGRAMS = 1000  # `cellwright bench fleet` runs 10,000
TENANTS = {
    "default": QuotaSettings(),
    "small": QuotaSettings(calls=1, queue=0, queue_seconds=0.01, sessions=1),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def trails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trails")


@pytest.fixture(scope="module")
def fleet(cluster: LocalCluster, trails: Path) -> Iterator[Fleet]:
    audit = str(trails / "{node}.jsonl")
    with Fleet.on_ray(
        policy="standard", slots=SLOTS, pool=SLOTS, audit=audit, tenants=TENANTS
    ) as made:
        yield made


def test_each_host_has_one_node_and_programs_run_on_both(
    fleet: Fleet, cluster: LocalCluster, trails: Path
) -> None:
    assert sorted(name[:8] for name in fleet.state.free) == sorted(h[:8] for h in cluster.hosts)
    results = list(fleet.map((f"print({n})\n{n} * 7" for n in range(60)), at_once=8))
    assert [each.value for each in results] == [n * 7 for n in range(60)]
    assert [each.stdout for each in results] == [f"{n}\n" for n in range(60)]
    assert min(len(begun(path)) for path in trails.iterdir()) > 5


def test_arguments_and_failures_of_programs_are_those_of_a_sandbox(fleet: Fleet) -> None:
    result = fleet.execute(
        "import sys; open('out', 'w').write(sys.stdin.read() + open('in').read())\nnumber + 1",
        stdin="a", files={"in": b"b"}, inputs={"number": 1}, collect=["out"],
    )  # fmt: skip
    assert (result.value, result.artifacts[0].data) == (2, b"ab")
    assert fleet.execute("1/0").reason == "exception"
    assert fleet.execute("open('/etc/shadow')").violations
    assert fleet.execute("while True: pass", timeout=0.5).reason == "wall_time"
    with pytest.raises(PolicyError, match="timeout"):
        fleet.execute("1", timeout=10_000)
    with fleet.session() as session, pytest.raises(PolicyError, match="on_output: not available"):
        session.execute("1", on_output=print)


def test_a_call_with_the_key_of_an_earlier_one_returns_its_outcome(fleet: Fleet) -> None:
    code = "import random; random.random()"
    first, again, other = (fleet.execute(code, key=key) for key in ("a", "a", "b"))
    assert (first.value, first.execution_id) == (again.value, again.execution_id)
    assert other.execution_id != first.execution_id
    with pytest.raises(PolicyError, match="other arguments"):
        fleet.execute("1", key="a")
    assert fleet.execute(code, key="a", tenant="small").execution_id != first.execution_id


def test_two_calls_with_one_key_at_once_run_once(fleet: Fleet) -> None:
    with ThreadPoolExecutor(8) as threads:
        calls = [
            threads.submit(fleet.execute, "import os; os.urandom(8)", key="c") for _ in "12345678"
        ]
    assert len({each.result().execution_id for each in calls}) == 1


def test_a_session_stays_on_its_node_with_variables_files_and_commands(fleet: Fleet) -> None:
    with fleet.session() as session, fleet.session("bash") as other:
        session.execute("x = 20")
        session.upload("notes.txt", b"hello")
        assert session.execute("x + 1").value == 21
        assert session.run(["cat", "notes.txt"]).stdout == "hello"
        assert session.download("notes.txt") == b"hello"
        branch = session.fork()
        assert branch.execute("x").value == 20
        branch.close()
        other.execute("kept=7")
        assert other.execute("echo $kept").stdout == "7\n"
        for refused in (session.terminal, functools.partial(session.expose, 8000)):
            with pytest.raises(PolicyError, match="not available in a fleet"):
                refused()


def test_limits_of_a_tenant_are_its_own(fleet: Fleet) -> None:
    small = functools.partial(fleet.execute, "import time; time.sleep(1)", tenant="small")
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(small) for _ in range(2)]
        errors = [each.exception() for each in both]
    assert sorted(map(repr, map(type, errors))) == sorted(map(repr, (type(None), QuotaExceeded)))
    assert fleet.execute("1").ok
    with fleet.session(tenant="small") as session:
        for another in (functools.partial(fleet.session, tenant="small"), session.fork):
            with pytest.raises(QuotaExceeded, match="at most 1 sessions"):
                another()
    with pytest.raises(PolicyError, match="tenant: unknown: 'nobody'"):
        fleet.execute("1", tenant="nobody")


def test_no_process_that_schedules_is_on_the_path_of_a_call(
    fleet: Fleet, cluster: LocalCluster
) -> None:
    """All of them are stopped while programs run."""
    stopped = cluster.scheduler()
    assert len(stopped) == 3
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        values = [each.value for each in fleet.map(str(number) for number in range(40))]
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert values == list(range(40))


def test_nothing_of_a_call_is_unpickled_in_this_process(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        before = getattr(SerializationContext, name)

        def count(self: SerializationContext, *given: Any) -> Any:
            seen.append(name)
            return before(self, *given)

        return count

    for name in ("_deserialize_pickle5_data", "_deserialize_msgpack_data"):
        monkeypatch.setattr(SerializationContext, name, counted(name))
    hostile = "class A:\n    def __reduce__(self): return print, ('unpickled',)\nprint('x'); A()"
    assert fleet.execute(hostile).ok
    assert fleet.execute("1/0").error
    with pytest.raises(PolicyError):
        fleet.session("cobol")
    assert seen == []
    ray.get(ray.remote(lambda: {"a": 1}).remote())  # imitates such a value
    assert seen


def test_cells_have_no_route_to_the_ports_of_ray(fleet: Fleet, cluster: LocalCluster) -> None:
    """The host reaches each of them; a cell on the same host none, though its policy has a loopback."""
    ports = sorted(
        each.laddr.port
        for host in cluster.hosts
        for pid in (*cluster.processes(host), *cluster.scheduler())
        for each in _listening(pid)
    )
    assert len(set(ports)) > 5
    for port in ports:
        socket.create_connection(("127.0.0.1", port), 5).close()
    sockets = [str(path) for path in Path(cluster.directory).rglob("sockets/*")]
    assert sockets
    code = (
        "import os, socket\nfound = []\n"
        "for port in ports:\n"
        "    for host in ('127.0.0.1', '::1', '::ffff:127.0.0.1'):\n"
        "        try: socket.create_connection((host, port), 1); found.append((host, port))\n"
        "        except OSError: pass\n"
        "found + [path for path in sockets if os.path.exists(path)]"
    )
    given = {"ports": sorted(set(ports)), "sockets": sockets}
    assert fleet.execute(code, inputs=given).value == []


def _listening(pid: int) -> list[Any]:
    try:
        process = psutil.Process(pid)
        return [each for each in process.net_connections("tcp") if each.status == "LISTEN"]
    except psutil.Error:  # it has ended
        return []


def test_a_node_that_cannot_make_cells_says_why(cluster: LocalCluster) -> None:
    with pytest.raises(Unenforceable, match="/nowhere"):
        Fleet.on_ray(cgroup_root="/nowhere", slots=1)
    with pytest.raises(PolicyError, match="no node of the cluster"):
        Fleet.on_ray(resource="gpu")


def test_the_fleet_is_counted_for_prometheus(fleet: Fleet) -> None:
    text = fleet.metrics_text()
    for line in (
        'cellwright_fleet_nodes{state="alive"} 2.0',
        'cellwright_requests_total{kind="fleet_execute",outcome="ok"}',
        'cellwright_requests_refused_total{limit="sessions",tenant="small"} 1.0',
        "cellwright_fleet_waiting 0.0",
    ):
        assert line in text
    assert f"{sorted(fleet.state.free)[0]}" in text


def begun(trail: Path) -> Counter[str]:
    """Return how often each program began, by its trace id, as the trail of a node has it."""
    entries = map(json.loads, trail.read_text().splitlines())
    return Counter(
        each["trace_id"] for each in entries
        if each["category"] == "execution" and each["action"] == "start"
    )  # fmt: skip


def test_a_node_is_killed_among_many_programs_and_each_has_one_right_outcome(
    fleet: Fleet, cluster: LocalCluster, trails: Path
) -> None:
    """Each runs at most once on all nodes together; only those that the lost node had are unknown."""
    lost = next(name for name in fleet.state.free if cluster.hosts[1].startswith(name[:8]))
    sessions = [fleet.session() for _ in range(8)]
    on_lost = [each for each in sessions if each.node == lost]
    stays = [each for each in sessions if each.node != lost]
    assert on_lost
    assert stays
    for each in sessions:
        each.execute("x = 5")

    def run(number: int) -> SandboxResult | OutcomeUnknown:
        try:
            return fleet.execute(f"{number} * 7", key=f"k{number}", trace_id=f"t{number}")
        except OutcomeUnknown as error:
            return error

    outcomes: dict[int, SandboxResult | OutcomeUnknown] = {}
    with ThreadPoolExecutor(2 * SLOTS) as threads:
        for number, outcome in enumerate(threads.map(run, range(PROGRAMS))):
            assert number not in outcomes
            outcomes[number] = outcome
            if number == PROGRAMS // 2:
                cluster.kill(cluster.hosts[1])
    unknown = {n: each for n, each in outcomes.items() if isinstance(each, OutcomeUnknown)}
    assert len(outcomes) == PROGRAMS
    assert len(unknown) <= SLOTS
    assert {each.node for each in unknown.values()} <= {lost}
    for number, each in outcomes.items():
        assert isinstance(each, OutcomeUnknown) or each.value == number * 7
    times = sum((begun(path) for path in trails.iterdir()), Counter[str]())
    assert {name: count for name, count in times.items() if name and count > 1} == {}
    assert {f"t{n}" for n in outcomes} - set(unknown_names(unknown)) <= set(times)
    assert fleet.state.lost == (lost,)

    for number in unknown:  # a retry says the same, and runs nothing
        with pytest.raises(OutcomeUnknown):
            fleet.execute(f"{number} * 7", key=f"k{number}", trace_id=f"t{number}")
    for each in on_lost:
        with pytest.raises(SessionNodeLost, match=lost):
            each.execute("x")
        assert lost in each.lost
        each.close()
    for each in stays:
        assert each.execute("x").value == 5
        each.close()
    assert 'cellwright_fleet_nodes{state="lost"} 1.0' in fleet.metrics_text()
    assert fleet.execute("6 * 7").value == 42


def unknown_names(unknown: dict[int, OutcomeUnknown]) -> list[str]:
    return [f"t{number}" for number in unknown]
