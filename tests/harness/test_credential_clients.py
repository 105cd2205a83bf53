"""Clients as people use them send a credential that they do not have: unmodified, over TLS, from a project."""

import base64
import http.server
import subprocess
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import PolicyError, Sandbox
from cellwright.harness.cli.main import main
from tests.conftest import policy_named
from tests.network import LOOPBACK, NAME, certificate, needs_openssl, resolving

VALUE = "sk-ant-api03-Secret0123456789abcdefghijklmnopqrstuvwxyz"
pytestmark = [needs_openssl, pytest.mark.needs("userns")]
_BASIC = f"Basic {base64.b64encode(f'me:{VALUE}'.encode()).decode()}"


class Host(http.server.SimpleHTTPRequestHandler):
    """Serves a directory below /files/ to those with the value, and echoes what others are asked."""

    protocol_version = "HTTP/1.1"
    seen: list[str]
    acknowledged: threading.Event

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        self.seen.append(f"{self.command} {self.path} {given}")
        if self.path == "/events":
            self._send_events()
        elif self.path == "/acknowledge":
            self.acknowledged.set()
            self._answer(200, "")
        elif not self.path.startswith("/files/"):
            self._answer(200, f"you sent {given}")
        elif given == _BASIC:
            super().do_GET()
        else:
            self._answer(401, "no")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.seen.append(f"{self.command} {self.path} {self.headers.get('x-api-key')} {body}")
        self._answer(200, body)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="x"')
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _send_events(self) -> None:
        """Send the second event once the program has read the first."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, end in ((1, ""), (2, "0\r\n\r\n")):
            event = f"event: message\ndata: {number} {VALUE}\n\n"
            self.wfile.write(f"{len(event):x}\r\n{event}\r\n{end}".encode())
            self.wfile.flush()
            assert self.acknowledged.wait(120)

    def log_message(self, *_: object) -> None: ...


class Outside:
    """The host of the credential, and a project whose programs reach it."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.files = place / "served/files"
        self.project = place / "project"
        for each in (self.files, self.project, place / "tls"):
            each.mkdir(parents=True)
        cert, context = certificate(place / "tls", NAME)
        patch.setenv("SSL_CERT_FILE", str(cert))
        patch.setenv("HOST_KEY", VALUE)
        resolving(patch, {NAME: [["127.0.0.1"]]})
        self.seen: list[str] = []
        members = {"seen": self.seen, "acknowledged": threading.Event()}
        handler = partial(type("Handler", (Host,), members), directory=str(self.files.parent))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, line: str, **more: Any) -> str:
        """Return what a line of sh(1) writes; URL in it is the host's address."""
        line = line.replace("URL", f"https://{NAME}:{self.port}")
        base = policy_named("project")
        base = replace(base, network=replace(base.network, addresses=(LOOPBACK,)))
        own = f"KEY=HOST_KEY@{NAME}:{self.port}"
        with Sandbox(policy=base, pool=0) as box:
            command = ["sh", "-c", f"({line}) > out 2>&1"]
            with box.exec(command, project=self.project, credentials=[own], **more) as run:
                result = run.wait()
        said = (self.project / "out").read_text()
        assert result.exit_code == 0, (result, said)
        assert VALUE not in said
        return said


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    made = Outside(tmp_path, monkeypatch)
    yield made
    made.server.shutdown()
    made.server.server_close()


_BEARER = f"GET /echo Bearer {VALUE}"
_PYTHON = "import os; head = {'Authorization': 'Bearer ' + os.environ['KEY']}; "
_NODE = """
const head = {Authorization: "Bearer " + process.env.KEY};
fetch("URL/echo", {headers: head}).then(async answer => console.log(await answer.text()));
"""


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('curl -sS -H "Authorization: Bearer $KEY" URL/echo',
                     marks=pytest.mark.needs("curl"), id="curl"),
        pytest.param('curl -sS --http2 -H "Authorization: Bearer $KEY" URL/echo',
                     marks=pytest.mark.needs("curl"), id="curl with HTTP/2"),
        pytest.param(f"node -e '{_NODE}'", marks=pytest.mark.needs("node"), id="fetch of node"),
        pytest.param(f'''python3 -c "{_PYTHON}import requests
print(requests.get('URL/echo', headers=head).text)"''', id="requests"),
        pytest.param(f'''python3 -c "{_PYTHON}import httpx
print(httpx.get('URL/echo', headers=head).text)"''', id="httpx"),
        pytest.param(f'''python3 -c "{_PYTHON}import urllib.request as web
print(web.urlopen(web.Request('URL/echo', headers=head)).read().decode())"''', id="urllib"),
    ],
)  # fmt: skip
def test_a_client_uses_the_value_that_it_does_not_have(line: str, outside: Outside) -> None:
    packages = sysconfig.get_path("purelib")
    said = outside.run(line, read=(packages,), variables=(f"PYTHONPATH={packages}",))
    assert "you sent Bearer sk-ant-api03-" in said
    assert _BEARER in outside.seen


_GO = """
package main
import ("fmt"; "io"; "net/http"; "os")
func main() {
    asked, _ := http.NewRequest("GET", os.Args[1], nil)
    asked.Header.Set("Authorization", "Bearer " + os.Getenv("KEY"))
    answer, why := http.DefaultClient.Do(asked)
    if why != nil { fmt.Println(why); os.Exit(1) }
    body, _ := io.ReadAll(answer.Body)
    fmt.Println(string(body))
}
"""


@pytest.mark.needs("go")
def test_a_program_in_go(outside: Outside) -> None:
    (outside.project / "main.go").write_text(_GO)
    command = ["go", "build", "-o", "client", "main.go"]
    subprocess.run(command, cwd=outside.project, check=True, timeout=300)
    assert outside.run("./client URL/echo").startswith("you sent Bearer sk-ant-")
    assert _BEARER in outside.seen


_JAVA = """
import java.net.URI;
import java.net.http.*;
class Client {
    public static void main(String[] given) throws Exception {
        var asked = HttpRequest.newBuilder(URI.create(given[0]))
            .header("Authorization", "Bearer " + System.getenv("KEY")).build();
        System.out.println(HttpClient.newHttpClient().send(asked, HttpResponse.BodyHandlers.ofString()).body());
    }
}
"""


@pytest.mark.needs("java", "javac")
def test_a_program_in_java(outside: Outside) -> None:
    (outside.project / "Client.java").write_text(_JAVA)
    subprocess.run(["javac", "Client.java"], cwd=outside.project, check=True, timeout=300)
    assert outside.run("java -Xshare:auto Client URL/echo").startswith("you sent Bearer sk-ant-")
    assert _BEARER in outside.seen


@pytest.mark.needs("git")
def test_git_clones_with_a_password(outside: Outside, tmp_path: Path) -> None:
    work = tmp_path / "work"
    given = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    for command in (
        ("init", "-q", str(work)), ("-C", str(work), *given, "commit", "-qm", "first", "--allow-empty"),
        ("clone", "-q", "--bare", str(work), str(outside.files / "work.git")),
        ("-C", str(outside.files / "work.git"), "update-server-info"),
    ):  # fmt: skip
        subprocess.run(("git", *command), check=True, capture_output=True)
    url = f"https://me:$KEY@{NAME}:{outside.port}/files/work.git"
    said = outside.run(f'git clone -q "{url}" cloned && git -C cloned log --format=%s')
    assert said == "first\n"


def test_pip_downloads_with_a_password(outside: Outside) -> None:
    simple = outside.files / "simple" / "a-package"
    simple.mkdir(parents=True)
    name = "a_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(simple / name, "w") as wheel:
        about = "Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n"
        for each, text in (("METADATA", about), ("WHEEL", "Wheel-Version: 1.0\n"), ("RECORD", "")):
            wheel.writestr(f"a_package-1.0.dist-info/{each}", text)
    (simple / "index.html").write_text(f'<a href="{name}">{name}</a>')
    packages = sysconfig.get_path("purelib")
    url = f"https://me:$KEY@{NAME}:{outside.port}/files/simple"
    line = f'python3 -m pip download -q --no-deps -i "{url}" a-package && ls'
    said = outside.run(line, read=(packages,), variables=(f"PYTHONPATH={packages}",))
    assert name in said


def test_a_command_that_has_the_value_is_refused(outside: Outside) -> None:
    with pytest.raises(PolicyError, match="KEY: the command has its value") as raised:
        outside.run(f"curl -H 'Authorization: {VALUE}' URL")
    assert VALUE not in str(raised.value)


def test_the_command_line_takes_credentials(
    outside: Outside, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A variable that is passed on is replaced by the placeholder."""
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'name = "mine"\nextends = "project"\n[network]\naddresses = ["{LOOPBACK}"]\n'
    )
    (outside.project / "client.py").write_text(
        "import os, urllib.request as web\nkey = os.environ['HOST_KEY']\n"
        f"asked = web.Request('https://{NAME}:{outside.port}/echo')\n"
        "asked.add_header('Authorization', 'Bearer ' + key)\n"
        "print(key, web.urlopen(asked).read().decode())\n"
    )
    given = ["--credential", f"HOST_KEY=HOST_KEY@{NAME}:{outside.port}", "--env", "HOST_KEY"]
    given += ["--policy", str(policy), "--project", str(outside.project)]
    assert main(["exec", *given, "--explain", "--", "python3"]) == 0
    assert f"HOST_KEY, a placeholder: its value goes to {NAME} alone" in capfd.readouterr().out
    assert main(["exec", *given, "--", "/usr/bin/python3", "client.py"]) == 0
    said = capfd.readouterr()
    assert VALUE not in said.out + said.err
    token, *answer = said.out.split()
    assert answer == ["you", "sent", "Bearer", token]
    assert _BEARER in outside.seen


_EVENTS = """
import json, os, urllib.request as web
body = json.dumps({"model": "m", "stream": True, "note": "é" * 70000}).encode()
asked = web.Request("URL/v1/messages", body, {"x-api-key": os.environ["KEY"], "Content-Type": "application/json"})
assert web.urlopen(asked).read() == body
events = web.urlopen("URL/events")
first = [events.readline().decode() for _ in range(3)]
web.urlopen("URL/acknowledge").read()
print(*first, events.read().decode())
print(os.environ["KEY"])
"""


def test_events_of_a_model_arrive_one_by_one(outside: Outside) -> None:
    (outside.project / "events.py").write_text(
        _EVENTS.replace("URL", f"https://{NAME}:{outside.port}")
    )
    said = outside.run("python3 events.py")
    assert f"POST /v1/messages {VALUE} " in outside.seen[0]
    token = said.split()[-1]
    assert f"data: 1 {token}" in said
    assert f"data: 2 {token}" in said
