"""Access to the E2B server, and what hostile clients and cells can do."""

import json
import re
import subprocess
import sys

import pytest

from tests.harness.servers.e2b.e2b_server import KEY, Client, E2bServer, serving

pytestmark = pytest.mark.needs("cgroup")
_ANNA, _BOB = "a" * 40, "b" * 40


def test_the_printed_key_has_the_form_that_clients_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    command = [sys.executable, "-m", "cellwright", "e2b", "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = "".join(server.stderr.readline() for _ in range(3))
        server.terminate()
    assert re.search(r"E2B_API_KEY=e2b_[0-9a-f]{40}$", said, re.MULTILINE)


def test_no_request_is_answered_without_a_key(e2b: E2bServer) -> None:
    for key in ("", "wrong", KEY + "0"):
        status, told = Client(e2b.url, key).ask("GET", "/v2/sandboxes")
        assert (status, told["code"]) == (401, 401)


def test_a_sandbox_is_reached_only_with_its_own_token(client: Client, made: dict[str, str]) -> None:
    assert client.reach(made, "GET", "/health")[0] == 204
    assert client.reach(made, "GET", "/health", token="wrong")[0] == 401
    assert client.reach(made, "GET", "/health", token=KEY)[0] == 401
    other = client.make()
    assert client.reach(made, "GET", "/health", token=other["envdAccessToken"])[0] == 502
    client.ask("DELETE", f"/sandboxes/{other['sandboxID']}")


def test_clients_do_not_see_each_others_sandboxes(tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"anna {_ANNA}\nbob {_BOB}\n")
    keys.chmod(0o600)
    with serving("--token-file", str(keys), "--sandboxes", "2") as server:
        anna, bob = Client(server.url, _ANNA), Client(server.url, _BOB)
        id = anna.make()["sandboxID"]
        assert bob.ask("GET", "/v2/sandboxes") == (200, [])
        for method, path, body in (
            ("GET", "", None), ("DELETE", "", None), ("POST", "/timeout", {"timeout": 1}), ("POST", "/pause", {}),
            ("POST", "/connect", {"timeout": 1}), ("PUT", "/network", {}), ("GET", "/metrics", None),
        ):  # fmt: skip
            assert bob.ask(method, f"/sandboxes/{id}{path}", body)[0] == 404
        status, told = anna.ask("POST", "/v2/sandboxes", {"templateID": "base"})
        assert (status, "too many sandboxes" in told["message"]) == (429, True)


def test_pages_of_other_sites_and_other_names_are_refused(client: Client) -> None:
    assert client.ask("GET", "/v2/sandboxes", Origin="http://evil.example")[0] == 403
    assert client.ask("GET", "/v2/sandboxes", Host="evil.example")[0] == 421


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"nonsense", b'{"templateID": 3}', b'{"templateID": "x", "timeout": -1}', b'{"timeout": 1e99}',
     b"[" * 100_000, b'{"templateID": "base", "envVars": {"A=B": "x"}}', b'{"templateID": "base", "mcp": {"a": 1}}',
     b'{"templateID": "caf\xe9"}', b'{"templateID": "base", "volumeMounts": [{"name": "x"}]}'],
)  # fmt: skip
def test_malformed_requests_are_refused(client: Client, body: bytes) -> None:
    before = len(client.ask("GET", "/v2/sandboxes")[1])
    if body == b"":
        body = b"null"
    status, told = client.ask("POST", "/v2/sandboxes", data=body)
    assert (status, told["code"]) == (400, 400)
    assert len(client.ask("GET", "/v2/sandboxes")[1]) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [("/process.Process/Start", b"\0\0\0\0\x05nonse"), ("/process.Process/Start", b"\0\xff\xff\xff\xff"),
     ("/process.Process/SendInput", b"[1]"), ("/filesystem.Filesystem/Stat", b'{"path": 3}'),
     ("/nothing", b"{}"), ("/../../etc/passwd", b"{}")],
)  # fmt: skip
def test_malformed_calls_of_a_sandbox_do_not_end_it(
    client: Client, made: dict[str, str], path: str, body: bytes
) -> None:
    status, told = client.reach(made, "POST", path, data=body)
    assert status < 500 or '"error"' in str(told) or status == 501
    assert client.reach(made, "GET", "/health")[0] == 204


def test_a_port_without_a_server_says_so(client: Client, made: dict[str, str]) -> None:
    status, told = client.reach(made, "GET", "/", port=8123)
    assert (status, "not open" in told) == (502, True)


def test_a_port_of_a_program_is_reached(client: Client, made: dict[str, str]) -> None:
    server = (
        "import http.server, threading\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 8124), http.server.SimpleHTTPRequestHandler)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\nopen('x.txt', 'w').write('from the cell')"
    )
    client.reach(made, "POST", "/execute", 49999, body={"code": server})
    assert client.reach(made, "GET", "/x.txt", port=8124) == (200, "from the cell")


@pytest.mark.parametrize(
    "answer",
    ["b'nonsense'", "b'HTTP/1.1 999 x\\r\\n\\r\\n'", "b'HTTP/1.1 200 ok\\r\\nContent-Type: a\\x01b\\r\\n\\r\\nx'",
     "b'HTTP/1.1 200 ok\\r\\n' + b'A: b\\r\\n' * 10000", "b'HTTP/1.1 200 ok\\r\\n' + b'a' * 10**6", "b''"],
)  # fmt: skip
def test_a_hostile_server_in_a_cell_harms_nobody(
    client: Client, made: dict[str, str], answer: str
) -> None:
    server = f"""
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
def serve():
    accepted, _ = listener.accept()
    accepted.recv(10000)
    accepted.sendall({answer})
    accepted.close()
threading.Thread(target=serve, daemon=True).start()
print(listener.getsockname()[1])
"""
    _, lines = client.reach(made, "POST", "/execute", 49999, body={"code": server})
    port = next(
        int(each["text"])
        for each in map(json.loads, lines.splitlines())
        if each["type"] == "stdout"
    )
    assert client.reach(made, "GET", "/", port=port)[0] in (200, 502)
    assert client.reach(made, "GET", "/health")[0] == 204


def test_a_program_that_ends_its_cell_ends_the_sandbox(client: Client) -> None:
    made = client.make()
    client.reach(made, "POST", "/execute", 49999, body={"code": "import os; os._exit(1)"})
    assert client.reach(made, "GET", "/health")[0] in (401, 502)
    assert client.ask("GET", f"/sandboxes/{made['sandboxID']}")[0] == 404
