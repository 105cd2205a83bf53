"""The permission model: what it says, the kernel enforces."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from cellwright import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    PolicyError,
    ProcessPermission,
    Sandbox,
)
from cellwright.harness.sandbox.faces.permissions import policy_of
from cellwright.policies.network.rules import NetworkRules
from cellwright.policies.policy import Filesystem, Policy
from tests.conftest import OPTIONAL
from tests.escapes.without import errno_of


def sandbox_of(*permissions: object) -> Sandbox:
    policy = policy_of(PermissionSet(list(permissions)))  # type: ignore[arg-type]
    return Sandbox(policy=msgspec.structs.replace(policy, optional_layers=OPTIONAL), pool=0)


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    root = (
        Path("/srv" if os.access("/srv", os.W_OK) else "/var/tmp")
        / f"cellwright-test-{os.getpid()}"
    )
    for name in ("a.csv", "b.txt", ".env", "deep/c.csv", "deep/.git/config", "secrets/key"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "out").symlink_to("/etc/shadow")
    yield root
    shutil.rmtree(root)


def read(path: Path) -> str:
    return errno_of(f"open({str(path)!r}).read()")


def test_an_empty_set_denies_everything(data: Path) -> None:
    with sandbox_of() as sandbox:
        assert sandbox.execute(read(data / "a.csv")).value == errno.ENOENT
        assert sandbox.execute("import os\nos.fork()").error is not None


def test_files_are_read_as_allowed_and_not_as_denied(data: Path) -> None:
    files = FilePermission(
        allowed_paths=[str(data)], denied_paths=[f"{data}/secrets", f"{data}/*.txt"]
    )
    with sandbox_of(files) as sandbox:
        seen = {
            str(path.relative_to(data)): sandbox.execute(read(path)).value
            for path in data.rglob("*") if path.is_file()
        }  # fmt: skip
        assert seen == {
            "a.csv": 0, "deep/c.csv": 0, "b.txt": errno.ENOENT, ".env": errno.ENOENT,
            "deep/.git/config": errno.ENOENT, "secrets/key": errno.ENOENT, "out": errno.ENOENT,
        }  # fmt: skip
        assert sandbox.execute(read(data / "out")).value == errno.ENOENT
        assert sandbox.execute(errno_of(f"open('{data}/new', 'w')")).value == errno.EROFS


def _shown_by_base(data: Path) -> Policy:
    return Policy(name="base", filesystem=Filesystem(read=(str(data),)))


def _shown_by_a_base_that_hides(data: Path) -> Policy:
    return Policy(
        name="base", filesystem=Filesystem(read=(str(data),), hidden=(f"{data}/secrets",))
    )


ALL = FilePermission(allowed_paths=["DATA"], allow_hidden=True)
SECRETS = FilePermission(allowed_paths=["DATA/secrets"], allow_hidden=True)
DENIED_ELSEWHERE: dict[str, tuple[list[FilePermission], Callable[[Path], Policy] | None]] = {
    "another permission": ([ALL, FilePermission(denied_paths=["DATA/secrets"])], None),
    "another, of what that shows by name": ([SECRETS, FilePermission(denied_paths=["DATA/secrets"])], None),
    "another, by a glob": ([SECRETS, FilePermission(denied_paths=["DATA/s*"])], None),
    "one that comes before": ([FilePermission(denied_paths=["DATA/secrets"]), ALL], None),
    "level NONE": ([ALL, FilePermission(level=PermissionLevel.NONE, allowed_paths=["DATA/secrets"])], None),
    "what a base reads": ([FilePermission(denied_paths=["DATA/secrets"])], _shown_by_base),
    "level NONE, of what a base reads": (
        [FilePermission(level=PermissionLevel.NONE, allowed_paths=["DATA/secrets"])], _shown_by_base),
    "a base": ([SECRETS], _shown_by_a_base_that_hides),
}  # fmt: skip


@pytest.mark.parametrize("who", DENIED_ELSEWHERE)
def test_what_is_denied_anywhere_is_not_shown_by_any_other(data: Path, who: str) -> None:
    given, base = DENIED_ELSEWHERE[who]

    def here(paths: Sequence[str]) -> list[str]:
        return [path.replace("DATA", str(data)) for path in paths]

    files = [
        dataclasses.replace(
            each, allowed_paths=here(each.allowed_paths), denied_paths=here(each.denied_paths)
        )
        for each in given
    ]  # fmt: skip
    policy = policy_of(PermissionSet(files), base(data) if base else None)
    policy = msgspec.structs.replace(policy, optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(read(data / "secrets/key")).value == errno.ENOENT
        shown = 0 if ALL in given or base else errno.ENOENT
        assert sandbox.execute(read(data / "a.csv")).value == shown


def test_hidden_names_are_shown_where_that_is_allowed(data: Path) -> None:
    with sandbox_of(FilePermission(allowed_paths=[str(data)], allow_hidden=True)) as sandbox:
        assert sandbox.execute(read(data / ".env")).value == 0
        assert sandbox.execute(read(data / "deep/.git/config")).value == 0


def test_a_wildcard_shows_what_it_matches_and_no_more(data: Path) -> None:
    with sandbox_of(FilePermission(allowed_paths=[f"{data}/*"])) as sandbox:
        assert sandbox.execute(read(data / "a.csv")).value == 0
        assert sandbox.execute(read(data / "out")).value == errno.ENOENT  # it leads to /etc/shadow
        assert sandbox.execute(f"import os; sorted(os.listdir('{data}'))").value == [
            "a.csv",
            "b.txt",
            "deep",
            "secrets",
        ]


def test_level_none_shows_nothing(data: Path) -> None:
    with sandbox_of(
        FilePermission(level=PermissionLevel.NONE, allowed_paths=[str(data)])
    ) as sandbox:
        assert sandbox.execute(read(data / "a.csv")).value == errno.ENOENT


def test_what_may_be_written_can_be(data: Path) -> None:
    place = data / "w"
    place.mkdir(mode=0o777, exist_ok=True)
    place.chmod(0o777)
    with sandbox_of(
        FilePermission(level=PermissionLevel.WRITE, allowed_paths=[str(place)])
    ) as sandbox:
        assert sandbox.execute(errno_of(f"open('{place}/x', 'w').write('y')")).value == 0
    assert (place / "x").read_text() == "y"
    shutil.rmtree(place)


RUN = "import subprocess\ntry: e = subprocess.run({}, capture_output=True).returncode\nexcept OSError as error: e = -error.errno\ne"


def test_only_allowed_commands_exist() -> None:
    programs = ProcessPermission(
        allow_subprocess=True, allowed_commands=["cat", "l*", "dash"], denied_commands=["ls"]
    )
    with sandbox_of(programs) as sandbox:
        assert sandbox.execute(RUN.format(["cat", "/dev/null"])).value == 0
        for absent in ("ls", "id", "dash", "/bin/sh", "/usr/bin/ldd"):
            assert sandbox.execute(RUN.format([absent])).value == -errno.ENOENT, absent


def test_what_the_program_brings_along_cannot_be_executed() -> None:
    """Not as a file, not through the dynamic loader, not from memory."""
    bring = "import os, shutil\nopen('own', 'wb').write(open('given', 'rb').read()); os.chmod('own', 0o755)\n"
    given = Path(shutil.which("id") or "/usr/bin/id").read_bytes()
    loader = "os.path.realpath(__import__('glob').glob('/lib*/ld-linux-*.so.?')[0])"
    memory = (
        "m = os.memfd_create('m'); os.write(m, open('own', 'rb').read()); os.execve(m, ['id'], {})"
    )
    with sandbox_of(ProcessPermission(allow_subprocess=True, allowed_commands=["cat"])) as sandbox:
        run = lambda code: sandbox.execute(bring + code, files={"given": given})  # noqa: E731
        assert run(RUN.format(["./own"])).value == -errno.EACCES
        assert "uid=" not in run(f"os.execv({loader}, ['ld', './own'])").stdout
        assert "PermissionError" in str(run(memory).error)
    allowed = msgspec.structs.replace(
        policy_of(
            PermissionSet([ProcessPermission(allow_subprocess=True, allowed_commands=["cat"])])
        ),
        optional_layers=OPTIONAL,
    )
    processes = msgspec.structs.replace(allowed.processes, execute_own=True)
    with Sandbox(policy=msgspec.structs.replace(allowed, processes=processes), pool=0) as sandbox:
        assert sandbox.execute(bring + RUN.format(["./own"]), files={"given": given}).value == 0
        assert "uid=" in sandbox.execute(bring + memory, files={"given": given}).stdout


def test_a_shell_is_there_only_by_name_and_leave() -> None:
    programs = ProcessPermission(
        allow_subprocess=True, allow_shell=True, allowed_commands=["sh", "cat"]
    )
    with sandbox_of(programs) as sandbox:
        assert sandbox.execute(RUN.format(["sh", "-c", "cat /dev/null"])).value == 0
        assert sandbox.execute(RUN.format(["sh", "-c", "id"])).value == 127


def test_processes_are_counted() -> None:
    code = "import os, time\nn = 0\ntry:\n    while n < 50:\n        if os.fork() == 0: time.sleep(9)\n        n += 1\nexcept OSError: pass\nn"
    programs = ProcessPermission(allow_subprocess=True, allowed_commands=["cat"], max_processes=5)
    with sandbox_of(programs) as sandbox:
        assert sandbox.execute(code).value == 5  # and the program itself


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"allow_outbound": True}, "allowed_hosts: must name the hosts"),
        ({"allowed_ports": [443]}, "allowed_hosts: must name the hosts"),
        ({"allow_inbound": True}, "allow_inbound: must be False"),
        ({"allowed_hosts": ["*"]}, "must not cover names of different owners"),
        ({"allowed_hosts": ["10.0.0.1"]}, "is an address, not a name"),
    ],
)
def test_a_network_without_named_hosts_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        policy_of(PermissionSet().add(NetworkPermission(**asked)))  # type: ignore[arg-type]


def test_named_hosts_become_rules() -> None:
    permission = NetworkPermission(
        allowed_hosts=["api.example.org", "*.example.com"], allowed_ports=[443, 5432],
        denied_hosts=["bad.example.com"], allow_localhost=True,
    )  # fmt: skip
    network = policy_of(PermissionSet().add(permission)).network
    rules = NetworkRules(network.allow, network.deny, network.addresses)
    assert network.loopback
    assert rules.decide("api.example.org", 443, "https").is_allowed
    assert not rules.decide("api.example.org", 443, "tcp").is_allowed
    assert rules.decide("www.example.com", 5432, "tcp").is_allowed
    assert not rules.decide("bad.example.com", 443).is_allowed
    assert not rules.decide("api.example.org", 80).is_allowed
    network = policy_of(PermissionSet().add(NetworkPermission(allowed_hosts=["a.example"]))).network
    assert [rule.each_port() for rule in network.allow] == [(443,)]


def test_its_own_loopback_is_given() -> None:
    code = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(s.getsockname()) and 1\n'connected'"
    with sandbox_of(NetworkPermission(allow_localhost=True)) as sandbox:
        assert sandbox.execute(code).value == "connected"
    with sandbox_of(NetworkPermission()) as sandbox:
        assert sandbox.execute(code).value is None


@pytest.mark.parametrize(
    "permission",
    [FilePermission(allowed_paths=["/nowhere/*"]), FilePermission(allowed_paths=["relative"]),
     ProcessPermission(allow_subprocess=True, allowed_commands=["no-such-*"]), ProcessPermission(max_processes=-1)],
)  # fmt: skip
def test_what_makes_no_sense_is_said(permission: FilePermission | ProcessPermission) -> None:
    with pytest.raises(PolicyError):
        policy_of(PermissionSet([permission]))


def test_only_permissions_can_be_added() -> None:
    with pytest.raises(PolicyError, match="must be a FilePermission"):
        PermissionSet().add("read")  # type: ignore[arg-type]
