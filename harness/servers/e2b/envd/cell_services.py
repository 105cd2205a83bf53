"""The services of envd in a cell: `filesystem.Filesystem`, files and directories; `process.Process`,
commands, and the readers of their output; and what they share: failures, paths, envelopes of streams.
"""

import base64
import contextlib
import errno
import itertools
import json
import os
import queue
import shutil
import signal
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

HOME = os.environ.get("HOME", "/workspace")
CHUNK = 64 * 1024
KEEPALIVE_SECONDS = 30.0
NUMBERS = itertools.count(1)  # numbers of processes and watchers
STATUS = {
    "invalid_argument": 400, "unauthenticated": 401, "permission_denied": 403, "not_found": 404,
    "already_exists": 409, "resource_exhausted": 429, "unimplemented": 501, "internal": 500,
    "deadline_exceeded": 504,
}  # fmt: skip


class CallFailed(Exception):  # noqa: N818 - it becomes an answer
    """A call that fails, with a code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Turn the errors of the system into those of the protocol."""
    try:
        yield
    except FileNotFoundError as error:
        raise CallFailed("not_found", str(error)) from None
    except FileExistsError as error:
        raise CallFailed("already_exists", str(error)) from None
    except PermissionError as error:
        raise CallFailed("permission_denied", str(error)) from None
    except OSError as error:
        code = "resource_exhausted" if error.errno in (28, 122) else "invalid_argument"
        raise CallFailed(code, str(error)) from None


def path_of(given: Any) -> str:
    if not isinstance(given, str) or "\0" in given:
        raise CallFailed("invalid_argument", "path: must be text")
    if given == "~" or given.startswith("~/"):
        given = given[2:]
    return os.path.normpath(os.path.join(HOME, given))


def messages_of(body: bytes) -> list[dict[str, Any]]:
    """Return the messages in the envelopes of a request."""
    found = []
    while body:
        flags, size = struct.unpack_from(">BI", body)
        if not flags & 2:
            found.append(json.loads(body[5 : 5 + size] or b"{}"))
        body = body[5 + size :]
    return found


_QUEUED = 64  # chunks for each reader of a process; then the process waits
_LINGER_SECONDS = 1.0  # time for output after the end, because children may hold the pipe open


class Process:
    """A command and the readers of its output."""

    def __init__(self, number: int, request: dict[str, Any]) -> None:
        config = request.get("process") or {}
        argv = [config.get("cmd") or "", *config.get("args", [])]
        if argv[0] == "/bin/bash" and argv[1:2] == ["-l"]:
            del argv[1]  # a cell has no profile that a login shell could read
        self.number, self.tag = number, request.get("tag")
        self.config = config
        self._readers: list[queue.Queue[dict[str, Any] | None]] = []
        self._lock = threading.Lock()
        self._end: dict[str, Any] | None = None
        stdin = subprocess.PIPE if request.get("stdin", True) else subprocess.DEVNULL
        cwd = path_of(config["cwd"]) if config.get("cwd") else HOME
        with telling():
            self._process = subprocess.Popen(
                argv, cwd=cwd, env={**os.environ, **config.get("envs", {})}, stdin=stdin,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def begin(self) -> None:
        """Read its output from now on; without a reader it is dropped."""
        streams = [("stdout", self._process.stdout), ("stderr", self._process.stderr)]
        threads = [
            threading.Thread(target=self._forward, args=each, daemon=True) for each in streams
        ]
        for each in threads:
            each.start()
        threading.Thread(target=self._await_end, args=[threads], daemon=True).start()

    def reader(self) -> "queue.Queue[dict[str, Any] | None]":
        """Return a queue of events, with None after the last."""
        events: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUED)
        events.put({"start": {"pid": self.pid}})
        with self._lock:
            if self._end is None:
                self._readers.append(events)
            else:
                events.put(self._end)
                events.put(None)
        return events

    def leave(self, events: "queue.Queue[dict[str, Any] | None]") -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._readers.remove(events)
        with contextlib.suppress(queue.Empty):  # for a thread that waits for room
            while True:
                events.get_nowait()

    def _tell(self, event: dict[str, Any] | None) -> None:
        for each in list(self._readers):
            while each in self._readers:
                with contextlib.suppress(queue.Full):
                    each.put(event, timeout=1.0)
                    break

    def _forward(self, name: str, pipe: Any) -> None:
        while data := os.read(pipe.fileno(), CHUNK):
            self._tell({"data": {name: base64.b64encode(data).decode()}})

    def _await_end(self, threads: list[threading.Thread]) -> None:
        code = self._process.wait()
        deadline = time.monotonic() + _LINGER_SECONDS
        for each in threads:
            each.join(max(0.0, deadline - time.monotonic()))
        said = f"exit status {code}" if code >= 0 else f"signal: {signal.Signals(-code).name}"
        end: dict[str, Any] = {"exited": code >= 0, "status": said}
        if code:
            end |= {"exitCode": code if code > 0 else 128 - code, "error": said}
        with self._lock:
            self._end = {"end": end}
        self._tell(self._end)
        self._tell(None)
        PROCESSES.pop(self.number, None)

    def write(self, data: bytes) -> None:
        if self._process.stdin is None:
            raise CallFailed(
                "invalid_argument", "the process has no standard input: start it with stdin=True"
            )
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except (BrokenPipeError, ValueError):
            raise CallFailed("not_found", "the process has closed its standard input") from None

    def close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


PROCESSES: dict[int, Process] = {}


def _selected(request: dict[str, Any]) -> Process:
    wanted = request.get("process") or {}
    for each in list(PROCESSES.values()):
        if each.pid == wanted.get("pid") or (wanted.get("tag") and each.tag == wanted["tag"]):
            return each
    raise CallFailed("not_found", f"there is no such process: {json.dumps(wanted)[:100]}")


def list_processes(_: dict[str, Any]) -> dict[str, Any]:
    return {"processes": [
        {"config": each.config, "pid": each.pid, **({"tag": each.tag} if each.tag else {})}
        for each in list(PROCESSES.values())
    ]}  # fmt: skip


def start(request: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
    if request.get("pty"):
        raise CallFailed("unimplemented", "pty: a program of a cell cannot make terminals")
    process = Process(next(NUMBERS), request)
    events = process.reader()
    PROCESSES[process.number] = process
    process.begin()
    yield from _followed(process, events, timeout, is_killed=True)


def connect(request: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
    process = _selected(request)
    yield from _followed(process, process.reader(), timeout, is_killed=False)


def _followed(
    process: Process, events: "queue.Queue[dict[str, Any] | None]", timeout: float | None,
    *, is_killed: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the events of a process; after `timeout` seconds fail, and with `is_killed` kill it."""
    deadline = time.monotonic() + timeout if timeout else float("inf")
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                if is_killed:
                    process.kill(signal.SIGKILL)
                raise CallFailed("deadline_exceeded", "the process took longer than its timeout")
            try:
                event = events.get(timeout=min(left, KEEPALIVE_SECONDS))
            except queue.Empty:
                if deadline - time.monotonic() > 0:
                    yield {"event": {"keepalive": {}}}
                continue
            if event is None:
                return
            yield {"event": event}
    finally:
        process.leave(events)


def send_input(request: dict[str, Any]) -> dict[str, Any]:
    given = request.get("input") or {}
    _selected(request).write(base64.b64decode(given.get("stdin") or given.get("pty") or ""))
    return {}


def stream_input(messages: list[dict[str, Any]]) -> dict[str, Any]:
    process: Process | None = None
    for each in messages:
        if "start" in each:
            process = _selected(each["start"])
        elif "data" in each and process:
            process.write(base64.b64decode((each["data"].get("input") or {}).get("stdin") or ""))
    return {}


def send_signal(request: dict[str, Any]) -> dict[str, Any]:
    known = {
        "SIGNAL_SIGKILL": signal.SIGKILL,
        "SIGNAL_SIGTERM": signal.SIGTERM,
        9: signal.SIGKILL,
        15: signal.SIGTERM,
    }
    number = known.get(request.get("signal", ""))
    if number is None:
        raise CallFailed("invalid_argument", "signal: must be SIGKILL or SIGTERM")
    _selected(request).kill(number)
    return {}


def close_stdin_of(request: dict[str, Any]) -> dict[str, Any]:
    _selected(request).close_stdin()
    return {}


def update(_: dict[str, Any]) -> dict[str, Any]:
    raise CallFailed("unimplemented", "pty: a program of a cell cannot make terminals")


_METADATA = "user.e2b."


def entry_of(path: str) -> dict[str, Any]:
    found = os.lstat(path)
    is_link = stat.S_ISLNK(found.st_mode)
    shown = found
    if is_link:
        with contextlib.suppress(OSError):
            shown = os.stat(path)
    kind = "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(shown.st_mode) else "FILE_TYPE_FILE"
    modified = datetime.fromtimestamp(found.st_mtime, timezone.utc)  # noqa: UP017 - of any Python
    entry: dict[str, Any] = {
        "name": os.path.basename(path), "type": kind, "path": path, "size": str(found.st_size),
        "mode": stat.S_IMODE(found.st_mode), "permissions": stat.filemode(found.st_mode),
        "owner": "user", "group": "user", "modifiedTime": modified.isoformat().replace("+00:00", "Z"),
    }  # fmt: skip
    if is_link:
        entry |= {"symlinkTarget": os.path.realpath(path), "isSymlink": True}
    if metadata := metadata_of(path):
        entry["metadata"] = metadata
    return entry


def metadata_of(path: str) -> dict[str, str]:
    """Return the metadata of a file, which its extended attributes hold (xattr(7))."""
    with contextlib.suppress(OSError):
        names = os.listxattr(path, follow_symlinks=False)
        values = {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in names
            if name.startswith(_METADATA)
        }
        return {
            name[len(_METADATA) :]: each.decode("utf-8", "replace") for name, each in values.items()
        }
    return {}


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise CallFailed for metadata that E2B refuses."""
    size = sum(len(_METADATA) + len(name) + len(value) for name, value in metadata.items())
    texts = "".join([*metadata, *metadata.values()])
    if size > 4096 or any(not 0 < len(name) <= 246 for name in metadata):
        raise CallFailed(
            "invalid_argument", "metadata: at most 246 characters a key, and 4096 in all"
        )
    if any(not " " <= sign <= "~" for sign in texts):
        raise CallFailed("invalid_argument", "metadata: must be printable ASCII")


def set_metadata(path: str, metadata: dict[str, str]) -> None:
    """Replace the metadata of a file."""
    for name in metadata_of(path):
        os.removexattr(path, _METADATA + name)
    try:
        for name, value in metadata.items():
            os.setxattr(path, _METADATA + name, value.encode())
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise CallFailed(
            "invalid_argument", "metadata: the files of cells hold it from Linux 6.6 on"
        ) from None


def status_of(request: dict[str, Any]) -> dict[str, Any]:
    with telling():
        return {"entry": entry_of(path_of(request.get("path", "")))}


def make_directory(request: dict[str, Any]) -> dict[str, Any]:
    path = path_of(request.get("path", ""))
    with telling():
        if os.path.isdir(path):
            raise FileExistsError(17, "directory already exists", path)
        os.makedirs(path)
        return {"entry": entry_of(path)}


def move(request: dict[str, Any]) -> dict[str, Any]:
    source, target = path_of(request.get("source", "")), path_of(request.get("destination", ""))
    with telling():
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)
        return {"entry": entry_of(target)}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    path = path_of(request.get("path", ""))
    with telling(), contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return {}


def list_directory(request: dict[str, Any]) -> dict[str, Any]:
    path, depth = path_of(request.get("path", "")), int(request.get("depth") or 1)
    with telling():
        if not os.path.isdir(path):
            os.stat(path)
            raise CallFailed("invalid_argument", f"path is not a directory: {path}")
        return {"entries": [entry_of(each) for each in below(path, depth)]}


def below(path: str, depth: int) -> Iterator[str]:
    for name in sorted(os.listdir(path)):
        each = os.path.join(path, name)
        yield each
        if depth > 1 and os.path.isdir(each) and not os.path.islink(each):
            yield from below(each, depth - 1)
