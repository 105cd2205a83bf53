"""Sessions of a daemon beside their calls: packages, ports, terminals, processes, longer lives."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import (
    BusyError,
    PackageError,
    PolicyError,
    Sandbox,
    Session,
    SessionLost,
)
from cellwright.harness.sandbox.remote.frames import ClosePort, Done
from tests.conftest import soon
from tests.forked import exit_code_of
from tests.harness.packages.wheels import good_wheel
from tests.harness.servers.daemon.daemons import Daemon, serving

pytestmark = pytest.mark.needs("userns")
_PATIENCE = 30.0
POLICIES = """[
    policy_named("workshop"),
    replace(policy_named("standard"), packages=Packages(allow=("thing",)), limits=Limits(wall_seconds=300)),
]"""
IMPORTS = (
    "from msgspec.structs import replace\nfrom cellwright.policies.policy import Limits, Packages"
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    place = Path(tmp_path_factory.mktemp("daemon"))
    folder = place / "wheels"
    folder.mkdir()
    good_wheel(folder, {"thing.py": b"n = 42\n"})
    good_wheel(folder, {"other.py": b""}, name="other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        with serving(
            place / "s", policies=POLICIES, imports=IMPORTS, lifetime=1000.0,
            find_links=str(folder), terminals_per_client=2, ports_per_session=2,
        ) as daemon:  # fmt: skip
            yield daemon


@pytest.fixture
def workshop(daemon: Daemon) -> Iterator[Sandbox]:
    with daemon.sandbox("workshop") as sandbox:
        yield sandbox


@pytest.fixture
def session(workshop: Sandbox) -> Iterator[Session]:
    with workshop.session() as session:
        yield session


# Packages


def test_clients_have_the_packages_that_the_policy_allows(daemon: Daemon) -> None:
    with daemon.sandbox("standard") as sandbox:
        code = "import thing\nthing.n"
        assert sandbox.execute(code, packages=["thing"]).value == 42
        assert sandbox.execute(code, packages=["thing==1.*"]).value == 42
        assert not sandbox.execute(code).ok
        with sandbox.session(packages=["thing"]) as session:
            assert session.execute(code).value == 42
        with pytest.raises(PackageError, match="packages.allow: must have other"):
            sandbox.execute(code, packages=["other"])
        for wrong in ([1], {"thing": 1}, Path("pylock.toml")):
            with pytest.raises(PolicyError, match="packages: must be"):
                sandbox.execute(code, packages=wrong)  # type: ignore[arg-type]


def test_a_policy_that_names_no_packages_gives_clients_none(workshop: Sandbox) -> None:
    for attempt in (
        lambda: workshop.execute("1", packages=["thing"]),
        lambda: workshop.session(packages=["thing"]),
    ):
        with pytest.raises(
            PolicyError, match="'workshop' allows clients none\nhint: .*packages.allow"
        ):
            attempt()


# Ports


def test_ports_are_counted_for_each_session(workshop: Sandbox) -> None:
    with workshop.session() as first, workshop.session() as second:
        ports = [first.expose(8000), first.expose(8001)]
        with pytest.raises(BusyError, match="exposed ports: at most 2 for each session"):
            first.expose(8002)
        second.expose(8000).close()
        ports.pop().close()
        first.expose(8002).close()


def test_closing_an_unknown_port_does_nothing(session: Session) -> None:
    assert isinstance(session._requests.ask(ClosePort("unknown"), Done), Done)  # type: ignore[attr-defined]


# Time


def test_a_session_is_extended_by_no_more_than_it_may_live(session: Session) -> None:
    session.extend(1000)
    with pytest.raises(
        PolicyError, match="at most 1000 s more, got 1001\nhint: .*--session-lifetime"
    ):
        session.extend(1001)
    with pytest.raises(PolicyError, match="seconds: must be"):
        session.extend(float("nan"))
    session.close()
    with pytest.raises(SessionLost):
        session.extend(1)


# Processes and terminals


def test_terminals_are_counted_and_a_closed_one_frees_its_place(
    daemon: Daemon, session: Session
) -> None:
    with session.terminal(["cat"]), session.terminal(["cat"]):
        with pytest.raises(BusyError, match="too many terminals: at most 2 for each client"):
            session.terminal(["cat"])
        assert len(session.processes()) == masters(daemon) == 2

    def opens_another() -> bool:
        try:
            session.terminal(["true"]).close()
        except BusyError:  # the daemon has not seen yet that they are closed
            return False
        return True

    assert soon(opens_another)
    assert soon(lambda: masters(daemon) == 0)


def masters(daemon: Daemon) -> int:
    """Return how many masters of terminals the daemon has open."""
    found = 0
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "ptmx" in str(link.readlink())
    return found


def test_the_policy_decides_on_terminals_and_ports(daemon: Daemon) -> None:
    with daemon.sandbox("standard") as sandbox, sandbox.session() as session:
        with pytest.raises(PolicyError, match="terminal: the policy allows none"):
            session.terminal()
        session.expose(8000).close()


def test_a_client_that_dies_hangs_up_its_terminal(daemon: Daemon, workshop: Sandbox) -> None:
    with workshop.session() as session:

        def die() -> None:
            with daemon.sandbox("workshop") as mine:
                mine.session(session.id).terminal(["cat"])
                os._exit(0)

        assert exit_code_of(die) == 0
        (program,) = session.processes()
        assert program.wait(_PATIENCE) == 128 + signal.SIGHUP
        assert re.fullmatch("<BackgroundProcess 1: 'cat', exit code 129>", repr(program))
