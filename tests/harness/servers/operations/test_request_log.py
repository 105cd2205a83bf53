"""The log of requests: whole lines, harmless texts, no waiting, and rotation."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.harness.servers.request_log import RequestLog


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_is_a_line_and_nothing_in_it_ends_the_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path))
    log.note("daemon", "Execute", "ok", 0.25, why='a\n{"server":"evil"}\x1b[2J\u2028', trace=None)
    log.note("daemon", "Execute", "ok", 0.25, trace="t" * 100_000)
    log.close()
    first, second = lines(path)
    assert (first["request"], first["seconds"], first["trace"]) == ("Execute", 0.25, None)
    assert first["why"] == 'a\\n{"server":"evil"}\\x1b[2J\\u2028'
    assert len(str(second["trace"])) < 200
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_lines_of_many_threads_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path))
    threads = [
        threading.Thread(target=lambda: [log.note("d", "k", "ok", 0, n=n) for n in range(100)])
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    log.close()
    assert len(lines(path)) == 800


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path))
    log.note("daemon", "first", "ok", 0)
    path.rename(tmp_path / "log.1")
    log.note("daemon", "second", "ok", 0)
    log.close()
    log.close()
    assert [each["request"] for each in lines(path)] == ["second"]
    assert [each["request"] for each in lines(tmp_path / "log.1")] == ["first"]


def test_a_full_pipe_is_not_waited_for_and_what_was_dropped_is_told(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"))
    reader, writer = os.pipe()
    kept, log._descriptor = log._descriptor, writer
    log._path = f"/proc/self/fd/{writer}"
    for _ in range(5000):
        log.note("daemon", "Execute", "ok", 0)
    assert log._dropped > 0
    assert os.read(reader, 1 << 20).endswith(b"}\n")
    log.note("daemon", "last", "ok", 0)
    (last,) = os.read(reader, 1 << 20).splitlines()[-1:]
    assert json.loads(last)["dropped"] > 0
    assert log._dropped == 0
    log._descriptor = kept
    log.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "nowhere"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "other")
    else:
        path = tmp_path / "none" / "log"
    with pytest.raises(PolicyError, match="--request-log"):
        RequestLog(str(path))
