"""The process that CRIU dumps and restores: with a command in CRIU's place, and with CRIU itself."""

import os
import stat
from pathlib import Path

import pytest

from cellwright.benchmarks.criu import CriuAbsent, DumpedProcess

# Does what CRIU does, by signals: "dump" ends the process, "restore" makes another one.
WORKS = """#!/bin/sh
action=$1; [ "$action" = --version ] && { echo "Version: 9.9"; exit; }
while [ $# -gt 0 ]; do [ "$1" = --tree ] && kill -9 "$2"; shift; done
echo "$action" >>"$0.log"
"""
FAILS = """#!/bin/sh
[ "$1" = --version ] && { echo "Version: 9.9"; exit; }
echo "Warn something"; echo "Error (criu/vdso.c:381): vdso: Unexpected bounds" >&2; exit 1
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "images").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def install(places: Path, script: str) -> Path:
    command = places / "bin" / "criu"
    command.write_text(script)
    command.chmod(stat.S_IRWXU)
    return command


def test_a_process_is_dumped_and_restored(places: Path) -> None:
    command = install(places, WORKS)
    with DumpedProcess(places / "images") as process:
        pid = process._pid
        assert process.dump() > 0
        assert process.restore() > 0
    assert Path(f"{command}.log").read_text().split() == ["dump", "restore"] * 2
    assert not Path(f"/proc/{pid}").exists()


def test_what_criu_says_first_is_the_reason_that_there_are_no_numbers(places: Path) -> None:
    install(places, FAILS)
    with (
        pytest.raises(
            CriuAbsent, match=r"CRIU 9\.9 cannot dump a process here: Error .*381.*bounds"
        ),
        DumpedProcess(places / "images"),
    ):
        pass
