"""Signed URLs, bodies and streams that try to get more than they are for."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import socket
import time
import urllib.parse
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.responses import StreamingResponse

from cellwright import NetworkRule, Policy, PolicyError, Sandbox
from cellwright.harness.servers.e2b import ports
from cellwright.harness.servers.e2b.control_messages import E2bNetwork, change
from cellwright.policies.policy import Network
from tests.harness.servers.e2b.e2b_server import Client, E2bServer

pytestmark = pytest.mark.needs("cgroup")
_FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="one"\r\n\r\n1\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="two"\r\n\r\n2\r\n--x--\r\n'
)


def _signed(made: dict[str, str], operation: str, **changed: str) -> str:
    """Return the query of a signed URL of the file `a.txt`."""
    text = f"a.txt:{operation}:user:{made['envdAccessToken']}"
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    given = {"path": "a.txt", "username": "user", "signature": f"v1_{digest}", **changed}
    return urllib.parse.urlencode(given)


def _ask(client: Client, made: dict[str, str], method: str, path: str, **given: Any) -> int:
    given = {"E2b_Sandbox_Id": made["sandboxID"], "E2b_Sandbox_Port": "49983", **given}
    return client.ask(method, path, **given)[0]


def test_a_signed_url_is_of_its_file(client: Client, made: dict[str, str]) -> None:
    write, read = _signed(made, "write"), _signed(made, "read")
    assert _ask(client, made, "POST", f"/files?{write}", data=b"1", Content_Type="x/y") == 200
    assert _ask(client, made, "GET", f"/files?{read}") == 200
    assert _ask(client, made, "GET", f"/files?{write}") == 401


@pytest.mark.parametrize(
    "changed", [{"path": "b.txt"}, {"username": "root"}, {"signature_expiration": "9999999999"}]
)
def test_a_signed_url_that_was_changed_is_refused(
    client: Client, made: dict[str, str], changed: dict[str, str]
) -> None:
    assert _ask(client, made, "GET", f"/files?{_signed(made, 'read', **changed)}") == 401


def test_a_signature_has_one_reading(client: Client, made: dict[str, str]) -> None:
    """The signature for reading the file `a.txt:write:c` is not one for writing `a.txt`."""
    text = f"a.txt:write:c:read::{made['envdAccessToken']}"
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    read = {"path": "a.txt:write:c", "signature": f"v1_{digest}"}
    write = {"path": "a.txt", "username": "c:read:", "signature": f"v1_{digest}"}
    assert client.reach(made, "POST", "/files?path=a.txt%3Awrite%3Ac", data=b"1")[0] == 200
    assert _ask(client, made, "GET", f"/files?{urllib.parse.urlencode(read)}") == 200
    assert _ask(client, made, "POST", f"/files?{urllib.parse.urlencode(write)}", data=b"2") == 401


@pytest.mark.parametrize(
    ("path", "port"),
    [("/execute", "49999"), ("/contexts", "49999"), ("/files", "49999"), ("/files", "8000"),
     ("/process.Process/List", "49983"), ("/filesystem.Filesystem/ListDir", "49983"), ("/files/", "49983"),
     ("//files", "49983"), ("/x/../files", "49983"), ("/files%3f", "49983")],
)  # fmt: skip
def test_a_signed_url_is_of_nothing_but_a_file(
    client: Client, made: dict[str, str], path: str, port: str
) -> None:
    for method, operation in (("POST", "write"), ("GET", "read")):
        url = f"{path}?{_signed(made, operation)}"
        body = {"code": "1", "path": "/"} if method == "POST" else None
        assert _ask(client, made, method, url, body=body, E2b_Sandbox_Port=port) == 401


def test_a_signed_upload_takes_the_field_of_a_form(client: Client, made: dict[str, str]) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\ntext\r\n--x--\r\n'
    url, kind = f"/files?{_signed(made, 'write')}", "multipart/form-data; boundary=x"
    assert (
        client.ask("POST", url, data=form, Content_Type=kind)[0] == 200
    )  # no header names a sandbox
    assert client.reach(made, "GET", "/files?path=a.txt") == (200, "text")


def test_a_signed_upload_writes_no_other_file(client: Client, made: dict[str, str]) -> None:
    url = f"/files?{_signed(made, 'write')}"
    kind = "multipart/form-data; boundary=x"
    assert _ask(client, made, "POST", url, data=_FORM, Content_Type=kind) == 400
    for name in ("one", "two"):
        assert client.reach(made, "GET", f"/files?path={name}")[0] == 404
    assert client.reach(made, "POST", "/files", data=_FORM, Content_Type=kind)[0] == 200


@pytest.mark.parametrize("port", ["49983", "49999"])
def test_a_stream_is_read_no_further_than_its_quota(
    client: Client, e2b: E2bServer, made: dict[str, str], port: str
) -> None:
    """A chunked call counts as 1 MiB, so no more of it is held."""
    place = urllib.parse.urlsplit(e2b.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    headers = {
        "E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": port,
        "X-Access-Token": made["envdAccessToken"], "Content-Type": "application/connect+json",
    }  # fmt: skip
    chunks = (b" " * 65536 for _ in range(32))
    path = "/execute" if port == "49999" else "/process.Process/StreamInput"
    connection.request("POST", path, chunks, headers, encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, b"longer than 1048576 bytes" in answer.read()) == (413, True)
    connection.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("header", ["", "Connection: close\\r\\n"])
def test_streams_that_clients_leave_hold_no_thread_and_no_descriptor(
    client: Client, e2b: E2bServer, made: dict[str, str], version: str, header: str
) -> None:
    code = f"""
import socket, threading
listener, kept = socket.create_server(("127.0.0.1", 0)), []
def serve():
    while True:
        accepted, _ = listener.accept()
        accepted.recv(10000)
        accepted.sendall(b"HTTP/{version} 200 ok\\r\\n{header}\\r\\n")
        kept.append(accepted)
threading.Thread(target=serve, daemon=True).start()
print(listener.getsockname()[1])
"""
    _, lines = client.reach(made, "POST", "/execute", 49999, body={"code": code})
    port = next(
        int(each["text"])
        for each in map(json.loads, lines.splitlines())
        if each["type"] == "stdout"
    )
    place = urllib.parse.urlsplit(e2b.url)
    request = (
        f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\nE2b-Sandbox-Id: {made['sandboxID']}\r\n"
        f"E2b-Sandbox-Port: {port}\r\nX-Access-Token: {made['envdAccessToken']}\r\n\r\n"
    )
    before = _held(e2b)
    for _ in range(40):
        with socket.create_connection((place.hostname, place.port), timeout=30) as left:
            left.sendall(request.encode())
            assert left.recv(12) == b"HTTP/1.1 200"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = _held(e2b)
        if now[0] <= before[0] + 10 and now[1] <= before[1] + 10:  # idle workers are kept
            return
        time.sleep(0.05)
    pytest.fail(f"threads and descriptors: {before} before, {_held(e2b)} after")


def test_held_requests_take_no_thread(client: Client, e2b: E2bServer, made: dict[str, str]) -> None:
    """A server that never answers holds its clients' requests, and nothing else of this server."""
    code = """
import socket
listener = socket.create_server(("127.0.0.1", 8131), backlog=100)
"""
    client.reach(made, "POST", "/execute", 49999, body={"code": code})
    place = urllib.parse.urlsplit(e2b.url)
    request = (
        f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\nE2b-Sandbox-Id: {made['sandboxID']}\r\n"
        f"E2b-Sandbox-Port: 8131\r\nX-Access-Token: {made['envdAccessToken']}\r\n\r\n"
    )
    before = _held(e2b)[0]
    with contextlib.ExitStack() as held:
        for _ in range(60):
            connection = socket.create_connection((place.hostname, place.port), timeout=30)
            held.enter_context(connection).sendall(request.encode())
        assert client.reach(made, "GET", "/health")[0] == 204
        assert _held(e2b)[0] <= before + 10


def _held(e2b: E2bServer) -> tuple[int, int]:
    place = Path("/proc", str(e2b.pid))
    return len(os.listdir(place / "task")), len(os.listdir(place / "fd"))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 100 Continue\r\n\r\n", b"A"])
def test_an_answer_that_never_begins_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(ports, "_HEADER_SECONDS", 0.5)
    assert anyio.run(_status_of_dripping, str(tmp_path / "socket"), answer) == 502


async def _status_of_dripping(path: str, answer: bytes) -> int:
    """Return the status for a server that sends `answer` over and over."""

    async def drip(stream: Any) -> None:
        async with stream:
            try:
                while True:
                    await stream.send(answer)
                    await anyio.sleep(0.01)
            except anyio.BrokenResourceError:
                return

    listener = await anyio.create_unix_listener(path)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, drip)
        with anyio.fail_after(20):
            told = await ports.relayed(path, "GET", "/", {}, b"", {})
            if isinstance(told, StreamingResponse):
                [_ async for _ in told.body_iterator]
        group.cancel_scope.cancel()
    return told.status_code


@pytest.mark.parametrize(
    ("location", "status"),
    [
        ("/next?a=b", 302),
        ("http://192.0.2.1/", 502),
        ("//192.0.2.1/", 502),
        ("/\\192.0.2.1/", 502),
        ("javascript:1", 502),
    ],
)
def test_a_server_in_a_cell_leads_no_client_away(
    tmp_path: Path, location: str, status: int
) -> None:
    answer = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
    assert anyio.run(_status_of_dripping, str(tmp_path / "socket"), answer.encode()) == status


def test_a_client_does_not_count_the_caps_of_a_rule_anew() -> None:
    rules = (NetworkRule(host="a.example", sent_bytes=1000), NetworkRule(host="b.example"))
    network = Network(allow=rules)
    everything = ("0.0.0.0/0",)
    with Sandbox(policy=Policy(name="web", network=network), pool=0) as sandbox:
        before = sandbox.network.rules
        change(sandbox, network, E2bNetwork())
        assert sandbox.network.rules == before
        change(sandbox, network, E2bNetwork(deny_out=everything, allow_out=("b.example",)))
        with pytest.raises(PolicyError, match="a.example cannot be allowed again"):
            change(sandbox, network, E2bNetwork())
        change(sandbox, network, E2bNetwork(deny_out=everything))
        change(sandbox, network, E2bNetwork(deny_out=everything, allow_out=("b.example",)))
        assert "deny a.example:443" in sandbox.network.rules
        assert "deny b.example:443" not in sandbox.network.rules
