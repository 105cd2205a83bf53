"""Shown paths are those that the policy named when it was resolved: a link that takes the place of a
path, or of a directory above it, shows nothing."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright import (
    FilePermission,
    HostSettings,
    PermissionLevel,
    PermissionSet,
    PolicyError,
    PoolSettings,
    Sandbox,
)
from cellwright.harness.sandbox.faces.permissions import policy_of
from cellwright.policies.errors import LaunchError
from cellwright.policies.policy import Filesystem, Python
from cellwright.runner.host.shown_paths import resolve
from tests.conftest import OPTIONAL, policy_named
from tests.escapes.without import errno_of


@pytest.fixture
def place() -> Iterator[Path]:
    """`ws` may be written by every user; `roots` is passed by its owner alone, and holds `inner/token`."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellwright-paths-") as name:
        root = Path(name)
        for path in (root / "ws" / "out", root / "roots" / "inner"):
            path.mkdir(parents=True)
        (root / "roots" / "inner" / "token").write_text("ONLY ITS OWNER")
        for path in (root / "ws", root / "ws" / "out"):
            path.chmod(0o777)
        root.chmod(0o755)
        (root / "roots").chmod(0o700)
        yield root


def leave_link(place: Path) -> str:
    return (
        f"import os\nos.rename('{place}/ws/out', '{place}/ws/old')\n"
        f"os.symlink('{place}/roots/inner', '{place}/ws/out')\n'left'"
    )


def test_a_link_that_a_program_left_is_not_followed_for_the_next_policy(place: Path) -> None:
    writes = policy_named("strict", filesystem=Filesystem(write=(f"{place}/ws",)))
    reads = policy_named("strict", filesystem=Filesystem(read=(f"{place}/ws/out",)))
    with Sandbox(policy=reads, pool=0) as sandbox:  # it can be shown while it is a directory
        assert sandbox.execute(f"import os; os.listdir('{place}/ws/out')").value == []
    with Sandbox(policy=writes, pool=0) as sandbox:
        assert sandbox.execute(leave_link(place)).value == "left"
    with pytest.raises(
        PolicyError, match=r"filesystem\.read: .*could have made the symbolic link .*out"
    ):
        Sandbox(policy=reads, pool=0)


@pytest.mark.parametrize("path", ["ws/out", "ws/out/deeper"])
def test_a_link_that_is_left_while_a_sandbox_lives_ends_its_next_launcher(
    place: Path, path: str
) -> None:
    (place / "ws/out/deeper").mkdir()
    (place / "roots/inner/deeper").mkdir()
    writes = policy_named("strict", filesystem=Filesystem(write=(f"{place}/ws",)))
    reads = policy_named("strict", filesystem=Filesystem(read=(f"{place}/{path}",)))
    with Sandbox(policy=reads, pool=PoolSettings(size=0, cells_per_launcher=1)) as sandbox:
        assert sandbox.execute("1").value == 1
        with Sandbox(policy=writes, pool=0) as writer:
            assert writer.execute(leave_link(place)).value == "left"
        with pytest.raises(
            LaunchError, match=r"cannot show .*: .*/ws/out is a symbolic link by now"
        ):
            sandbox.execute("1")


def test_a_directory_above_a_shown_path_cannot_be_moved_by_a_program_that_may_write_there(
    place: Path,
) -> None:
    """Else a program could end every later launcher of its own sandbox."""
    (place / "ws/out/inner").mkdir()
    files = Filesystem(write=(f"{place}/ws",), read=(f"{place}/ws/out/inner",))
    move = errno_of(f"os.rename('{place}/ws/out', '{place}/ws/old')")
    with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
        assert sandbox.execute(move).value == errno.EBUSY
    files = Filesystem(write=(f"{place}/ws",))
    with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
        assert sandbox.execute(move).value == 0


def test_a_wildcard_chooses_no_link_and_passes_none(place: Path) -> None:
    (place / "ws/plain").write_text("plain")
    (place / "ws/secret").write_text("secret")
    (place / "ws/a.txt").symlink_to("secret")
    (place / "ws/b.txt").symlink_to(place / "roots/inner/token")
    (place / "ws/dir").symlink_to(place / "roots/inner")
    (place / "ws/round").symlink_to(".")
    for pattern in (f"{place}/ws/*.txt", f"{place}/ws/*/token", f"{place}/ws/**/a.txt"):
        with pytest.raises(PolicyError, match="matches nothing"):
            policy_of(PermissionSet([FilePermission(allowed_paths=[pattern])]))
    every = policy_of(PermissionSet([FilePermission(allowed_paths=[f"{place}/ws/**/p*"])]))
    assert every.filesystem.read == (f"{place}/ws/plain",)


@pytest.mark.needs("root")
def test_links_of_root_are_followed_and_others_not(place: Path) -> None:
    link = place / "link"
    link.symlink_to(place / "roots")
    assert resolve("x", f"{link}/inner/token") == f"{place}/roots/inner/token"
    os.lchown(link, 12345, 12345)
    with pytest.raises(PolicyError, match="x: .* symbolic link"):
        resolve("x", f"{link}/inner/token")
    os.lchown(link, 0, 0)
    place.chmod(0o777)
    with pytest.raises(PolicyError, match="x: .* symbolic link"):
        resolve("x", str(link))
    link.unlink()
    link.symlink_to(link)
    place.chmod(0o755)
    with pytest.raises(PolicyError, match="more than 40 links"):
        resolve("x", str(link))


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        ("filesystem.read", {"filesystem": Filesystem(read=("/srv/nowhere/at/all",))}),
        ("filesystem.write", {"filesystem": Filesystem(write=("/srv/nowhere",))}),
        ("python.path", {"python": Python(path=("/srv/nowhere",))}),
        ("python.preload", {"python": Python(preload=("no_such_module",))}),
    ],
)
def test_what_a_policy_names_wrongly_is_told_by_its_field(
    field: str, policy: dict[str, object]
) -> None:
    with pytest.raises(PolicyError, match=f"^{field}: ") as caught:
        Sandbox(policy=policy_named("strict", **policy), pool=0)
    assert "doctor" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["/**", "/", ""])
def test_what_is_written_below_a_memory_filesystem_of_the_cell_is_written_on_the_host(
    pattern: str,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cellwright-paths-") as name:
        Path(name).chmod(0o777)
        shown = FilePermission(level=PermissionLevel.WRITE, allowed_paths=[name + pattern])
        policy = replace(policy_of(PermissionSet([shown])), optional_layers=OPTIONAL)
        with Sandbox(policy=policy, pool=0) as sandbox:
            assert sandbox.execute(f"open('{name}/new', 'w').write('x')").value == 1
        assert Path(name, "new").read_text() == "x"


def test_a_file_beside_a_shown_one_cannot_be_written_and_lost() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cellwright-paths-") as name:
        Path(name, "old").touch()
        Path(name).chmod(0o777)
        files = Filesystem(write=(f"{name}/old",))
        with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
            beside = sandbox.execute(errno_of(f"open('{name}/new', 'w')"))
            own = sandbox.execute("open('/tmp/own', 'w').write('x')")
        assert (beside.value, own.value) == (errno.EROFS, 1)


@pytest.mark.parametrize("where", ["/tmp", "/var/tmp", "/dev/shm"])
def test_paths_with_blanks_and_other_letters_are_shown_from_anywhere(where: str) -> None:
    with tempfile.TemporaryDirectory(dir=where, prefix="cellwright päth ") as name:
        Path(name, "a ß.txt").write_text("here")
        Path(name).chmod(0o755)
        files = Filesystem(read=(name,))
        with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
            assert sandbox.execute(f"open({name + '/a ß.txt'!r}).read()").value == "here"
            shared = "import os, _posixshmem\n"
            shared += (
                "m = _posixshmem.shm_open('/m', os.O_CREAT | os.O_RDWR, 0o600)\nos.write(m, b'x')"
            )
            assert sandbox.execute(shared).value == 1


@pytest.mark.parametrize("where", ["/tmp", "/var/tmp", "/dev/shm", "/home"])
def test_an_interpreter_works_from_anywhere(where: str) -> None:
    """As that of an environment does, wherever the checkout lies."""
    if not os.access(where, os.W_OK):
        pytest.skip(f"this user cannot write to {where}")
    found = shutil.which("bash", path="/usr/bin:/bin")
    if not found:
        pytest.skip("this host has no bash")
    with tempfile.TemporaryDirectory(dir=where, prefix="cellwright päth ") as name:
        for path in (name, os.path.join(name, "bin")):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, 0o755)
        shell = shutil.copy(found, os.path.join(name, "bin", "bash"))
        policy = policy_named("strict")
        with Sandbox(
            policy=policy, pool=0, host=HostSettings(language="bash", interpreters={"bash": shell})
        ) as sandbox:
            result = sandbox.execute("echo ran > /tmp/x; read y < /tmp/x; echo $y", "bash")
        assert result.stdout == "ran\n", result


@pytest.mark.needs("root")
def test_a_file_that_only_its_owner_may_open_is_told_as_such(place: Path) -> None:
    """Cells of root run as an id that owns nothing on the host: the program meets a bare EACCES."""
    (place / "ws/private").write_text("x")
    (place / "ws/private").chmod(0o600)
    (place / "ws/open").write_text("x")
    (place / "ws/open").chmod(0o666)
    files = Filesystem(write=(f"{place}/ws",), read=(f"{place}/roots",))
    with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
        for path, refused in (
            ("ws/private", True),
            ("roots/inner/token", True),
            ("ws/open", False),
        ):
            result = sandbox.execute(errno_of(f"open('{place}/{path}')"))
            rules = [each.rule for each in result.violations]
            assert result.value == (errno.EACCES if refused else 0), path
            assert [rule.partition(":")[0] for rule in rules] == ["host permissions"] * refused
        (hint,) = sandbox.execute(f"open('{place}/ws/private')").hints
        assert "others may read" in hint
        (place / "ws/closed").mkdir(mode=0o755)
        result = sandbox.execute(errno_of(f"open('{place}/ws/closed/new', 'w')"))
        assert [each.rule.partition(":")[0] for each in result.violations] == ["host permissions"]
        (hint,) = sandbox.execute(f"open('{place}/ws/closed/new', 'w')").hints
        assert "others may write" in hint
        own = f"os.close(os.open('{place}/ws/own', os.O_CREAT | os.O_RDWR, 0o600)); open('{place}/ws/own')"
        result = sandbox.execute(errno_of(own))
        assert (result.value, result.violations) == (0, ())


def test_a_change_of_what_is_shown_read_only_is_told_as_such(place: Path) -> None:
    """Below /tmp, too, and whatever the modes on the host allow."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cellwright-paths-") as name:
        Path(name).chmod(0o755)
        for file, mode in (("closed", 0o644), ("open", 0o666)):
            Path(name, file).touch()
            Path(name, file).chmod(mode)
        files = Filesystem(read=(name,))
        with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
            for file in ("closed", "open", "new"):
                result = sandbox.execute(f"open('{name}/{file}', 'w')")
                assert "Read-only file system" in str(result.error)
                assert [each.rule for each in result.violations] == ["mount_ns: read-only"]
                (hint,) = result.hints
                assert "filesystem.write" in hint
            (hint,) = sandbox.execute(f"import os; os.remove('{name}/open')").hints
            assert "filesystem.write" in hint
