"""The guest payloads of ../shared/attacks as the second request of a session, among others that live.

Beside it a session waits that has something to lose, and a program runs in a cell of its own.
Afterwards the next request, both of those, and the host must be as if nothing had happened, or the
session must say that it is lost.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright import Sandbox, SandboxResult, Session, SessionLost
from tests.conftest import SHARED, policy_named
from tests.escapes.test_payloads import ENDED, SETTINGS, Host, verdict_of
from tests.escapes.test_payloads import host as host

pytestmark = [pytest.mark.needs("shared"), pytest.mark.slow]

HEADER = f"import os; os.environ.update({SETTINGS!r})\n"
ATTACKS = sorted(
    path for path in (SHARED / "attacks").glob("*.py") if not path.name.startswith("PXY-")
)
ABOUT_SESSIONS = ("SESS-", "COL-", "LANG-", "SIDE-")  # run under the strictest profile as well
# They send frames while their request runs: the word of a program about itself, or a breach.
FORGE = {"PROTO-01", "PROTO-02", "PROTO-03", "PROTO-05", "PROTO-06", "PROTO-13"}
# It finds no bash where no program can be started.
SKIP = {"strict": "LANG-01", "standard": "PXY-"}
CASES = [
    (profile, path)
    for path in ATTACKS
    for profile in ("standard", "strict")
    if profile == "standard" or path.name.startswith(ABOUT_SESSIONS)
    if not path.name.startswith(SKIP[profile])
]
# Inside a cell, whatever a guest could have left for another one.
LEFT = """
import builtins, os, sys
seen = [name for name in (*dir(builtins), *sys.modules, *os.environ) if "sbx" in name.lower()]
for top in ("/workspace", "/tmp", "/dev/shm"):
    seen += [name for name in os.listdir(top) if "sbx" in name]
seen += [open(f"/proc/{pid}/comm").read() for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 2]
(mine if "mine" in globals() else None), seen
"""


@pytest.fixture(scope="module", params=["standard", "strict"])
def sandbox(request: pytest.FixtureRequest, host: Host) -> Iterator[Sandbox]:
    policy = policy_named(request.param)
    limits = msgspec.structs.replace(policy.limits, wall_seconds=34.0, cpu_seconds=60.0)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits), pool=2) as box:
        yield box


@pytest.fixture
def neighbour(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as session:
        assert session.execute("mine = 'kept'").ok
        yield session


@pytest.fixture
def running(sandbox: Sandbox) -> Iterator[Any]:
    """A program in a cell of its own that is to say the same whatever its neighbours do."""
    run = sandbox.start("print('up', flush=True)\nimport time\ntime.sleep(300)\n")
    assert next(run.output()) == ("stdout", b"up\n")
    yield run
    run.cancel()
    ended = run.result()
    assert (ended.reason, ended.stdout, ended.violations) == ("cancelled", "up\n", ())


@pytest.mark.parametrize(
    ("sandbox", "payload"), CASES, indirect=["sandbox"],
    ids=[f"{profile}-{path.name.partition('_')[0]}" for profile, path in CASES],
)  # fmt: skip
def test_a_payload_stays_inside_its_session(
    sandbox: Sandbox, host: Host, neighbour: Session, running: Any, payload: Path
) -> None:
    case = payload.name.partition("_")[0]
    with sandbox.session() as session:
        session.execute("mine = 1", files={"sbx_in_file": b"given"})
        result = _run(session, payload, 7.0 if case in ("RES-14", "RES-15") else None)
        escaped, detail = verdict_of(result, case)
        assert not escaped, detail
        assert not detail.startswith(("REFUSED", "SKIP"))
        if escaped is None:
            assert case in ENDED, (result.status, result.reason, result.error, result.stderr[-500:])
        assert host.canary not in str(result.to_dict())
        _look_at_the_files(session, host)
        _look_at_the_next(session, result, case)
    assert neighbour.execute(LEFT).value == ["kept", []]
    assert sandbox.execute(LEFT).value == [None, []]
    assert host.connections() == 0
    assert host.process.poll() is None


def _run(session: Session, payload: Path, timeout: float | None = None) -> SandboxResult:
    return session.execute(HEADER + payload.read_text(), timeout=timeout, collect=["*"])


def _look_at_the_files(session: Session, host: Host) -> None:
    """Whatever the guest made of /workspace, the host gets its bytes or nothing."""
    if session.lost:
        return
    for file in session.files()[:50]:
        try:
            assert host.canary.encode() not in session.download(file.path)
        except Exception as error:  # noqa: BLE001 - of one kind, whatever it met
            assert type(error).__name__ == "WorkspaceError"
    assert not os.path.exists("/etc/sbx_overwrite_target")
    assert not os.path.exists("/tmp/sbx_overwrite_target")


def _look_at_the_next(session: Session, result: SandboxResult, case: str) -> None:
    """The next request has its own answer and the state from before, or there is no session."""
    assert result.session_lost == bool(session.lost)
    try:
        after = session.execute("mine, 6 * 7", files={"sbx_in_file": b"again"})
    except SessionLost:
        return
    if after.session_lost:
        assert case in FORGE, (after.reason, after.error)
        assert after.value is None
    elif after.error:  # no room for the file, or a process too many
        assert "sbx_in_file" in after.error or "OSError" in after.error or "Memory" in after.error
    else:
        assert after.value == [1, 42]


def _payload(case: str) -> Path:
    (payload,) = (path for path in ATTACKS if path.name.startswith(case))
    return payload


@pytest.mark.parametrize("sandbox", ["standard"], indirect=True)
@pytest.mark.parametrize("case", ["SESS-01", "SIDE-01", "SIDE-03"])
def test_what_is_left_for_the_next_is_found_in_the_same_session_alone(
    sandbox: Sandbox, case: str
) -> None:
    with sandbox.session() as one, sandbox.session() as other:
        assert verdict_of(_run(one, _payload(case)), case)[0] is False
        again = verdict_of(_run(one, _payload(case)), case)
        assert again[0] is True, "the payload finds what it left: it would find it in another cell"
        assert verdict_of(_run(other, _payload(case)), case)[0] is False
        assert verdict_of(sandbox.execute(HEADER + _payload(case).read_text()), case)[0] is False


@pytest.mark.parametrize("sandbox", ["strict"], indirect=True)
def test_random_state_is_no_two_sessions(sandbox: Sandbox) -> None:
    """The hash seed is the launcher's, and so the same for all its cells: README.md says so."""
    seen: list[dict[str, str]] = []
    for number in range(50):
        with sandbox.session() as session:
            first = session if number % 2 else sandbox  # half of the cells are single-use
            result = first.execute(HEADER + _payload("SESS-02").read_text())
            detail = verdict_of(result, "SESS-02")[1]
            seen.append(json.loads(detail.removeprefix("CHECK_FLEET ")))
    for kind in seen[0].keys() - {"hash"}:
        assert len({each[kind] for each in seen}) == 50, kind


@pytest.mark.parametrize("sandbox", ["standard"], indirect=True)
def test_a_session_survives_a_crash_honestly(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        for epoch in (1, 2, 3):
            escaped, detail = verdict_of(_run(session, _payload("SESS-06")), "SESS-06")
            assert not escaped
            assert f"epoch={epoch}" in detail
        ended = session.execute("import ctypes\nctypes.string_at(0)")
        assert (ended.reason, ended.session_lost) == ("signal", True)
        with pytest.raises(SessionLost, match="request 4 ended it: signal"):
            session.execute("1")
