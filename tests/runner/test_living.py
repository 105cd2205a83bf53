"""Records of what lives: they list it, end it by proof alone, and name what a killed process left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cellwright import PolicyError, Sandbox
from cellwright.harness.cli.commands import run_command
from cellwright.runner.cgroups.cgroup_tree import start_time
from cellwright.runner.launching import living
from cellwright.testing import inspect
from tests.conftest import policy_named, soon

pytestmark = [pytest.mark.needs("userns"), pytest.mark.usefixtures("own_records")]
DIRECTORIES = living._directories


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert run_command(["ps", "--json"], None) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_sandbox_and_its_sessions_are_listed_while_they_live(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        with box.session("mine") as session:
            session.execute("1")
            sandbox, own = listed(capsys)
            assert (sandbox["kind"], sandbox["pid"]) == ("sandbox", os.getpid())
            assert (own["kind"], own["session"], own["state"]) == ("session", "mine", "live")
            assert own["policy"] == sandbox["policy"] == box.policy.name
            assert own["age_seconds"] >= 0  # type: ignore[operator]
            assert own["idle_seconds"] >= 0  # type: ignore[operator]
            assert run_command(["ps"], None) == 0
            assert "mine" in capsys.readouterr().out
        assert [row["kind"] for row in listed(capsys)] == ["sandbox"]
    assert listed(capsys) == []


@pytest.mark.needs("cgroup")
def test_what_a_session_uses_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as box, box.session() as session:
        session.execute("kept = bytearray(20_000_000); sum(range(3_000_000))")
        _, own = listed(capsys)
        assert own["memory_bytes"] > 20_000_000  # type: ignore[operator]
        assert own["cpu_seconds"] > 0  # type: ignore[operator]
        session.cell._held.cell.cgroup.freeze()  # type: ignore[attr-defined]
        assert listed(capsys)[1]["state"] == "frozen"


def test_a_session_is_ended_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    box = Sandbox(policy=policy_named("strict"), pool=0)
    with box, box.session("one") as one, box.session("two") as two:
        id = next(str(row["id"]) for row in listed(capsys) if row["session"] == "one")
        assert run_command(["kill", id], None) == 0
        assert capsys.readouterr().out == f"ended {id}\n"
        assert soon(lambda: not one.cell._held.is_alive())  # type: ignore[attr-defined]
        assert two.execute("6 * 7").value == 42
        assert box.execute("6 * 7").value == 42


def test_a_sandbox_is_ended_and_its_process_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        box.session("lost")
        assert run_command(["kill", "--all", "--json"], None) == 0
        assert json.loads(capsys.readouterr().out)
        assert soon(lambda: not inspect(box).generation.is_alive())
        assert box.execute("6 * 7").value == 42  # by another launcher


@pytest.mark.parametrize("given", [[], ["--all", "1.0"], ["1.0"], ["nonsense"]])
def test_what_is_to_be_ended_is_named(given: list[str]) -> None:
    with pytest.raises(PolicyError, match="^ID: "):
        run_command(["kill", *given], None)


@pytest.mark.parametrize("wrong", ["start", "name"])
def test_a_process_that_is_not_proven_to_be_ours_is_never_signalled(wrong: str) -> None:
    """As if the number of an ended process was given out again."""
    with Sandbox(policy=policy_named("strict"), pool=0):
        (found,) = living.list_living()
        with subprocess.Popen(["sleep", "60"]) as other:
            start = "1" if wrong == "start" else start_time(other.pid)
            process = living.ProcessIdentity(other.pid, start)
            record = msgspec.structs.replace(found.record, process=process)
            assert not living.kill(living.Living(found.path, record))
            assert other.poll() is None
            other.kill()


def test_what_a_process_of_another_pid_namespace_made_is_left_alone(tmp_path: Path) -> None:
    """As with a home directory that two containers share: no process may have its number here."""
    assert living.keep_record("sandbox", os.getpid(), "p", "python", {})
    (found,) = living.list_living()
    own = found.record.supervisor
    for namespace, is_removed in ((f"{own.namespace}1", False), (own.namespace, True)):
        dead = msgspec.structs.replace(own, pid=4194305, namespace=namespace)
        record = msgspec.structs.replace(found.record, supervisor=dead)
        name = f"4194305-{own.start}-{namespace}-7"
        path = found.path.with_name(f"{name}.json")
        path.write_bytes(msgspec.json.encode(record))
        socket = path.with_suffix(".sock")
        socket.touch()
        living.remove_leftovers()
        assert [path.exists(), socket.exists()] == [not is_removed] * 2
    assert found.path.exists()


def test_a_record_of_another_user_or_of_no_sense_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "cellwright" / "living"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "1-2-3.json").write_text('{"kind": "other"}')
    assert living.list_living() == []
    directory.chmod(0o777)
    assert living._directory() is None
    assert living.keep_record("sandbox", os.getpid(), "p", "python", {}) is None


def test_records_are_found_wherever_the_environment_of_their_maker_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login has XDG_RUNTIME_DIR, a service of a user a home, a system service of root's neither."""
    monkeypatch.setattr(living, "_directories", DIRECTORIES)
    monkeypatch.setattr(living, "_ROOTS_RUNTIME", str(tmp_path / "run"))
    names = ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    kept = living.keep_record("sandbox", os.getpid(), "service", "python", {})
    assert (kept is None) == (os.geteuid() != 0)
    for name in reversed(names):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert living.keep_record("sandbox", os.getpid(), name, "python", {})
    found = {each.record.policy for each in living.list_living()}
    assert found == {"XDG_RUNTIME_DIR", "XDG_CACHE_HOME", *(["service"] if kept else [])}


KILLED = """
import sys
sys.path[:0] = {path!r}
import msgspec
from cellwright import Network, Policy, Sandbox
box = Sandbox(policy=Policy(network=Network(loopback=True), optional_layers={optional!r}), pool=0)
session = box.session("left")
session.execute("x = 1")
exposed = session.expose(8000)
cell = session.cell._held.cell
cell.cgroup.freeze()
from cellwright.testing import inspect
import tempfile
from cellwright.runner.launching.living import directory_prefix
lock = tempfile.mkdtemp(prefix=directory_prefix())  # as a lock of packages has it
open(f"{{lock}}/wanted.txt", "w").close()
print(exposed.address, inspect(box).generation.launcher.keeper, lock, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    from cellwright.policies.policy import OPTIONAL_LAYERS

    code = KILLED.format(path=sys.path, optional=OPTIONAL_LAYERS)
    command = [sys.executable, "-I", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        address, keeper, lock = process.stdout.readline().split()
        assert run_command(["gc", "--json"], None) == 0
        assert os.path.exists(address)  # nothing of a living process is touched
        assert os.path.exists(lock)
        capsys.readouterr()
        process.kill()
    assert len(living.list_living()) == 2
    assert run_command(["gc"], None) == 0
    assert "removed" in capsys.readouterr().out
    assert living.list_living() == []
    assert not os.path.exists(os.path.dirname(address))
    assert not os.path.exists(lock)
    assert soon(lambda: not os.path.exists(f"/proc/{int(keeper)}"))
