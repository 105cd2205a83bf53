"""`cellwright web` and `cellwright mcp` with the operators' options."""

import os
import socket
from pathlib import Path

import anyio
import httpx2
import pytest

from cellwright.harness.servers.measurements import Measurements
from cellwright.harness.servers.request_log import App, Message, RequestsMiddleware, Scope
from tests.conftest import soon
from tests.harness.servers.mcp.servers import BOUND_SECONDS, over_http
from tests.harness.servers.operations.test_measurements import Samples, samples
from tests.harness.servers.operations.test_request_log import lines
from tests.harness.servers.web.test_command import started

REQUESTS = "cellwright_requests_total{{kind={},outcome={}}}"


def scrape(place: Path, path: str = "/metrics") -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(os.fspath(place))
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        told = b""
        while piece := sock.recv(65536):
            told += piece
    head, _, body = told.partition(b"\r\n\r\n")
    assert b" 200 " in head
    return body


def read(place: Path) -> Samples:
    return samples(scrape(place))


@pytest.mark.needs("userns")
def test_the_web_server_counts_and_logs_its_requests(tmp_path: Path) -> None:
    place, log = tmp_path / "m", tmp_path / "log"
    with started("--metrics", str(place), "--request-log", str(log)) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        url = f"{server.url}/v1/executions"
        httpx2.post(url, json={"code": "1"}, timeout=60)
        body = {"code": "open('/etc/shadow')"}
        httpx2.post(url, json=body, headers=headers, timeout=BOUND_SECONDS)
        assert scrape(place, "/healthz") == b"ok\n"
        assert scrape(place, "/readyz") == b"ready\n"
        assert soon(lambda: read(place).get(REQUESTS.format("web POST", 200)) == 1)
        found = read(place)
    assert found[REQUESTS.format("web POST", 401)] == 1
    assert found["cellwright_executions_total{outcome=error,policy=strict}"] == 1
    assert found["cellwright_refusals_total{layer=mount_ns,policy=strict}"] == 1
    assert found["cellwright_pool_cells{policy=strict,state=wanted}"] > 0
    refused, answered = lines(log)
    assert (refused["client"], refused["outcome"]) == (None, "401")
    assert (answered["client"], answered["outcome"]) == ("client", "200")
    assert answered["path"] == "/v1/executions"
    assert not place.exists()


@pytest.mark.needs("userns")
def test_the_mcp_server_counts_and_logs_its_requests(tmp_path: Path) -> None:
    place, log = tmp_path / "m", tmp_path / "log"
    with over_http("--metrics", str(place), "--request-log", str(log)) as server:
        assert httpx2.post(server.url, json={}, timeout=60).status_code == 401
        assert soon(lambda: read(place).get(REQUESTS.format("mcp POST", 401)) == 1)
    assert [each["outcome"] for each in lines(log)] == ["401"]


def test_an_answer_that_does_not_come_to_its_end_is_noted() -> None:
    async def fail(scope: Scope, receive: object, send: object) -> None:
        raise OSError("gone")

    measurements = Measurements()
    app = RequestsMiddleware(fail, "web", measurements, None, "client")
    with pytest.raises(OSError, match="gone"):
        anyio.run(_ask, app, "BREW")
    (counted,) = [
        series for family, series in measurements.counters() if family.name == "cellwright_requests"
    ]
    assert counted == {("web other", "unfinished"): 1}


async def _ask(app: App, method: str) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    await app({"type": "http", "method": method, "path": "/"}, receive, send)
