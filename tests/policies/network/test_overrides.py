"""Names by which servers take another request are refused however they are written: asked of real servers."""

import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from cellwright.policies.network.canonical import (
    header_with_path,
    overriding_header,
    parameter_with_method,
)
from tests.conftest import soon

OVERRIDES = (
    "X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "X-Original-URL", "X-Rewrite-URL",
    "X-Forwarded-Host", "X-HTTP-Host-Override", "X-HTTP-Path-Override", "X-Host", "X-Override-URL", "X-Method",
    "X-Script-Name", "Script-Name", "Path-Info", "X-Real-IP",
)  # fmt: skip
FRAMING = ("Content-Length", "Transfer-Encoding", "Proxy-Connection")
OTHERS = "!#$%&'*+._`|~"  # characters of names (RFC 9110, 5.6.2) beside letters, digits and -
HARMLESS = (
    "Accept", "Authorization", "Content-Type", "Cookie", "Host", "If-None-Match", "Origin", "Range", "Referer",
    "User-Agent", "X-API-Key", "X-CSRF-Token", "X-Request-ID", "X-Requested-With", "Idempotency-Key",
    "Access-Control-Request-Method", "Content-Length", "Transfer-Encoding", "traceparent", "api_key",
    "Upgrade-Insecure-Requests", "X-Auth-Method",
)  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_usual_overrides_are_refused(name: str) -> None:
    assert overriding_header(["Accept", name, "Host"]) == name


@pytest.mark.parametrize("name", HARMLESS)
def test_other_headers_pass(name: str) -> None:
    assert overriding_header([name]) == header_with_path([name]) == ""


@pytest.mark.parametrize(
    "name", ["Destination", "x-amz-copy-source", "X-Ms-Copy_Source", "X-Copy-From"]
)
def test_a_second_path_is_found(name: str) -> None:
    assert header_with_path(["Accept", name]) == name


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("?_method=DELETE", "_method"), ("a=1&_METHOD=x", "_METHOD"), ("a;%5fmethod", "_method"),
        ("[method=x", "[method"), (".method=x", ".method"), ("+_method=x", "+_method"),
        ("_method[]=x", "_method[]"), ("x-http-method-override=PUT", "x-http-method-override"),
        ("?method=flickr.test&x_method=1&a=_method", ""), ("", ""), ("?payment_method=card", ""),
    ],
)  # fmt: skip
def test_a_parameter_that_names_a_method_is_found(query: str, name: str) -> None:
    assert parameter_with_method(query) == name


# Each server answers with the variables of a request as its programs see them, in JSON.
_PHP = "<?php echo json_encode($_SERVER);"
_NODE = """
require("http").createServer((request, answer) => answer.end(JSON.stringify(Object.fromEntries(
    Object.entries(request.headers).map(([name, value]) => ["HTTP_" + name.toUpperCase().replace(/-/g, "_"), value])
)))).listen(+process.argv[1], "127.0.0.1")
"""
_WSGI = """
import json
def app(environ, start):
    start("200 OK", [])
    return [json.dumps({name: str(value) for name, value in environ.items()}).encode()]
"""
_ASGI = """
import json
async def app(scope, receive, send):
    if scope["type"] != "http": return
    seen = {"HTTP_" + name.decode().upper().replace("-", "_"): value.decode() for name, value in scope["headers"]}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(seen).encode()})
"""
_NGINX = """
daemon off; pid %(here)s/pid; error_log %(here)s/log; worker_processes 1;
events { worker_connections 64; }
http {
    access_log off; client_body_temp_path %(here)s; proxy_temp_path %(here)s; fastcgi_temp_path %(here)s;
    uwsgi_temp_path %(here)s; scgi_temp_path %(here)s;
    underscores_in_headers on; ignore_invalid_headers off;
    server { listen 127.0.0.1:%(port)d; location / { return 200 '{%(variables)s}'; } }
}
"""


def _variable(name: str) -> str:
    return "HTTP_" + name.upper().replace("-", "_")


def _nginx(here: Path, port: int) -> list[str]:
    names = [_variable(name) for name in (*OVERRIDES, *FRAMING)]
    variables = ",".join(f'"{name}":"${name.lower()}"' for name in names)
    text = _NGINX % {"here": here, "port": port, "variables": variables}
    (here / "conf").write_text(text)
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    return [nginx, "-e", str(here / "log"), "-c", str(here / "conf")]


def _command(server: str, here: Path, port: int) -> list[str]:
    where = f"127.0.0.1:{port}"
    match server:
        case "php":
            (here / "index.php").write_text(_PHP)
            return ["php", "-S", where, "-t", str(here)]
        case "node":
            return ["node", "-e", _NODE, str(port)]
        case "gunicorn":
            (here / "served.py").write_text(_WSGI)
            return [
                sys.executable, "-m", "gunicorn", "--chdir", str(here), "-b", where,
                "--header-map", "dangerous", "served:app",
            ]  # fmt: skip
        case "uvicorn":
            (here / "served.py").write_text(_ASGI)
            return [
                sys.executable, "-m", "uvicorn", "--app-dir", str(here), "--port", str(port), "served:app",
            ]  # fmt: skip
        case _:
            return _nginx(here, port)


@contextlib.contextmanager
def _wsgiref() -> Iterator[int]:
    names: dict[str, object] = {}
    exec(_WSGI, names)
    made = make_server("127.0.0.1", 0, names["app"], handler_class=_Quiet)  # type: ignore[arg-type]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield made.server_port
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def _serving(server: str, here: Path) -> Iterator[int]:
    if server == "wsgiref":
        with _wsgiref() as port:
            yield port
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (here / "said").open("wb") as said:
        process = subprocess.Popen(_command(server, here, port), stdout=said, stderr=said, cwd=here)
    try:
        assert soon(lambda: _answers(port) or process.poll() is not None)
        assert process.poll() is None, (here / "said").read_text()
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def _seen(port: int, name: str) -> dict[str, str]:
    """Return what programs of the server see of a request with a header."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("GET", "/", headers={name: "5"})
    answer = client.getresponse()
    body = answer.read()
    client.close()
    return json.loads(body) if answer.status == 200 else {}


@pytest.mark.parametrize(
    "server",
    [
        "wsgiref",
        pytest.param("gunicorn", marks=pytest.mark.needs("gunicorn")),
        "uvicorn",
        pytest.param("nginx", marks=pytest.mark.needs("nginx")),
        pytest.param("node", marks=pytest.mark.needs("node")),
        pytest.param("php", marks=pytest.mark.needs("php")),
    ],
)
def test_a_name_that_a_server_takes_for_an_override_is_one(server: str, tmp_path: Path) -> None:
    with _serving(server, tmp_path) as port:
        assert _seen(port, OVERRIDES[0])[_variable(OVERRIDES[0])] == "5"
        taken = {
            spelled
            for name in (*OVERRIDES, *FRAMING)
            for other in OTHERS
            if _seen(port, spelled := name.replace("-", other)).get(_variable(name)) == "5"
        }
    passed = {name for name in taken if not overriding_header([name])}
    assert not passed
    if server in ("wsgiref", "php", "nginx"):
        assert "X_Host" in taken
    if server == "php":
        assert "X.Host" in taken
