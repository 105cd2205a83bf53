"""Sessions of a daemon are branched, paused and resumed within the quotas of their tenant, and by it alone."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import ClosedError, PolicyError, Sandbox, Session, SessionLost
from cellwright.errors import PauseDiffers, PauseError
from cellwright.harness.servers.daemon.configuration import read_configuration
from cellwright.policies.errors import QuotaExceeded
from tests.conftest import soon
from tests.harness.servers.daemon.configured import ConfiguredDaemon, configured
from tests.harness.servers.daemon.test_tenants import ANN, BOB, CI, GROUP, as_user, needs_root
from tests.harness.test_branching import value
from tests.runner.test_ordinary_user import readable

__all__ = ["readable"]  # a fixture
pytestmark = pytest.mark.needs("userns")
TEXT = """
policies = ["strict", "standard"]
[pauses]
directory = "paused"
quota_bytes = 12_000_000
[sessions]
pause_seconds = 100_000
alive = 4
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfiguredDaemon]:
    with configured(tmp_path_factory.mktemp("daemon"), TEXT) as daemon:
        yield daemon


@pytest.fixture
def sandbox(daemon: ConfiguredDaemon) -> Iterator[Sandbox]:
    with daemon.sandbox() as box:
        yield box


def states(daemon: ConfiguredDaemon, tenant: str = "owner") -> list[Path]:
    return sorted((daemon.file.parent / "paused" / f"tenant-{tenant}").glob("*.session"))


def test_a_state_is_a_file_of_the_tenant_until_it_is_resumed_or_discarded(
    sandbox: Sandbox, daemon: ConfiguredDaemon
) -> None:
    for use in (lambda token: sandbox.resume(token).close(), sandbox.discard):
        token = sandbox.session().pause()
        (path,) = states(daemon)
        assert path.stat().st_mode & 0o7777 == 0o600
        use(token)
        assert states(daemon) == []


def test_another_policy_does_not_resume_it(sandbox: Sandbox, daemon: ConfiguredDaemon) -> None:
    token = sandbox.session().pause()
    with daemon.sandbox("standard") as other, pytest.raises(PauseDiffers) as refused:
        other.resume(token)
    assert any(each.startswith("policy") for each in refused.value.differs)
    sandbox.resume(token).close()


def test_states_have_the_quota_of_their_tenant(sandbox: Sandbox, daemon: ConfiguredDaemon) -> None:
    big = "import os; x = os.urandom(5 << 20)"
    sessions = [sandbox.session() for _ in range(2)]
    for each in sessions:
        each.execute(big)
    token = sessions[0].pause()
    with pytest.raises(PauseError, match="more memory"):
        sessions[1].pause()
    assert value(sessions[1], "len(x)") == 5 << 20
    sandbox.discard(token)
    sandbox.discard(sessions[1].pause())
    assert states(daemon) == []


def test_one_session_too_many_pauses_an_idle_one(
    sandbox: Sandbox, daemon: ConfiguredDaemon
) -> None:
    sessions = [sandbox.session() for _ in range(6)]
    for number, each in enumerate(sessions):
        each.execute(f"x = {number}")
    assert [each.paused for each in sessions].count(True) == 2
    assert [each.lost for each in sessions] == [""] * 6
    assert [value(each, "x") for each in sessions] == list(range(6))
    for each in sessions:
        each.close()
    assert states(daemon) == []


def test_a_daemon_without_a_directory_pauses_nothing(tmp_path: Path) -> None:
    with configured(tmp_path) as daemon, daemon.sandbox() as box, box.session() as session:
        session.execute("x = 1")
        for use in (session.pause, lambda: box.resume("cwp_"), lambda: box.discard("cwp_")):
            with pytest.raises(PolicyError, match="keeps no paused sessions"):
                use()
        (branch,) = session.branch()
        assert value(branch, "x") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[sessions]\npause_seconds = 5", "pauses.directory"),
        ("[sessions]\nmemory_bytes = 5", "pauses.directory"),
        ('[pauses]\ndirectory = "d"\nquota_bytes = 0', "quota_bytes"),
        ('[pauses]\nplace = "d"', "place"),
        ("[quota]\npaused_bytes = -1", "paused_bytes"),
    ],
)
def test_an_invalid_configuration_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "daemon.toml").write_text(text)
    with pytest.raises(PolicyError, match=why):
        read_configuration(tmp_path / "daemon.toml")


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "paused"
    place.mkdir()
    place.chmod(0o777)
    with (
        pytest.raises(AssertionError, match="others may write"),
        configured(tmp_path, '[pauses]\ndirectory = "paused"'),
    ):
        pytest.fail("it serves")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_daemon_resumes_what_is_pausable(
    tmp_path: Path, number: signal.Signals
) -> None:
    text = '[pauses]\ndirectory = "paused"\npausable = true'
    with configured(tmp_path, text) as daemon:
        with daemon.sandbox() as box:
            session = box.session(id="kept")
            session.execute("x = {'a': [1]}")
            token = session.pause()
        daemon.process.send_signal(number)
        daemon.wait()
    (tmp_path / "s").unlink(missing_ok=True)
    with configured(tmp_path, text) as daemon, daemon.sandbox() as box, box.resume(token) as same:
        assert (same.id, value(same, "x")) == ("kept", {"a": [1]})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_daemon_says_why_it_cannot_resume_the_rest(
    tmp_path: Path, number: signal.Signals
) -> None:
    text = '[pauses]\ndirectory = "paused"'
    with configured(tmp_path, text) as daemon, daemon.sandbox() as box:
        token = box.session().pause()
        daemon.process.send_signal(number)
        daemon.wait()
    (tmp_path / "s").unlink(missing_ok=True)
    with configured(tmp_path, text) as daemon, daemon.sandbox() as box:
        with pytest.raises(PauseError) as refused:
            box.resume(token)
        if number == signal.SIGKILL:
            assert isinstance(refused.value, PauseDiffers)
            assert any("launcher" in each for each in refused.value.differs)
        assert "pausable=True" in refused.value.hint
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait()


def test_branches_count_as_sessions(tmp_path: Path) -> None:
    text = f'[[tenants]]\nname = "us"\nusers = [{os.geteuid()}]\nsessions = 3'
    group = f"socket_group = {os.getegid()}\n"
    with configured(tmp_path, group + text) as daemon, daemon.sandbox() as box:
        session = box.session()
        session.execute("x = 1")
        with pytest.raises(QuotaExceeded, match="at most 3 sessions") as refused:
            session.branch(3)
        assert refused.value.limit == "sessions"
        assert len(session.branch(2)) == 2
        with pytest.raises(QuotaExceeded):
            session.branch(1)


def test_idle_sessions_that_are_paused_count_as_sessions(tmp_path: Path) -> None:
    text = f"""
socket_group = {os.getegid()}
[pauses]
directory = "paused"
[sessions]
pause_seconds = 0.05
[[tenants]]
name = "us"
users = [{os.geteuid()}]
sessions = 2
"""
    with configured(tmp_path, text) as daemon, daemon.sandbox() as box:
        sessions = [box.session(), box.session()]
        assert soon(lambda: all(each.paused for each in sessions))
        with pytest.raises(QuotaExceeded):
            box.session()
        assert [each.execute("1").ok for each in sessions] == [True, True]
        sessions[0].close()
        assert box.session().execute("1").ok


@pytest.fixture(scope="module")
def shared() -> Iterator[ConfiguredDaemon]:
    with tempfile.TemporaryDirectory(prefix="cellwright-paused-", dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        text = f"""
policies = ["strict"]
socket_group = {GROUP}
[pauses]
directory = "paused"
[quota]
paused_bytes = 8_000_000
[[tenants]]
name = "ci"
users = [{CI}]
paused_bytes = 40_000_000
"""
        with configured(Path(name), text) as daemon:
            yield daemon


class TestAsOtherUsers:
    pytestmark = needs_root

    def test_a_tenant_does_not_resume_the_session_of_another(
        self, readable: Path, shared: ConfiguredDaemon
    ) -> None:
        make = """
box = connected()
session = box.session(id="mine")
session.execute("x = 'of ann'")
print(json.dumps(session.pause()))
"""
        token = as_user(readable, shared, ANN, make)
        ann, bob = f"uid-{ANN}", f"uid-{BOB}"
        (path,) = states(shared, ann)
        use = f"""
box = connected()
print(json.dumps([failure(lambda: use({token!r})) for use in (box.resume, box.discard)]))
"""
        for uid in (BOB, CI):
            for kind, why, _ in as_user(readable, shared, uid, use):
                assert kind == "PauseError"
                assert "no such paused session" in why
        copy = path.parent.parent / f"tenant-{bob}" / path.name
        copy.parent.mkdir(0o700, exist_ok=True)
        shutil.copy(path, copy)  # even then the launcher is another one
        copy.chmod(0o600)
        resume = f"box = connected(); print(json.dumps(failure(lambda: box.resume({token!r}))))"
        assert as_user(readable, shared, BOB, resume)[0] == "PauseDiffers"
        copy.unlink()
        back = f"box = connected(); print(json.dumps(box.resume({token!r}).execute('x').value))"
        assert as_user(readable, shared, ANN, back) == "of ann"

    def test_a_tenant_neither_reads_nor_replaces_states(
        self, readable: Path, shared: ConfiguredDaemon
    ) -> None:
        as_user(
            readable, shared, ANN, "box = connected(); print(json.dumps(box.session().pause()))"
        )
        (path, *_) = states(shared, f"uid-{ANN}")
        attempt = f"""
import os
def tried(call):
    try:
        call()
    except OSError as error:
        return error.errno
path = {str(path)!r}
print(json.dumps([
    tried(lambda: open(path, "rb")), tried(lambda: open(path, "r+b")), tried(lambda: os.unlink(path)),
    tried(lambda: os.listdir(os.path.dirname(path))),
    tried(lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "x")),
]))
"""
        for uid in (ANN, BOB):
            assert as_user(readable, shared, uid, attempt) == [13] * 5

    def test_each_tenant_has_a_quota_of_its_own(
        self, readable: Path, shared: ConfiguredDaemon
    ) -> None:
        code = """
box = connected()
def pause():
    session = box.session()
    session.execute("import os; x = os.urandom(3 << 20)")
    return failure(session.pause)
print(json.dumps([pause() for _ in range(4)]))
"""
        told = as_user(readable, shared, BOB, code)
        assert told[0] is None
        assert told[-1][0] == "PauseError"
        assert as_user(readable, shared, CI, code) == [None] * 4


def test_frames_with_invalid_numbers_of_branches_are_refused(sandbox: Sandbox) -> None:
    from cellwright.harness.sandbox.remote.frames import BranchSession, OpenedBranches

    with sandbox.session() as session:
        key = session._key  # type: ignore[attr-defined]
        for n in (0, 9, 1 << 40):
            with pytest.raises((PolicyError, ClosedError)):
                session._requests.ask(BranchSession(key, n), OpenedBranches)  # type: ignore[attr-defined]


def test_a_session_that_is_paused_is_gone_for_all_clients(
    sandbox: Sandbox, daemon: ConfiguredDaemon
) -> None:
    session = sandbox.session(id="two")
    with daemon.sandbox() as other:
        same: Session = other.session(id="two")
        same.execute("x = 7")
        token = session.pause()
        with pytest.raises(SessionLost, match="it was paused"):
            same.execute("x")
        with other.resume(token) as resumed:
            assert value(resumed, "x") == 7
