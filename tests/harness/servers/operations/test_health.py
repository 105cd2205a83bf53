"""Health for load balancers: pages without a token, whose cells are few however many clients ask."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cellwright import LaunchError
from cellwright.harness.servers.health import HealthPages, Readiness
from cellwright.harness.servers.operators_endpoint import OperatorsEndpoint
from tests.conftest import OPTIONAL, ROOT, soon
from tests.harness.servers.daemon.configured import ConfiguredDaemon, configured
from tests.harness.servers.operations.test_endpoint import Place, waiting
from tests.harness.servers.web.test_command import started

LONG = 3600.0  # seconds that no test takes


class Cells:
    """A probe that counts its calls, and fails or waits as the test says."""

    def __init__(self) -> None:
        self.tries = 0
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> None:
        self.tries += 1
        assert self.may_end.wait(300)
        if self.error:
            raise self.error


@pytest.fixture
def cells() -> Iterator[Cells]:
    cells = Cells()
    yield cells
    cells.may_end.set()


def readiness(cells: Cells, budget: float = LONG, fresh: float = LONG) -> Readiness:
    return Readiness(cells, budget_seconds=budget, fresh_seconds=fresh)


def test_many_that_ask_at_once_and_soon_after_try_one_cell(cells: Cells) -> None:
    cells.may_end.clear()
    ready = readiness(cells)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(ready.why_not())) for _ in range(50)]
    for each in threads:
        each.start()
    cells.may_end.set()
    for each in threads:
        each.join(300)
    assert [*answers, ready.why_not()] == [""] * 51
    assert cells.tries == 1


def test_each_answer_that_is_not_fresh_tries_another_cell(cells: Cells) -> None:
    ready = readiness(cells, fresh=0)
    assert [ready.why_not() for _ in range(3)] == [""] * 3
    assert cells.tries == 3


def test_a_failure_is_kept_as_long_and_reported_once(
    cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.error = LaunchError("no memory \x1b[2J")
    kept = readiness(cells)
    assert [kept.why_not(), kept.why_not()] == ["no cell"] * 2
    assert cells.tries == 1
    ready = readiness(cells, fresh=0)
    assert [ready.why_not(), ready.why_not()] == ["no cell"] * 2
    cells.error = None
    assert ready.why_not() == ""
    assert soon(lambda: not [e for e in threading.enumerate() if e.name == "cellwright-ready"])
    assert capsys.readouterr().err.splitlines() == [
        "cellwright: not ready: no memory \\x1b[2J",
        "cellwright: not ready: no memory \\x1b[2J",
        "cellwright: ready again",
    ]


def test_a_cell_that_takes_too_long_holds_neither_clients_nor_threads(cells: Cells) -> None:
    cells.may_end.clear()
    ready = readiness(cells, budget=0.01, fresh=0)
    assert [ready.why_not() for _ in range(20)] == ["no cell"] * 20
    assert cells.tries == 1
    cells.may_end.set()
    patient = readiness(cells)
    assert patient.why_not() == ""
    assert soon(lambda: ready.why_not() == "")


# over HTTP


@contextlib.contextmanager
def served(cells: Cells, seconds: float = LONG, fresh: float = LONG) -> Iterator[Place]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    pages = HealthPages(readiness(cells, fresh=fresh))
    endpoint = OperatorsEndpoint(listener, pages, waiting(seconds))
    with contextlib.closing(endpoint):
        yield Place(listener, endpoint)


def ask(path: str, host: str = "Host: any.example\r\n", version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\n{host}\r\n".encode()


@pytest.mark.parametrize(
    "request_",
    [
        ask("/readyz"),
        ask("/readyz?x=1"),
        ask("/readyz", host="", version="1.0"),  # as HAProxy checks by default
        ask("/readyz").replace(b"GET", b"HEAD"),
    ],
)
def test_a_load_balancer_is_answered_whatever_it_calls_this_host(
    cells: Cells, request_: bytes
) -> None:
    with served(cells) as place:
        answer = place.say(request_)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (
        b"connection: close\r\n" in answer.lower()
    )  # no check meets a connection whose time is over


def test_nothing_else_is_told(cells: Cells) -> None:
    cells.error = LaunchError("a name of this host")
    with served(cells) as place:
        answers = [place.say(ask(path)) for path in ("/healthz", "/readyz", "/metrics", "/", "/v1")]
    assert [answer.split(b" ")[1] for answer in answers] == [b"200", b"503", *[b"404"] * 3]
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        names = {line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]}
        assert names <= {
            b"date", b"content-type", b"content-length", b"connection", b"cache-control",
            b"x-content-type-options",
        }  # fmt: skip
        assert body in (b"ok\n", b"no cell\n", b"not found: one of /healthz /readyz\n")


def test_slow_clients_and_floods_leave_a_turn_to_others(cells: Cells) -> None:
    with served(cells) as place, contextlib.ExitStack() as slow:
        for number in range(300):
            sock = slow.enter_context(place.connect())
            sock.sendall(ask("/readyz")[: 1 + number % 20])
        assert b"200 OK" in place.say(ask("/readyz"))
        answers = [place.say(ask("/readyz")) for _ in range(100)]
    assert all(b"200 OK" in answer for answer in answers)
    assert cells.tries == 1


def test_clients_that_ask_and_leave_hold_no_threads(cells: Cells) -> None:
    """While a cell is tried, each of many clients without a token would hold a thread of the server."""
    cells.may_end.clear()
    with served(cells) as place:
        others = threading.active_count()
        for _ in range(200):
            with place.connect() as sock:
                sock.sendall(ask("/readyz"))
        assert b"200 OK" in place.say(ask("/healthz"))
        assert threading.active_count() - others < 10
        cells.may_end.set()
        assert b"200 OK" in place.say(ask("/readyz"))
    assert cells.tries == 1


# the servers


def health(url: str, *more: str) -> tuple[int, str]:
    """Ask as curl does, which reports the status and prints the body."""
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "120", "-w", "%{http_code}", *more, url],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfiguredDaemon]:
    folder = Path(tmp_path_factory.mktemp("health"))
    with configured(folder, f'health = "127.0.0.1:{free_port()}"\naudit = "trail"\n') as daemon:
        yield daemon


def _url(daemon: ConfiguredDaemon) -> str:
    (line,) = [each for each in daemon.file.read_text().splitlines() if "health" in each]
    return "http://" + line.split('"')[1]


@pytest.mark.needs("userns", "curl")
def test_a_daemon_runs_a_program_and_records_nothing(daemon: ConfiguredDaemon) -> None:
    assert health(_url(daemon) + "/healthz") == (200, "ok")
    assert health(_url(daemon) + "/readyz") == (200, "ready")
    assert daemon.ask("/readyz") == (200, b"ready\n")  # beside the metrics: the same
    assert health(_url(daemon) + "/metrics")[0] == 404
    trail = (daemon.file.parent / "trail").read_text()
    assert '"execution"' not in trail
    assert "cellwright_executions_total{outcome=ok,policy=strict}" not in daemon.scrape()
    with daemon.sandbox() as sandbox:
        sandbox.execute("1")
    assert '"execution"' in (daemon.file.parent / "trail").read_text()


@pytest.mark.needs("userns", "curl")
def test_a_daemon_whose_cells_cannot_be_made_is_alive_and_not_ready(
    daemon: ConfiguredDaemon,
) -> None:
    launchers = psutil.Process(daemon.pid).children(recursive=True)
    try:
        for each in launchers:
            each.send_signal(signal.SIGSTOP)
        assert soon(lambda: health(_url(daemon) + "/readyz") == (503, "no cell"))
        assert health(_url(daemon) + "/healthz") == (200, "ok")
    finally:
        for each in launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)
    assert soon(lambda: health(_url(daemon) + "/readyz") == (200, "ready"))


@pytest.mark.needs("userns", "curl")
def test_a_daemon_that_drains_is_alive_and_not_ready(tmp_path: Path) -> None:
    with configured(tmp_path, 'health = "./h"\n') as daemon, daemon.sandbox() as sandbox:
        run = sandbox.start("import time; print('up', flush=True); time.sleep(60)")
        assert next(run.output()) == ("stdout", b"up\n")
        daemon.process.send_signal(signal.SIGTERM)
        at = ("--unix-socket", f"{tmp_path}/h")
        assert soon(lambda: health("http://lb/readyz", *at) == (503, "draining"))
        assert health("http://lb/healthz", *at) == (200, "ok")
        run.cancel()
        run.result()
        assert daemon.wait() == 0
    assert not (tmp_path / "h").exists()


@pytest.mark.needs("userns", "curl")
def test_the_web_server_has_a_listener_of_its_own() -> None:
    with started("--health", f"127.0.0.1:{(port := free_port())}") as server:
        assert health(f"http://127.0.0.1:{port}/healthz") == (200, "ok")
        assert health(f"http://127.0.0.1:{port}/readyz") == (200, "ready")
        with pytest.raises(urllib.error.HTTPError, match="40"):
            urllib.request.urlopen(f"{server.url}/readyz", timeout=60)


@pytest.mark.needs("userns", "curl")
@pytest.mark.parametrize("command", ["e2b", "judge", "mcp"])
def test_each_server_runs_a_program(command: str, tmp_path: Path) -> None:
    place = tmp_path / "h"
    words = [sys.executable, "-m", "cellwright", command, "--health", str(place)]
    words += [f"--optional={each}" for each in OPTIONAL]
    with subprocess.Popen(
        [*words, "--http", "127.0.0.1:0"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        try:
            assert soon(place.exists)
            assert soon(lambda: server.poll() is None and _is_ready(place))
        finally:
            server.terminate()
    assert not place.exists()


def _is_ready(place: Path) -> bool:
    return health("http://lb/readyz", "--unix-socket", str(place)) == (200, "ready")
