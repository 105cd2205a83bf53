"""Watchers of directories, which compare two looks at a directory."""

import contextlib
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

from .calls import KEEPALIVE_SECONDS, NUMBERS, CallFailed, path_of, telling
from .files import below, entry_of

_WATCH_SECONDS, _MOST_WATCHED, _MOST_EVENTS, _MOST_WATCHERS = 0.2, 10_000, 1_000, 32


class DirectoryWatcher:
    """What changes in a directory, found by comparing two looks at it."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._path = path_of(request.get("path", ""))
        self._depth = 32 if request.get("recursive") else 1
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        with telling():
            if not os.path.isdir(self._path):
                os.stat(self._path)
                raise CallFailed("invalid_argument", f"path is not a directory: {self._path}")
        self._has_entries = bool(request.get("includeEntry"))
        self._seen = self._look()
        _ALL.append(self)
        threading.Thread(target=self._watch, daemon=True).start()

    def _look(self) -> dict[str, tuple[int, ...]]:
        seen: dict[str, tuple[int, ...]] = {}
        with contextlib.suppress(OSError):
            for path in itertools.islice(below(self._path, self._depth), _MOST_WATCHED):
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
        """Note what has changed; `uploaded` was written by the server, which sets its mode too."""
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
            with contextlib.suppress(OSError):  # it is gone
                event["entry"] = entry_of(os.path.join(self._path, name))
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
_ALL: list[DirectoryWatcher] = []  # streams have watchers here too


def note_upload(path: str) -> None:
    """Let the watchers note a file that the server has written."""
    for each in _ALL:
        each.look_again(path)


def create_watcher(request: dict[str, Any]) -> dict[str, Any]:
    if len(WATCHERS) >= _MOST_WATCHERS:
        raise CallFailed("resource_exhausted", f"at most {_MOST_WATCHERS} watchers are possible")
    name = f"watcher-{next(NUMBERS)}"
    WATCHERS[name] = DirectoryWatcher(request)
    return {"watcherId": name}


def _watcher(request: dict[str, Any]) -> DirectoryWatcher:
    if found := WATCHERS.get(request.get("watcherId", "")):
        return found
    raise CallFailed("not_found", "there is no such watcher")


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
            if time.monotonic() - quiet > KEEPALIVE_SECONDS:
                quiet = time.monotonic()
                yield {"keepalive": {}}
        raise CallFailed("deadline_exceeded", "the watch took longer than its timeout")
    finally:
        watcher.close()
