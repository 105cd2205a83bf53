"""Counters and gauges, as Prometheus's own parser reads them, and their number."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cellwright import AuditLog, Sandbox, SandboxStatus, SessionSettings
from cellwright.harness.servers.health import Readiness
from cellwright.harness.servers.measurements import (
    MOST_SERIES,
    POOL_CELLS,
    REQUESTS,
    Measurements,
    Reading,
    readings_of,
)
from cellwright.harness.servers.prometheus import PrometheusText
from cellwright.harness.servers.request_log import OperatorsPages
from tests.conftest import policy_named, soon
from tests.network import NAME, count_bytes, policy, resolving, serving, tcp

pytestmark = pytest.mark.needs("userns")
Samples = dict[str, float]


def samples(text: bytes) -> Samples:
    """Return what a scrape says, by name and labels as they are usually written."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for each in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(each.labels.items()))
            key = f"{each.name}{{{labels}}}"
            assert key not in found, "a series that is there twice"
            found[key] = each.value
    return found


@pytest.fixture(scope="module")
def scraped() -> Iterator[Samples]:
    """A scrape after programs of every kind have ended, and a session lives."""
    measurements = Measurements(["strict"])
    log = AuditLog(max_entries=0, on_entry=measurements)
    with Sandbox(policy=policy_named("strict"), pool=1, audit=log) as sandbox:
        measurements.add_gauges(lambda: readings_of("strict", sandbox._state()))
        sandbox.settle()
        assert sandbox.execute("1").pool_hit
        assert not sandbox.execute("open('/etc/shadow')").ok
        sandbox.execute("while True: pass", timeout=0.2)
        sandbox.execute("while True: print('x' * 4096)")
        sandbox.execute("1 +")
        session = sandbox.session()
        session.execute("1")
        yield samples(PrometheusText(measurements).render())


@pytest.mark.parametrize(
    ("series", "least"),
    [
        ("cellwright_executions_total{outcome=ok,policy=strict}", 2),
        ("cellwright_executions_total{outcome=error,policy=strict}", 2),
        ("cellwright_executions_total{outcome=timeout,policy=strict}", 1),
        ("cellwright_executions_total{outcome=killed,policy=strict}", 1),
        ("cellwright_pool_leases_total{policy=strict,result=hit}", 1),
        ("cellwright_refusals_total{layer=mount_ns,policy=strict}", 1),
        ("cellwright_caps_hit_total{cap=wall_time,policy=strict}", 1),
        ("cellwright_caps_hit_total{cap=output,policy=strict}", 1),
        ("cellwright_program_cpu_seconds_total{policy=strict}", 0.1),
        ("cellwright_session_events_total{event=opened,policy=strict}", 1),
        ("cellwright_phase_seconds_sum{phase=run}", 0.2),
        ("cellwright_phase_seconds_count{phase=lease}", 6),
        ("cellwright_phase_seconds_bucket{le=+Inf,phase=run}", 6),
        ("cellwright_sessions{policy=strict,state=thawed}", 1),
        ("cellwright_pool_cells{policy=strict,state=wanted}", 1),
        ("cellwright_cgroup_memory_bytes{policy=strict}", 1),
        ("process_open_fds{}", 1),
    ],
)
def test_every_series_is_moved_by_what_it_counts(
    scraped: Samples, series: str, least: float
) -> None:
    assert scraped[series] >= least


def test_calls_of_tools_connections_and_refused_programs_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def double(n: int) -> int:
        return 2 * n

    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    measurements = Measurements(["network"])
    log = AuditLog(max_entries=0, on_entry=measurements)
    with serving(count_bytes) as server:
        allowed = policy(tcp(server.port))
        with Sandbox(policy=allowed, pool=0, audit=log, tools=[double]) as sandbox:
            code = (
                "import socket, tools\n"
                f"with socket.create_connection(({NAME!r}, {server.port})) as sock:\n"
                "    sock.sendall(b'12345'); sock.shutdown(1); sock.recv(9)\n"
                "tools.double(n=2)"
            )
            assert sandbox.execute(code).value == 4
            assert sandbox.execute("\0").status is SandboxStatus.REJECTED
    read = samples(PrometheusText(measurements).render())
    assert read["cellwright_tool_events_total{event=call}"] == 1
    assert read["cellwright_programs_rejected_total{policy=network}"] == 1
    connections = [each for name, each in read.items() if "network_connections_total" in name]
    assert connections == [1]


def test_a_session_counts_neither_as_hit_nor_as_miss(scraped: Samples) -> None:
    leases = {name: each for name, each in scraped.items() if "pool_leases" in name}
    assert sum(leases.values()) == 5  # leases of calls outside the session


def test_the_gauges_of_calls_and_of_frozen_sessions_move() -> None:
    settings = SessionSettings(freeze_seconds=0.05)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        run = sandbox.start("while True: pass")
        try:
            assert soon(lambda: sandbox._state().supervisors[0].running == 1)
        finally:
            run.cancel()
            run.result()
        assert sandbox._state().supervisors[0].running == 0
        sandbox.session().execute("1")
        assert soon(lambda: sandbox._state().frozen == 1)


def test_the_end_of_a_histogram_is_its_count() -> None:
    measurements = Measurements()
    for seconds in (0.0005, 0.3, 4000.0):
        measurements.note_request("Execute", "ok", seconds)
    read = samples(PrometheusText(measurements).render())
    assert read["cellwright_request_seconds_bucket{kind=Execute,le=0.001}"] == 1
    assert read["cellwright_request_seconds_bucket{kind=Execute,le=0.5}"] == 2
    assert read["cellwright_request_seconds_bucket{kind=Execute,le=+Inf}"] == 3
    assert read["cellwright_request_seconds_count{kind=Execute}"] == 3


# names that somebody else chose

HOSTILE = ('x"} 1\nevil 2', "a\\", "\x1b[2J", "n" * 100_000, "ü", "", '{policy="strict"}')


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_the_operator_did_not_give_is_no_label(name: str) -> None:
    measurements = Measurements(["strict"], ["ci"])
    log = AuditLog(max_entries=0, on_entry=measurements)
    log.record("policy", "compiled", target=name, sandbox_id="1")
    log.record("execution", name, sandbox_id="1", reason=name)
    log.record("violation", name, sandbox_id="1", rule=f"{name}: x")
    log.record("tool", name, target=name)
    log.record("session", name, sandbox_id=name)
    log.record("network", "connection", sandbox_id=name, outcome=name)
    measurements.note_refusal(name, "calls")
    text = PrometheusText(measurements).render()
    assert len(text) < 30_000
    read = samples(text)
    assert read["cellwright_executions_total{outcome=other,policy=other}"] == 1
    assert read["cellwright_refusals_total{layer=other,policy=other}"] == 1
    assert read["cellwright_requests_refused_total{limit=calls,tenant=other}"] == 1
    assert not any("evil" in series for series in read)


def test_the_number_of_series_is_bounded_whatever_is_counted() -> None:
    measurements = Measurements()
    for number in range(MOST_SERIES + 100):
        measurements.count(REQUESTS, f"kind {number}", "ok")
        measurements.note_request(f"kind {number}", "ok", 0.1)
    measurements.add_gauges(
        lambda: (Reading(POOL_CELLS, (str(number), "ready"), 1.0) for number in range(5000))
    )
    read = samples(PrometheusText(measurements).render())
    counted = {name: each for name, each in read.items() if "requests_total" in name}
    assert len(counted) == MOST_SERIES + 1
    assert sum(counted.values()) == 2 * (MOST_SERIES + 100)
    assert len([name for name in read if "pool_cells" in name]) == MOST_SERIES


def test_sandboxes_are_forgotten_when_there_are_many() -> None:
    measurements = Measurements(["strict"])
    log = AuditLog(max_entries=0, on_entry=measurements)
    for number in range(3000):
        log.record("policy", "compiled", target="strict", sandbox_id=str(number))
    assert len(measurements._policy_of) == 1000


# the pages


def test_the_pages_say_what_the_server_says() -> None:
    reasons = [""]
    well = [True]
    readiness = Readiness(not_ready=lambda: reasons[0])
    pages = OperatorsPages(Measurements(), readiness, lambda: well[0])
    assert pages.answer("/healthz")[::2] == (200, b"ok\n")
    assert pages.answer("/readyz")[::2] == (200, b"ready\n")
    reasons[0], well[0] = "draining", False
    assert pages.answer("/healthz").status == 503
    assert pages.answer("/readyz")[::2] == (503, b"draining\n")
    assert pages.answer("/metrics").status == 200
    assert pages.answer("/metrics/..").status == 404


def test_a_flood_of_scrapes_costs_one() -> None:
    asked: list[int] = []
    measurements = Measurements()

    def read() -> Iterator[Reading]:
        asked.append(1)
        return iter(())

    measurements.add_gauges(read)
    pages = OperatorsPages(measurements)
    for _ in range(100):
        pages.answer("/metrics")
    assert len(asked) < 5  # one a second
