"""A registry on loopback, by the distribution specification, which fails in the ways that it is told."""

import contextlib
import hashlib
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class RegistryServer:
    """Serves the blobs of OCI layouts as images, in a thread, until it is closed.

    faults: what it does wrong; requests: (path, headers) of each request
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.faults: set[str] = set()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.token = ""  # required if it is set
        self.redirect = ""  # where blobs are
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.registry = self  # type: ignore[attr-defined]
        if context:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.host = f"localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def add(self, name: str, layout: Path, **platform: str) -> str:
        """Serve the image of a layout as `name`, such as app:1; with a `platform`, in an index."""
        for blob in (layout / "blobs/sha256").iterdir():
            self.blobs[f"sha256:{blob.name}"] = blob.read_bytes()
        image = json.loads((layout / "index.json").read_text())["manifests"][0]
        manifest = self.blobs[image["digest"]]
        self.manifests[image["digest"]] = MANIFEST, manifest
        served = MANIFEST, manifest
        if platform:
            index = {
                "schemaVersion": 2,
                "mediaType": INDEX,
                "manifests": [image | {"platform": platform}],
            }
            served = INDEX, json.dumps(index).encode()
        self.manifests[name.partition(":")[2]] = served
        self.manifests[f"sha256:{hashlib.sha256(served[1]).hexdigest()}"] = served
        return f"{self.host}/{name}"

    def asked(self, part: str) -> list[dict[str, str]]:
        """Return the headers of the requests whose path has `part`."""
        return [headers for path, headers in self.requests if part in path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def registry(self) -> RegistryServer:
        found: RegistryServer = self.server.registry  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:
        served = self.registry
        served.requests.append((self.path, dict(self.headers.items())))
        path = urlsplit(self.path).path
        if path == "/token":
            self._answer(200, json.dumps({"token": "granted"}).encode())
        elif path.startswith("/storage/"):
            self._blob(path.rpartition("/")[2])
        elif served.token and self.headers.get("Authorization") != f"Bearer {served.token}":
            realm = f'Bearer realm="http://{served.host}/token",service="tests",scope="repository:app:pull"'
            self._answer(401, b"{}", {"WWW-Authenticate": realm})
        elif "busy" in served.faults:
            served.faults.remove("busy")
            self._answer(503, b"")
        elif "/manifests/" in path:
            self._manifest(path.rpartition("/")[2])
        elif served.redirect:
            self._answer(
                307, b"", {"Location": f"{served.redirect}/storage/{path.rpartition('/')[2]}"}
            )
        else:
            self._blob(path.rpartition("/")[2])

    def _manifest(self, reference: str) -> None:
        kind, data = self.registry.manifests.get(reference, ("", b""))
        if "large manifest" in self.registry.faults:
            data = bytes(5 << 20)
        self._answer(200 if data else 404, data, {"Content-Type": kind})

    def _blob(self, digest: str) -> None:
        faults, data = self.registry.faults, self.registry.blobs.get(digest, b"")
        if "wrong" in faults:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if "endless" in faults:
            data += bytes(1 << 20)
        start, status, headers = 0, 200, {}
        if (asked := self.headers.get("Range")) and "no ranges" not in faults:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            status, headers = 206, {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        end = len(data)
        if "breaks" in faults:  # each connection brings a part
            end = min(len(data), start + 1000)
        if "silent" in faults:
            end = min(len(data), start + 4000)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:end])
        if "silent" in faults and end < len(data):
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # until the client gives up
        self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True
