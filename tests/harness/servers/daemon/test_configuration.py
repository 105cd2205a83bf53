"""The daemon's configuration file: what it says, and what is refused with file, line and field."""

import grp
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.harness.servers.daemon.configuration import (
    DaemonConfiguration,
    read_configuration,
    tenant_rules,
)
from cellwright.harness.servers.daemon.lifecycle import check_start, plan_of
from cellwright.harness.servers.daemon.quotas import ServeLimits
from cellwright.policies.profiles.loading import MOST_BYTES
from cellwright.runner.settings import SessionSettings
from tests.conftest import ROOT

GROUP = grp.getgrgid(os.getegid()).gr_name
USER = pwd.getpwuid(os.geteuid()).pw_name
FULL = f"""
socket = "run/s"
socket_group = "{GROUP}"
policies = ["strict", "mine.toml"]
optional = ["landlock"]
pool = 3
metrics = "127.0.0.1:9464"
health = "127.0.0.1:8086"
request_log = "-"
audit = "trail.jsonl"
drain_seconds = 30

[sessions]
alive = 4
idle_seconds = 60

[limits]
running = 16

[quota]
calls = 2
cpu_seconds_per_minute = 60

[[tenants]]
name = "ci"
users = ["{USER}"]
calls = 8
policies = ["mine"]
"""


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "mine.toml").write_text('name = "mine"\n')
    path = tmp_path / "daemon.toml"
    path.write_text(text)
    return path


def test_an_empty_file_is_what_the_options_default_to(tmp_path: Path) -> None:
    read = read_configuration(written(tmp_path, ""))
    assert read == DaemonConfiguration()
    assert read.serve_limits == ServeLimits()
    assert read.sessions.settings == SessionSettings(evict=True)


def test_every_table_is_read_and_paths_count_from_the_file(tmp_path: Path) -> None:
    plan = plan_of(read_configuration(written(tmp_path, FULL)))
    read = plan.configuration
    assert read.socket == str(tmp_path / "run/s")
    assert read.audit == str(tmp_path / "trail.jsonl")
    assert read.request_log == "-"
    assert list(plan.policies) == ["strict", "mine"]
    assert "landlock" in plan.policies["mine"].optional_layers
    assert read.sessions.settings == SessionSettings(alive=4, idle_seconds=60, evict=True)
    assert read.serve_limits == ServeLimits(running=16)
    assert plan.rules.by_user == {os.geteuid(): "ci"}
    assert plan.rules.socket_group == os.getegid()
    assert read.tenants[0].settings.calls == 8
    assert read.quota.settings.cpu_seconds_per_minute == 60


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("polices = []", "line 1: .*did you mean policies\\?"),
        ("\n[sessions]\nidle_second = 1", "line 3: .*did you mean idle_seconds\\?"),
        ("[quota]\ncals = 1", "line 2: .*did you mean calls\\?"),
        ("[limits]\nrunnin = 1", "did you mean running"),
        ("zzz = 1", "README.md lists every field"),
        ("pool = -1", "line 1: .*pool"),
        ("pool = true", "line 1: "),
        ("policies = []", "line 1: "),
        ("policies = ['none.toml']", "none.toml: No such file"),
        ("policies = ['strict', 'strict']", "names must differ"),
        ("optional = ['x']", "optional"),
        ("socket_group = 'no such group'", "this host has no group"),
        ("[[tenants]]\nname = 'a'\nusers = [1]", "without socket_group"),
        ("socket_group = 1\n[[tenants]]\nname = 'a'", "neither users nor groups"),
        ("socket_group = 1\n[[tenants]]\nname = 'a b'\nusers=[1]", "line 3: "),
        ("socket_group = 1\n[[tenants]]\nname = 'owner'\nusers=[1]", "has a meaning"),
        ("socket_group = 1\n[[tenants]]\nname = 'a'\nusers=['no such user']", "has no user"),
        (
            "socket_group = 1\n[[tenants]]\nname='a'\nusers=[7]\n[[tenants]]\nname='b'\nusers=[7]",
            "belongs to a and to b",
        ),
        (
            "socket_group = 1\n[[tenants]]\nname='a'\nusers=[7]\npolicies=['x']",
            "'x' of a is not of",
        ),
        ("a = 'x", "not TOML"),
        ("a = " + "[" * 100_000, "nested too deeply|not TOML"),
        ("\x00", "not TOML"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PolicyError, match=f"(?s){path}.*{complaint}"):
        read_configuration(path)


def test_tenants_are_found_by_group_too(tmp_path: Path) -> None:
    text = "socket_group = 1\n[[tenants]]\nname = 'ops'\ngroups = [77, 'root']\n"
    rules = tenant_rules(read_configuration(written(tmp_path, text)))
    assert rules.by_group == {77: "ops", 0: "ops"}


# files that are none


def test_a_file_without_end_or_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PolicyError, match="not a regular file"):
        read_configuration(tmp_path / "fifo")
    with pytest.raises(PolicyError, match="not a regular file"):
        read_configuration(Path("/dev/zero"))
    with pytest.raises(PolicyError, match="directory"):
        read_configuration(tmp_path)
    path = written(tmp_path, f"policies = ['{tmp_path}/fifo']")
    with pytest.raises(PolicyError, match="fifo: not a regular file"):
        read_configuration(path)
    (tmp_path / "mine.toml").write_text('extends = "fifo"')
    path.write_text("policies = ['mine.toml']")
    with pytest.raises(PolicyError, match="fifo: not a regular file"):
        read_configuration(path)


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "daemon.toml"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(PolicyError, match=f"longer than {MOST_BYTES} bytes"):
        read_configuration(path)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_another_user_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, "")
    path.chmod(mode)
    with pytest.raises(PolicyError, match="another user may write it"):
        read_configuration(path)


# the command line


def cellwright(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cellwright", "serve", *arguments], cwd=ROOT,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_file_is_checked_without_serving(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    done = cellwright("--config", str(path), "--check")
    assert (done.returncode, done.stdout) == (0, f"{path}: valid: strict, mine\n"), done.stderr
    path.write_text("pol = 1")
    done = cellwright("--config", str(path), "--check")
    assert (done.returncode, "did you mean policies?" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('metrics = "192.0.2.1:9464"', "cannot listen at 192.0.2.1:9464"),
        ('metrics = "nowhere/metrics.sock"', "is no directory"),
        ('health = "192.0.2.1:8086"', "--health: cannot listen at 192.0.2.1:8086"),
        ('health = "nowhere:8086"', "--health: must be ADDRESS:PORT"),
        ('python = "2.7"', "2.7"),
        ('find_links = "nowhere"', "find_links: must be a directory"),
    ],
)
def test_a_check_finds_what_would_end_the_daemon_at_its_start(
    line: str, why: str, tmp_path: Path
) -> None:
    done = cellwright("--config", str(written(tmp_path, line)), "--check")
    assert (done.returncode != 0, why in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize(
    ("line", "package", "extra"),
    [
        ('metrics = "127.0.0.1:0"', "prometheus_client", "metrics"),
        ('health = "127.0.0.1:0"', "uvicorn", "web"),
        ("opentelemetry = true", "opentelemetry", "otlp"),
    ],
)
def test_a_check_finds_an_extra_that_is_missing(
    line: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = read_configuration(written(tmp_path, line))
    check_start(configuration)
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cellwright.harness.servers.prometheus", None)
    for name in ("http_server", "http_access", "operators_endpoint"):
        monkeypatch.delitem(sys.modules, f"cellwright.harness.servers.{name}", raising=False)
    with pytest.raises(PolicyError, match="is not installed") as refused:
        check_start(configuration)
    assert f"[{extra}]" in refused.value.hint


def test_other_options_are_refused_beside_a_file(tmp_path: Path) -> None:
    path = str(written(tmp_path, ""))
    done = cellwright("--config", path, "--pool", "3")
    assert (done.returncode, "--pool: cannot be combined" in done.stderr) == (2, True)
    done = cellwright("--check")
    assert (done.returncode, "requires --config" in done.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="user units restrict no addresses")
@pytest.mark.parametrize(
    ("text", "only_local"),
    [
        ("", True),
        ('metrics = "127.0.0.1:9464"\nhealth = "[::1]:8086"', True),
        ('metrics = "./m"\nhealth = "./h"', True),
        ('health = "0.0.0.0:8086"', False),
        ('metrics = "[::]:9464"', False),
        ("opentelemetry = true", False),
        ('policies = ["net.toml"]', False),
        ('policies = ["wheels.toml"]', False),
        ('policies = ["wheels.toml"]\nno_index = true', True),
    ],
)
def test_a_system_unit_allows_the_hosts_that_the_file_needs(
    tmp_path: Path, text: str, only_local: bool
) -> None:
    (tmp_path / "net.toml").write_text(
        'name = "net"\n[[network.allow]]\nhost = "files.example.org"\n'
    )
    (tmp_path / "wheels.toml").write_text('name = "wheels"\n[packages]\nallow = ["numpy"]\n')
    done = cellwright("--config", str(written(tmp_path, text)), "--units", str(tmp_path))
    assert done.returncode == 0, done.stderr
    service = (tmp_path / "cellwright.service").read_text()
    assert ("IPAddressDeny=any\n" in service) == only_local
    assert "@" not in service


def test_units_of_a_file_reload_it_and_let_its_group_connect(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    done = cellwright("--config", str(path), "--units", str(tmp_path))
    assert done.returncode == 0, done.stderr
    service = (tmp_path / "cellwright.service").read_text()
    assert f"-I -m cellwright serve --delegated --config {path}\n" in service
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in service
    assert "TimeoutStopSec=50\n" in service
    socket = (tmp_path / "cellwright.socket").read_text()
    assert f"SocketMode=0660\nSocketGroup={os.getegid()}\n" in socket
    assert f"ListenSequentialPacket={tmp_path}/run/s\n" in socket
