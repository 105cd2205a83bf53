"""An idle daemon: what it imports, and the memory that it and its launcher hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from cellwright.harness.servers.daemon import configuration
from tests.conftest import OPTIONAL, ROOT
from tests.hosts import edge

pytestmark = pytest.mark.needs("userns")
MIB = 1024  # KiB
OPTIONS = ("--pool", "0", *(f"--optional={layer}" for layer in OPTIONAL))
# Each is large, and a daemon needs it only for some requests or options.
LATER = {
    "asyncio", "hashlib", "html", "inspect", "msgspec.inspect", "random", "shutil", "sqlite3", "ssl", "subprocess",
    "tempfile",
    *(f"cellwright.harness.{name}" for name in (
        "making", "privacy", "sandbox.judging.judge", "sandbox.projects.open_cell", "search", "skills", "tools",
    )),
}  # fmt: skip


def test_a_daemon_imports_only_modules_that_every_call_needs(tmp_path: Path) -> None:
    edge.daemon_once(OPTIONS)  # a first one compiles the policy for this host, and keeps that
    command = [sys.executable, "-X", "importtime", "-m", "cellwright", "serve", *OPTIONS]
    with subprocess.Popen(
        [*command, "--socket", f"{tmp_path}/s"], cwd=ROOT, stderr=subprocess.PIPE, text=True,
    ) as daemon:  # fmt: skip
        assert daemon.stderr is not None
        said = []
        for line in daemon.stderr:
            if "serving" in line.partition("|")[0]:
                break
            said.append(line)
        daemon.terminate()
        daemon.stderr.read()
    imported = {line.rpartition("|")[2].strip() for line in said if line.startswith("import time:")}
    assert "cellwright.harness.servers.daemon.lifecycle" in imported
    assert sorted(imported & LATER) == []
    assert len([name for name in imported if name.startswith("cellwright.")]) <= 150


@pytest.mark.parametrize("calls", [0, 1])
def test_an_idle_daemon_with_its_launcher_takes_less_than_40_mib(calls: int) -> None:
    found = edge.daemon_once(OPTIONS, calls=calls, idle_seconds=0)["memory"]
    assert len(found["processes"]) == 4, found
    assert found["pss"] < 40 * MIB, found


@pytest.mark.parametrize(("mebibytes", "ready"), [(480, 0), (1023, 0), (1024, 8), (65_536, 8)])
def test_a_host_with_little_memory_keeps_no_cell_ready(
    mebibytes: int, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": mebibytes * 256}
    monkeypatch.setattr(configuration.os, "sysconf", sizes.__getitem__)
    assert configuration.default_pool() == ready
