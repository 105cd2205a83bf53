"""The HTTP server of the cell's part: unary calls and streams of the Connect protocol with JSON
(connectrpc.com/docs/protocol), and `/files`."""

import contextlib
import gzip
import json
import os
import re
import select
import stat
import struct
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import commands, files, watchers
from .calls import CHUNK, STATUS, CallFailed, messages_of, path_of, telling
from .files import check_metadata, set_metadata

_METADATA = "x-metadata-"  # headers of uploads

UNARY: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/process.Process/List": commands.list_processes,
    "/process.Process/Update": commands.update,
    "/process.Process/SendInput": commands.send_input,
    "/process.Process/SendSignal": commands.send_signal,
    "/process.Process/CloseStdin": commands.close_stdin_of,
    "/filesystem.Filesystem/Stat": files.status_of,
    "/filesystem.Filesystem/MakeDir": files.make_directory,
    "/filesystem.Filesystem/Move": files.move,
    "/filesystem.Filesystem/ListDir": files.list_directory,
    "/filesystem.Filesystem/Remove": files.remove,
    "/filesystem.Filesystem/CreateWatcher": watchers.create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": watchers.get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": watchers.remove_watcher,
}
STREAMS: dict[str, Callable[[dict[str, Any], float | None], Iterator[dict[str, Any]]]] = {
    "/process.Process/Start": commands.start,
    "/process.Process/Connect": commands.connect,
    "/filesystem.Filesystem/WatchDir": watchers.watch_directory,
}


class Handler(BaseHTTPRequestHandler):
    """Answers one request of the host."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        path, query = self._target()
        if path == "/health":
            self._send(204, b"")
        elif path == "/files":
            self._answering(lambda: self._read_file(path_of(query.get("path", ""))))
        else:
            self._fail(404, "not found")

    def do_POST(self) -> None:
        path, query = self._target()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/files":
            self._answering(lambda: self._write_files(query, body))
        elif path in UNARY:
            self._answering(lambda: self._send_json(200, UNARY[path](json.loads(body or b"{}"))))
        elif path == "/process.Process/StreamInput":
            self._stream(lambda: iter([commands.stream_input(messages_of(body))]))
        elif path in STREAMS:
            milliseconds = self.headers.get("Connect-Timeout-Ms", "")
            timeout = int(milliseconds) / 1000 if milliseconds.isdecimal() else None
            self._stream(lambda: STREAMS[path]((messages_of(body) or [{}])[0], timeout))
        else:
            self._send_json(404, {"code": "unimplemented", "message": f"{path} is not supported"})

    def _target(self) -> tuple[str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        return parts.path, dict(urllib.parse.parse_qsl(parts.query))

    def _answering(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except CallFailed as failure:
            status = STATUS.get(failure.code, 500)
            if self._target()[0] == "/files":
                self._fail(507 if failure.code == "resource_exhausted" else status, str(failure))
            else:
                self._send_json(status, {"code": failure.code, "message": str(failure)})
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - of a malformed request, whatever it is
            self._send_json(400, {"code": "invalid_argument", "message": repr(error)})

    def _stream(self, begin: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Send the messages of a stream, each in an envelope, and how it ended."""
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end: dict[str, Any] = {}
        try:
            for message in begin():
                self._send_envelope(0, message)
        except CallFailed as failure:
            end = {"error": {"code": failure.code, "message": str(failure)}}
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - of a malformed request, whatever it is
            end = {"error": {"code": "invalid_argument", "message": repr(error)}}
        self._send_envelope(2, end)
        self.wfile.write(b"0\r\n\r\n")

    def _send_envelope(self, flags: int, message: dict[str, Any]) -> None:
        if select.select([self.connection], [], [], 0)[0]:
            raise BrokenPipeError  # the host has hung up: it sends nothing more
        data = json.dumps(message).encode()
        envelope = struct.pack(">BI", flags, len(data)) + data
        self.wfile.write(b"%x\r\n%s\r\n" % (len(envelope), envelope))

    def _send_json(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _fail(self, status: int, message: str) -> None:
        self._send_json(status, {"code": status, "message": message})

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _read_file(self, path: str) -> None:
        with telling():
            opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise CallFailed("invalid_argument", f"path is not a regular file: {path}")
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(found.st_size))
            self.end_headers()
            left = found.st_size
            while left and (data := file.read(min(left, CHUNK))):
                self.wfile.write(data)
                left -= len(data)
            self.close_connection = left > 0  # it became shorter

    def _write_files(self, query: dict[str, str], body: bytes) -> None:
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/form-data"):
            uploads = list(_parts(kind, body))
        else:
            uploads = [("", body)]
        if query.get("path"):  # which a signature may be of
            if len(uploads) != 1:
                raise ValueError("path: one file can be written there")
            uploads = [(query["path"], uploads[0][1])]
        metadata: dict[str, str] = {}
        for header, value in self.headers.items():
            if header.lower().startswith(_METADATA):
                metadata.setdefault(header.lower()[len(_METADATA) :], value)
        check_metadata(metadata)
        written = []
        for name, data in uploads:
            path = path_of(name)
            with telling():
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
                set_metadata(path, metadata)
            watchers.note_upload(path)
            entry = {"name": os.path.basename(path), "type": "file", "path": path}
            written.append({**entry, "metadata": metadata} if metadata else entry)
        self._send_json(200, written)


def _parts(kind: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the file names and contents of a form (RFC 7578)."""
    boundary = re.search(r'boundary="?([^";]+)', kind)
    if not boundary:
        raise ValueError("the form has no boundary")
    for part in body.split(b"--" + boundary[1].encode())[1:-1]:
        head, _, data = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name = re.search(rb'filename="((?:[^"\\]|\\.)*)"', head)
        if name is None and re.search(rb'name="?file"?', head):
            yield "", data.removesuffix(b"\r\n")  # a field, whose path the URL names
        elif name:
            text = re.sub(r"\\(.)", r"\1", name[1].decode())
            for escaped, sign in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):  # as browsers do
                text = text.replace(escaped, sign)
            yield text, data.removesuffix(b"\r\n")


class EnvdServer(ThreadingHTTPServer):
    """The server, which reports no connection that the host has closed."""

    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Report nothing."""


def main(port: int) -> None:
    server = EnvdServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    print("ready", flush=True)  # noqa: T201 - to the host
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
