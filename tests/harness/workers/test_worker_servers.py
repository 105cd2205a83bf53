"""Servers whose cells are made by workers."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mcp import Client

from cellwright import SessionLost
from cellwright.harness.servers.daemon.configuration import read_configuration
from cellwright.policies.errors import LauncherLost, PolicyError
from cellwright.runner.audit.verification import read, verify
from tests.conftest import soon
from tests.harness.servers.daemon.daemons import serving
from tests.harness.servers.mcp.servers import call, drive, piped, tools_file, yes
from tests.runner.test_leftovers import descendants, name_of

pytestmark = pytest.mark.needs("userns")


def workers_below(pid: int) -> list[int]:
    return [each for each in descendants(pid) if name_of(each) == "cell-worker\n"]


def test_a_daemon_serves_clients_by_workers(tmp_path: Path) -> None:
    trail = tmp_path / "trail.jsonl"
    with serving(tmp_path / "s", workers=2, audit=str(trail)) as daemon:
        with daemon.sandbox("standard") as sandbox, ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda n: sandbox.execute(f"{n}").value, range(16))) == [
                *range(16)
            ]
            with sandbox.session() as session:
                session.execute("n = 2")
                (copy,) = session.branch()
                assert [copy.execute("n + 1").value, session.execute("n").value] == [3, 2]
                assert session.run(["cat"], stdin="x").stdout == "x"
                assert copy.execute("open('a', 'w').write('b')").files[0].path == "a"
                assert copy.download("a") == b"b"
            workers = workers_below(daemon.pid)
            assert len(workers) == 4  # two of each policy
            kept = sandbox.session()
            for each in workers:
                os.kill(each, signal.SIGKILL)
            with pytest.raises((SessionLost, LauncherLost)):
                kept.execute("1")
            assert soon(lambda: not {*workers} & {*workers_below(daemon.pid)})
            assert sandbox.execute("3").value == 3
        assert daemon.end() == 0
        assert not workers_below(daemon.pid)
    assert verify(trail).ok
    assert {each.action for each in read(trail) if each.category == "session"} >= {"opened", "lost"}


@pytest.mark.parametrize("value", ["0", "257", '"many"'])
def test_the_configuration_refuses_another_number(tmp_path: Path, value: str) -> None:
    path = tmp_path / "daemon.toml"
    path.write_text(f"workers = {value}\n")
    path.chmod(0o600)
    with pytest.raises(PolicyError, match="workers"):
        read_configuration(path)
    path.write_text('workers = "auto"\n')
    assert read_configuration(path).workers == "auto"


def test_an_mcp_server_has_tools_and_paused_sessions_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    async def body(client: Client) -> None:
        assert (await call(client, "run_code", code="import tools\ntools.add(1, 2)"))["value"] == 3
        opened = await call(client, "run_code", code="x = 40", session="new")
        id = opened["session"]
        await call(client, "sessions", pause=id)
        assert (await call(client, "run_code", code="x + 2", session=id))["value"] == 42
        await call(client, "sessions", pause=id)
        assert len(list(tmp_path.rglob("*.session"))) == 1

    drive(piped("--tools", str(tools_file(tmp_path)), "--workers", "2", person=yes()), body)
    assert list(tmp_path.rglob("*.session")) == []
