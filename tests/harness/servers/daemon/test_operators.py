"""Operators of a daemon: its gauges, its status, and its readiness while it drains."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import CellwrightError, LaunchError
from cellwright.errors import QuotaExceeded
from tests.conftest import ROOT, soon
from tests.harness.servers.daemon.configured import ConfiguredDaemon, configured
from tests.harness.servers.daemon.daemons import RawClient

pytestmark = pytest.mark.needs("userns")


def status(daemon: ConfiguredDaemon, *more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cellwright", "status", "--socket", str(daemon.path), *more],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfiguredDaemon]:
    folder = Path(tmp_path_factory.mktemp("operators"))
    user = os.geteuid()
    text = f"""
    socket_group = {os.getegid()}
    request_log = "requests.jsonl"
    [sessions]
    freeze_seconds = 0.1
    [[tenants]]
    name = "ci"
    users = [{user}]
    calls = 1
    queue = 1
    queue_seconds = 60
    sessions = 2
    """
    with configured(folder, text) as daemon:
        yield daemon


def test_each_gauge_and_counter_of_the_daemon_moves(daemon: ConfiguredDaemon) -> None:
    with daemon.sandbox() as sandbox, contextlib.ExitStack() as open_sessions:
        assert daemon.sees("cellwright_pool_cells{policy=strict,state=ready}", 1)
        runs = [sandbox.start("print('up', flush=True); import time; time.sleep(60)")]
        assert next(runs[0].output()) == ("stdout", b"up\n")
        assert daemon.sees("cellwright_calls{policy=strict,state=running}", 1)
        assert daemon.sees("cellwright_tenant_calls{state=running,tenant=ci}", 1)
        runs.append(sandbox.start("1"))
        assert daemon.sees("cellwright_tenant_calls{state=waiting,tenant=ci}", 1)
        assert daemon.sees("cellwright_requests_running{}", 2)
        assert daemon.scrape()["cellwright_connections{}"] >= 2
        with pytest.raises(QuotaExceeded, match="1 run and 1 wait") as caught:
            sandbox.execute("1")
        assert caught.value.limit == "queue"
        assert daemon.sees("cellwright_requests_refused_total{limit=queue,tenant=ci}", 1)
        for run in reversed(runs):
            run.cancel()
            run.result()
        assert daemon.sees("cellwright_tenant_calls{state=running,tenant=ci}", 0)
        for _ in range(2):
            open_sessions.enter_context(sandbox.session()).execute("1")
        assert daemon.sees("cellwright_tenant_sessions{tenant=ci}", 2)
        assert daemon.sees("cellwright_sessions{policy=strict,state=frozen}", 2)
        with pytest.raises(QuotaExceeded, match="at most 2 sessions"):
            sandbox.session()
        open_sessions.close()
        assert daemon.sees("cellwright_tenant_sessions{tenant=ci}", 0)
    read = daemon.scrape()
    assert read["cellwright_cgroup_cpu_seconds{policy=strict}"] > 0
    assert read["cellwright_requests_total{kind=Execute,outcome=ok}"] >= 3
    assert read["cellwright_requests_total{kind=Execute,outcome=QuotaExceeded}"] == 1
    assert read["cellwright_request_seconds_count{kind=OpenSession}"] >= 2


def test_status_tells_people_and_programs(daemon: ConfiguredDaemon) -> None:
    with daemon.sandbox() as sandbox, sandbox.session("mine") as session:
        session.execute("1")
        told = json.loads(status(daemon, "--json"))
        assert told["pid"] == daemon.pid
        assert told["configuration"] == str(daemon.file)
        (policy,), (tenant,) = told["policies"], told["tenants"]
        assert (policy["name"], policy["sessions"]) == ("strict", 1)
        assert (tenant["name"], tenant["most_calls"], tenant["sessions"]) == ("ci", 1, 1)
        text = status(daemon)
        assert f"process {daemon.pid}, up 00:0" in text
        assert "strict " in text
        assert " 1/2 " in text


def test_a_request_is_a_line_of_the_log(daemon: ConfiguredDaemon) -> None:
    log = daemon.file.parent / "requests.jsonl"
    with daemon.sandbox() as sandbox:
        result = sandbox.execute("1", trace_id='x"\n{}')
    # It is written after the reply was sent.
    assert soon(lambda: result.execution_id in log.read_text())
    (line,) = [each for each in log.read_text().splitlines() if result.execution_id in each]
    told = json.loads(line)
    assert (told["request"], told["outcome"], told["status"]) == ("Execute", "ok", "completed")
    assert (told["tenant"], told["uid"], told["pid"]) == ("ci", os.geteuid(), os.getpid())
    assert told["policy"] == "strict"
    assert told["trace"] == 'x"\\n{}'


def test_clients_that_are_refused_are_counted_and_logged(daemon: ConfiguredDaemon) -> None:
    before = daemon.scrape().get(
        "cellwright_requests_refused_total{limit=invalid frame,tenant=ci}", 0
    )
    with RawClient(daemon.path, greets=False) as client:
        client.socket.send(b"no frame")
        client.hear_all()
    assert daemon.sees(
        "cellwright_requests_refused_total{limit=invalid frame,tenant=ci}", before + 1
    )
    log = (daemon.file.parent / "requests.jsonl").read_text()
    assert '"request":"refused"' in log


def test_health_is_that_of_the_event_loop(daemon: ConfiguredDaemon) -> None:
    assert daemon.ask("/healthz") == (200, b"ok\n")
    assert daemon.ask("/readyz") == (200, b"ready\n")
    assert daemon.ask("/")[0] == 404


def test_status_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run(
            [sys.executable, "-m", "cellwright", "status", "--socket", f"{tmp_path}/none"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    assert caught.value.returncode == 70
    assert "cellwright serve" in caught.value.stderr


# drain


def test_a_daemon_that_drains_says_so_and_loses_nothing(tmp_path: Path) -> None:
    with configured(tmp_path) as daemon, contextlib.ExitStack() as clients:
        sandboxes = [clients.enter_context(daemon.sandbox()) for _ in range(6)]
        slow = "import time; print('up', flush=True); time.sleep(1.5); 42"
        runs = [sandbox.start(slow) for sandbox in sandboxes]
        for run in runs:
            assert next(run.output()) == ("stdout", b"up\n")
        daemon.process.send_signal(signal.SIGTERM)
        assert soon(lambda: daemon.ask("/readyz") == (503, b"draining\n"))
        assert daemon.scrape()["cellwright_draining{}"] == 1
        with pytest.raises(CellwrightError):
            daemon.sandbox()
        assert [run.result().value for run in runs] == [42] * 6
        assert daemon.wait() == 0
    assert not (tmp_path / "m").exists()
    assert not (tmp_path / "s").exists()


def test_requests_that_were_sent_before_the_drain_are_answered(tmp_path: Path) -> None:
    """Each client that got no error before has a result; of the others nothing ran."""
    results: list[object] = []
    errors: list[BaseException] = []

    def call(daemon: ConfiguredDaemon) -> None:
        try:
            with daemon.sandbox() as sandbox:
                while True:
                    results.append(sandbox.execute("6 * 7").value)
        except LaunchError as error:
            errors.append(error)
        except CellwrightError as error:
            errors.append(error)

    with configured(tmp_path) as daemon:
        threads = [threading.Thread(target=call, args=(daemon,)) for _ in range(4)]
        for each in threads:
            each.start()
        assert soon(lambda: len(results) > 20)
        assert daemon.end() == 0
        for each in threads:
            each.join(60)
    assert set(results) == {42}
    assert len(errors) == 4
