"""The service `process.Process`: commands of a cell, and the readers of what they write."""

import base64
import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from .calls import CHUNK, HOME, KEEPALIVE_SECONDS, NUMBERS, CallFailed, path_of, telling

_QUEUED = 64  # chunks for each reader of a process; then the process waits
_LINGER_SECONDS = 1.0  # for output after the end, whose pipe its children may hold open


class Process:
    """A command, and the readers of what it writes."""

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
