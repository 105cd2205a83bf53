"""The HTTP server of the cell's part: unary calls and streams of the Connect protocol with JSON
(connectrpc.com/docs/protocol), and `/files`.

Watchers of directories, which compare two looks at a directory.
"""

import contextlib
import gzip
import itertools
import json
import os
import re
import select
import stat
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import cell_services
from . import cell_services as services

_WATCH_SECONDS, _MOST_WATCHED, _MOST_EVENTS, _MOST_WATCHERS = 0.2, 10_000, 1_000, 32


class DirectoryWatcher:
    """Changes in a directory, found by comparing two listings."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._path = services.path_of(request.get("path", ""))
        self._depth = 32 if request.get("recursive") else 1
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        with services.telling():
            if not os.path.isdir(self._path):
                os.stat(self._path)
                raise services.CallFailed(
                    "invalid_argument", f"path is not a directory: {self._path}"
                )
        self._has_entries = bool(request.get("includeEntry"))
        self._seen = self._look()
        _ALL.append(self)
        threading.Thread(target=self._watch, daemon=True).start()

    def _look(self) -> dict[str, tuple[int, ...]]:
        seen: dict[str, tuple[int, ...]] = {}
        with contextlib.suppress(OSError):
            for path in itertools.islice(services.below(self._path, self._depth), _MOST_WATCHED):
                with contextlib.suppress(OSError):
                    found = os.lstat(path)
                    written = 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns
                    seen[os.path.relpath(path, self._path)] = (
                        found.st_ino, found.st_mode, written, found.st_size * bool(written),
                    )  # fmt: skip
        return seen

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_SECONDS):
            self.look_again()

    def look_again(self, uploaded: str = "") -> None:
        """Record changes; `uploaded`: the file that the server itself wrote, whose mode it sets too."""
        with self._lock:
            before, self._seen = self._seen, self._look()
            self._compare(before, self._seen, os.path.relpath(uploaded or "/", self._path))

    def _compare(
        self, before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]], uploaded: str
    ) -> None:
        known = {found[0] for found in before.values()}
        moved = {found[0] for name, found in now.items() if name not in before}
        for name in before.keys() - now.keys():
            is_moved = before[name][0] in moved
            self._note(name, "EVENT_TYPE_RENAME" if is_moved else "EVENT_TYPE_REMOVE")
        for name, found in now.items():
            old = before.get(name)
            if old is None or old[0] != found[0]:
                self._note(name, "EVENT_TYPE_CREATE")
            if old is None and name == uploaded:
                self._note(name, "EVENT_TYPE_CHMOD")
            is_new = old is None and found[0] not in known
            if (is_new and found[3]) or (old is not None and old[2:] != found[2:]):
                self._note(name, "EVENT_TYPE_WRITE")
            elif old is not None and old[1] != found[1]:
                self._note(name, "EVENT_TYPE_CHMOD")

    def _note(self, name: str, kind: str) -> None:
        event: dict[str, Any] = {"name": name, "type": kind}
        if self._has_entries:
            with contextlib.suppress(OSError):  # the file is gone
                event["entry"] = services.entry_of(os.path.join(self._path, name))
        self._events = [*self._events, event][-_MOST_EVENTS:]

    def take(self) -> list[dict[str, Any]]:
        self.look_again()
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(ValueError):  # closed before
            _ALL.remove(self)


WATCHERS: dict[str, DirectoryWatcher] = {}
_ALL: list[DirectoryWatcher] = []  # watchers of streams are here too


def note_upload(path: str) -> None:
    """Let the watchers note a file that the server has written."""
    for each in _ALL:
        each.look_again(path)


def create_watcher(request: dict[str, Any]) -> dict[str, Any]:
    if len(WATCHERS) >= _MOST_WATCHERS:
        raise services.CallFailed(
            "resource_exhausted", f"at most {_MOST_WATCHERS} watchers are possible"
        )
    name = f"watcher-{next(services.NUMBERS)}"
    WATCHERS[name] = DirectoryWatcher(request)
    return {"watcherId": name}


def _watcher(request: dict[str, Any]) -> DirectoryWatcher:
    if found := WATCHERS.get(request.get("watcherId", "")):
        return found
    raise services.CallFailed("not_found", "there is no such watcher")


def get_watcher_events(request: dict[str, Any]) -> dict[str, Any]:
    return {"events": _watcher(request).take()}


def remove_watcher(request: dict[str, Any]) -> dict[str, Any]:
    _watcher(request).close()
    WATCHERS.pop(request["watcherId"], None)
    return {}


def watch_directory(request: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
    watcher = DirectoryWatcher(request)
    begun = quiet = time.monotonic()
    try:
        yield {"start": {}}
        while not timeout or time.monotonic() - begun < timeout:
            time.sleep(_WATCH_SECONDS)
            for event in watcher.take():
                quiet = time.monotonic()
                yield {"filesystem": event}
            if time.monotonic() - quiet > services.KEEPALIVE_SECONDS:
                quiet = time.monotonic()
                yield {"keepalive": {}}
        raise services.CallFailed("deadline_exceeded", "the watch took longer than its timeout")
    finally:
        watcher.close()


_METADATA = "x-metadata-"  # headers of uploads

UNARY: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/process.Process/List": cell_services.list_processes,
    "/process.Process/Update": cell_services.update,
    "/process.Process/SendInput": cell_services.send_input,
    "/process.Process/SendSignal": cell_services.send_signal,
    "/process.Process/CloseStdin": cell_services.close_stdin_of,
    "/filesystem.Filesystem/Stat": cell_services.status_of,
    "/filesystem.Filesystem/MakeDir": cell_services.make_directory,
    "/filesystem.Filesystem/Move": cell_services.move,
    "/filesystem.Filesystem/ListDir": cell_services.list_directory,
    "/filesystem.Filesystem/Remove": cell_services.remove,
    "/filesystem.Filesystem/CreateWatcher": create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": remove_watcher,
}
STREAMS: dict[str, Callable[[dict[str, Any], float | None], Iterator[dict[str, Any]]]] = {
    "/process.Process/Start": cell_services.start,
    "/process.Process/Connect": cell_services.connect,
    "/filesystem.Filesystem/WatchDir": watch_directory,
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
            self._answering(lambda: self._read_file(services.path_of(query.get("path", ""))))
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
            self._stream(lambda: iter([cell_services.stream_input(services.messages_of(body))]))
        elif path in STREAMS:
            milliseconds = self.headers.get("Connect-Timeout-Ms", "")
            timeout = int(milliseconds) / 1000 if milliseconds.isdecimal() else None
            self._stream(lambda: STREAMS[path]((services.messages_of(body) or [{}])[0], timeout))
        else:
            self._send_json(404, {"code": "unimplemented", "message": f"{path} is not supported"})

    def _target(self) -> tuple[str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        return parts.path, dict(urllib.parse.parse_qsl(parts.query))

    def _answering(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except services.CallFailed as failure:
            status = services.STATUS.get(failure.code, 500)
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
        except services.CallFailed as failure:
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
        with services.telling():
            opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise services.CallFailed("invalid_argument", f"path is not a regular file: {path}")
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(found.st_size))
            self.end_headers()
            left = found.st_size
            while left and (data := file.read(min(left, services.CHUNK))):
                self.wfile.write(data)
                left -= len(data)
            self.close_connection = left > 0  # the file became shorter

    def _write_files(self, query: dict[str, str], body: bytes) -> None:
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/form-data"):
            uploads = list(_parts(kind, body))
        else:
            uploads = [("", body)]
        if query.get("path"):  # the signature may cover the path
            if len(uploads) != 1:
                raise ValueError("path: one file can be written there")
            uploads = [(query["path"], uploads[0][1])]
        metadata: dict[str, str] = {}
        for header, value in self.headers.items():
            if header.lower().startswith(_METADATA):
                metadata.setdefault(header.lower()[len(_METADATA) :], value)
        services.check_metadata(metadata)
        written = []
        for name, data in uploads:
            path = services.path_of(name)
            with services.telling():
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
                services.set_metadata(path, metadata)
            note_upload(path)
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
            yield "", data.removesuffix(b"\r\n")  # a form field; the URL names the path
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
