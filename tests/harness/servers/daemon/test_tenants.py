"""Users of one group share a daemon of root: each has cells, sessions and quotas of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.remote.frames import DaemonStatus
from cellwright.harness.servers.daemon import tenants as module
from cellwright.harness.servers.daemon.configuration import (
    OWNER,
    DaemonConfiguration,
    QuotaTable,
    TenantRules,
    TenantTable,
)
from cellwright.harness.servers.daemon.daemon_server import ReloadState, status_for
from cellwright.harness.servers.daemon.quotas import Peer
from cellwright.harness.servers.daemon.tenants import TenantPlan, Tenants
from cellwright.harness.servers.measurements import Measurements
from cellwright.policies.errors import QuotaExceeded
from cellwright.policies.policy import Policy
from tests.harness.servers.daemon.configured import ConfiguredDaemon, configured
from tests.runner.test_ordinary_user import PYTHON, readable

__all__ = ["readable"]  # a fixture
GROUP, CI, ANN, BOB, STRANGER = 54_400, 54_401, 54_402, 54_403, 54_404
TEXT = f"""
policies = ["strict", "standard"]
socket_group = {GROUP}
[quota]
sessions = 1
[[tenants]]
name = "ci"
users = [{CI}]
policies = ["standard"]
calls = 1
queue = 0
cpu_seconds_per_minute = 0.05
"""
needs_root = [
    pytest.mark.needs("root", "userns"),
    pytest.mark.skipif(
        not Path(PYTHON).exists() or sys.version_info[:2] != (3, 11),
        reason="the system has no Python of this version that every user may read",
    ),
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[ConfiguredDaemon]:
    with tempfile.TemporaryDirectory(prefix="cellwright-tenants-", dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        with configured(Path(name), TEXT) as daemon:
            yield daemon


def as_user(
    readable: Path, daemon: ConfiguredDaemon, uid: int, code: str, *, groups: tuple[int, ...] = (GROUP,)
) -> Any:  # fmt: skip
    """Run code as a user, and return what it printed as JSON."""
    script = f"""
import sys, json
sys.path[:0] = [{str(readable)!r}]
from cellwright import Sandbox, CellwrightError
from cellwright.policies.errors import QuotaExceeded
def connected(policy=None):
    return Sandbox(connect={str(daemon.path)!r}, policy=policy)
def failure(call):
    try:
        call()
    except CellwrightError as error:
        return [type(error).__name__, error.what, getattr(error, "limit", "")]
{code}
"""
    done = subprocess.run(
        [PYTHON, "-I", "-c", script], user=uid, group=uid, extra_groups=groups, cwd="/",
        env={}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class TestAsOtherUsers:
    pytestmark = needs_root

    def test_a_member_of_the_group_runs_programs(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        code = "with connected() as s: print(json.dumps([s.policy.name, s.execute('6 * 7').value]))"
        assert as_user(readable, daemon, ANN, code) == ["strict", 42]

    def test_others_cannot_connect(self, readable: Path, daemon: ConfiguredDaemon) -> None:
        code = "print(json.dumps(failure(connected)))"
        kind, why, _ = as_user(readable, daemon, STRANGER, code, groups=())
        assert (kind, "belongs to another user" in why) == ("LaunchError", True)

    def test_what_the_mode_of_the_socket_lets_in_is_refused_all_the_same(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        daemon.path.chmod(0o666)
        try:
            code = "print(json.dumps(failure(connected)))"
            kind, why, _ = as_user(readable, daemon, STRANGER, code, groups=())
        finally:
            daemon.path.chmod(0o660)
        assert (kind, why) == ("PolicyError", f"this daemon serves user 0, not {STRANGER}")

    def test_sessions_of_one_id_are_each_users_own(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        code = """
with connected() as sandbox:
    session = sandbox.session("main")
    before = session.execute("'x' in globals()").value
    session.execute("x = 1")
    print(json.dumps([before, failure(lambda: sandbox.session("another"))]))
"""
        for uid in (ANN, BOB):
            before, (kind, why, limit) = as_user(readable, daemon, uid, code)
            assert before is False
            assert (kind, limit) == ("QuotaExceeded", "sessions")
            assert why == f"quota of tenant uid-{uid}: at most 1 sessions at once"

    def test_the_key_of_another_tenants_session_opens_nothing(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        with daemon.sandbox() as sandbox:
            session = sandbox.session("mine")
            session.execute("secret = 1")
            key = session._key  # type: ignore[attr-defined]
            code = f"""
with connected() as sandbox:
    from cellwright.harness.sandbox.remote.frames import ListSessionFiles, Files
    ask = sandbox._cells._requests.ask
    print(json.dumps(failure(lambda: ask(ListSessionFiles({key!r}), Files))))
"""
            kind, why, _ = as_user(readable, daemon, BOB, code)
        assert (kind, "unknown to the daemon" in why) == ("SessionLost", True)

    def test_a_named_tenant_has_its_policies_and_its_cpu_time(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        code = """
with connected() as sandbox:
    told = [sandbox.policy.name, failure(lambda: connected("strict"))]
    for _ in range(50):
        if found := failure(lambda: sandbox.execute("sum(range(3_000_000))")):
            break
    print(json.dumps([*told, found]))
"""
        policy, wrong, found = as_user(readable, daemon, CI, code)
        assert policy == "standard"
        assert wrong[:2] == ["PolicyError", "policy: 'strict' is not one of the daemon's: standard"]
        assert (found[0], found[2]) == ("QuotaExceeded", "cpu")
        with daemon.sandbox() as sandbox:  # the others go on
            assert sandbox.execute("1").ok
        assert daemon.scrape()["cellwright_requests_refused_total{limit=cpu,tenant=ci}"] == 1

    def test_status_tells_a_tenant_of_itself_only(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        code = """
with connected() as sandbox:
    from cellwright.harness.sandbox.remote.frames import DaemonStatus, GetStatus
    status = sandbox._cells._requests.ask(GetStatus(), DaemonStatus)
    print(json.dumps([[each.name for each in status.tenants], status.configuration]))
"""
        assert as_user(readable, daemon, BOB, code) == [[f"uid-{BOB}"], ""]

    def test_users_that_the_file_does_not_name_share_a_label(
        self, readable: Path, daemon: ConfiguredDaemon
    ) -> None:
        for uid in (ANN, BOB):
            as_user(readable, daemon, uid, "connected().close(); print(1)")
        series = [name for name in daemon.scrape() if "tenant_sessions" in name]
        assert not [name for name in series if "uid-" in name]
        assert "cellwright_tenant_sessions{tenant=other}" in series


# the tenant of a process, without other users


def tenants_of(configuration: DaemonConfiguration, rules: TenantRules) -> Tenants:
    def make(*_: object) -> Any:
        return _NoSandbox()

    policies = {"strict": Policy(name="strict"), "other": Policy(name="other")}
    return Tenants(TenantPlan(configuration, policies, rules), make)


class _NoSandbox:
    def _state(self) -> None:
        return None

    def close(self) -> None:
        pass


def rules(group: int | None = GROUP, **more: Any) -> TenantRules:
    return TenantRules(group, more.get("by_user", {}), more.get("by_group", {}))


def test_a_user_comes_before_its_groups_and_the_owner_needs_none() -> None:
    tenants = tenants_of(DaemonConfiguration(), rules(by_user={7: "a"}, by_group={8: "b", 9: "c"}))
    assert tenants.tenant_of(7, frozenset({GROUP, 8})) == "a"
    assert tenants.tenant_of(1, frozenset({GROUP, 9, 8})) == "b"
    assert tenants.tenant_of(1, frozenset({GROUP})) == "uid-1"
    assert tenants.tenant_of(os.geteuid(), frozenset()) == OWNER
    with pytest.raises(PolicyError, match="not 1"):
        tenants.tenant_of(1, frozenset({8}))
    tenants.close()


def test_without_a_group_only_the_owner_connects() -> None:
    tenants = tenants_of(DaemonConfiguration(), rules(None))
    with pytest.raises(PolicyError):
        tenants.tenant_of(os.geteuid() + 1, frozenset({0, GROUP}))
    tenants.close()


def test_users_that_are_gone_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TENANTS", 3)
    tenants = tenants_of(DaemonConfiguration(), rules())
    for uid in range(1, 20):
        tenants.check(Peer(1, uid, frozenset({GROUP})), "strict")
    assert len(list(tenants.all())) == 3
    for tenant in tenants.all():
        monkeypatch.setattr(tenant, "is_idle", lambda: False)
    with pytest.raises(QuotaExceeded, match="at most 3 tenants"):
        tenants.check(Peer(1, 77, frozenset({GROUP})), "strict")
    tenants.close()


def test_a_reload_changes_who_belongs_where_and_what_it_may_use() -> None:
    ci = TenantTable(name="ci", users=(7,), calls=3, policies=("other",))
    tenants = tenants_of(DaemonConfiguration(tenants=(ci,)), rules(by_user={7: "ci"}))
    peer = Peer(1, 7, frozenset({GROUP}))
    with tenants.lent(peer, "") as service:
        assert service.name == "other"
    (ours,) = [each for each in tenants.all() if each.name == "ci"]
    assert ours.quota.settings.calls == 3
    changed = DaemonConfiguration(quota=QuotaTable(calls=1))
    tenants.reload(TenantPlan(changed, {"strict": Policy(name="strict")}, rules()))
    with tenants.lent(peer, "") as service:
        assert service.name == "strict"
    (now,) = [each for each in tenants.all() if each.name == "uid-7"]
    assert now.quota.settings.calls == 1
    with pytest.raises(PolicyError, match="'other' is not one of the daemon's: strict"):
        tenants.check(peer, "other")
    tenants.close()


def test_status_tells_of_the_tenant_that_a_client_belongs_to_now() -> None:
    """The connection may be older than a reload that gave its user to another tenant."""
    table = TenantTable(name="ci", users=(7,), policies=("other",))
    tenants = tenants_of(DaemonConfiguration(tenants=(table,)), rules(by_user={7: "ci", 8: "ci"}))
    peer = Peer(1, 7, frozenset({GROUP}), "ci")

    def told() -> DaemonStatus:
        counted = Measurements()
        return status_for(
            peer, tenants, counted, Counter(), uptime_seconds=1.0, reload=ReloadState()
        )

    for each in (peer, Peer(2, 8, frozenset({GROUP}), "ci"), Peer(3, 9, frozenset({GROUP}))):
        tenants.check(each, "")
    assert [each.name for each in told().tenants] == ["ci"]
    assert [each.name for each in told().policies] == ["other"]  # no name of another one
    policies = tenants.plan.policies
    tenants.reload(TenantPlan(DaemonConfiguration(), policies, rules(by_user={8: "ci"})))
    assert [each.name for each in told().tenants] == []  # it has made no call yet
    assert [each.name for each in told().policies] == ["strict", "other"]
    tenants.reload(TenantPlan(DaemonConfiguration(), policies, rules(group=GROUP + 1)))
    with pytest.raises(PolicyError, match="not 7"):
        told()
    tenants.close()


def test_a_service_that_a_request_was_lent_is_not_closed_by_a_reload() -> None:
    """The request may have been given it just before, and not have begun."""
    tenants = tenants_of(DaemonConfiguration(), rules())
    changed = TenantPlan(DaemonConfiguration(pool=1), tenants.plan.policies, rules())
    with tenants.lent(Peer(1, os.geteuid(), frozenset()), "strict") as service:
        tenants.reload(changed)
        assert tenants.sweep()
        assert not service._closed
    assert not tenants.sweep()
    assert service._closed
    tenants.close()


def test_a_reload_that_the_end_overtakes_leaves_no_cells() -> None:
    made: list[_NoSandbox] = []
    closed: list[_NoSandbox] = []

    class Sandbox(_NoSandbox):
        def close(self) -> None:
            closed.append(self)

    def make(*_: object) -> Any:
        made.append(Sandbox())
        if len(made) == 2:  # the sandbox of the reload
            tenants.close()
        return made[-1]

    policies = {"strict": Policy(name="strict")}
    tenants = Tenants(TenantPlan(DaemonConfiguration(), policies, rules()), make)
    with pytest.raises(PolicyError, match="shutting down"):
        tenants.reload(TenantPlan(DaemonConfiguration(pool=1), policies, rules()))
    assert set(closed) == set(made)
    assert len(made) == 2
