"""The mount namespace: nothing of the host but what the policy shows."""

import errno
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.policies.plan import Bind
from cellwright.policies.policy import Filesystem, Processes
from tests.conftest import policy_named, with_limits
from tests.escapes.without import errno_of, sandbox_with_plan

HOST_FILES = ["/etc/shadow", "/etc/hostname", "/etc/machine-id", "/proc/kcore", "/proc/sys/kernel/core_pattern",
              "/proc/sysrq-trigger", "/sys/kernel", "/dev/kmsg", "/dev/mem", "/dev/tty", "/var/log", "/root/.ssh", "/home"]  # fmt: skip


@pytest.mark.parametrize("path", HOST_FILES)
def test_a_file_of_the_host_does_not_exist(strict: Sandbox, standard: Sandbox, path: str) -> None:
    for sandbox in (strict, standard):
        assert sandbox.execute(errno_of(f"os.stat({path!r})")).value == errno.ENOENT


def test_a_shown_file_can_be_read_and_not_written(tmp_path: Path) -> None:
    """Without the read-only mount the same write succeeds: see the writable one."""
    (tmp_path / "note").write_text("hello")
    tmp_path.chmod(0o777)
    tmp_path.parent.chmod(0o755)
    read = policy_named("strict", filesystem=Filesystem(read=(str(tmp_path),)))
    write = policy_named("strict", filesystem=Filesystem(write=(str(tmp_path),)))
    attempt = errno_of(f"open('{tmp_path}/new', 'w').close()")
    with Sandbox(policy=read) as sandbox:
        assert sandbox.execute(f"open('{tmp_path}/note').read()").value == "hello"
        assert sandbox.execute(attempt).value == errno.EROFS
        assert not (tmp_path / "new").exists()
    with Sandbox(policy=write) as sandbox:
        assert sandbox.execute(attempt).value == 0
        assert (tmp_path / "new").exists()


SET_UID = """
import os
found = {{}}
def attempt(name, make):
    try:
        make(f"{place}/{{name}}")
    except OSError as refused:
        found[name] = refused.errno
    else:
        found[name] = oct(os.stat(f"{place}/{{name}}").st_mode)
def opened(path, mode=0o755, flags=os.O_CREAT | os.O_WRONLY):
    return os.open(path, flags, mode)
os.umask(0)
attempt("chmod", lambda path: (opened(path), os.chmod(path, 0o4755)))
attempt("fchmod", lambda path: os.fchmod(opened(path), 0o4755))
attempt("open", lambda path: opened(path, 0o4755))
attempt("open with S_ISGID", lambda path: opened(path, 0o2755))
attempt("mknod", lambda path: os.mknod(path, 0o104755))
attempt("nameless", lambda path: os.link(
    str(opened({place!r}, 0o4755, os.O_TMPFILE | os.O_RDWR)), path, src_dir_fd=os.open("/proc/self/fd", 0)
))
attempt("nameless, without a right", lambda path: os.link(
    str(opened({place!r}, 0o4755, os.O_TMPFILE | os.O_ACCMODE)), path, src_dir_fd=os.open("/proc/self/fd", 0)
))
attempt("plain", lambda path: (opened(path), os.chmod(path, 0o755)))
attempt("directory", lambda path: (os.mkdir(path), os.chmod(path, 0o2755)))
found
"""


@pytest.mark.parametrize("protected", [(), ("/keep",)])
def test_no_program_is_left_set_uid_where_cells_write_to_the_host(
    tmp_path: Path, protected: tuple[str, ...]
) -> None:
    """It would give every user of the host the rights of its owner.  In /workspace of a cell that writes
    to no path of the host each attempt succeeds."""
    tmp_path.chmod(0o777)
    tmp_path.parent.chmod(0o755)
    strict = policy_named("strict")
    with Sandbox(policy=strict, pool=0) as sandbox:
        alone = sandbox.execute(SET_UID.format(place="/workspace")).value
    names = {
        "chmod",
        "fchmod",
        "open",
        "open with S_ISGID",
        "mknod",
        "nameless",
        "nameless, without a right",
    }
    assert {alone[name] for name in names} == {"0o104755", "0o102755"}, alone
    files = Filesystem(write=(str(tmp_path),), protected=tuple(f"{tmp_path}{p}" for p in protected))
    policy = msgspec.structs.replace(strict, filesystem=files)
    with Sandbox(policy=policy, pool=0) as sandbox:
        beside = sandbox.execute(SET_UID.format(place=str(tmp_path))).value
    assert {name: beside[name] for name in names} == dict.fromkeys(names, errno.EPERM)
    assert (beside["plain"], beside["directory"]) == ("0o100755", "0o42755")
    assert not any(each.stat().st_mode & 0o6000 for each in tmp_path.rglob("*") if each.is_file())


def test_a_link_out_of_a_shown_directory_leads_nowhere(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/shadow")
    policy = policy_named("strict", filesystem=Filesystem(read=(str(tmp_path),)))
    with Sandbox(policy=policy) as sandbox:
        result = sandbox.execute(errno_of(f"open('{tmp_path}/link')"))
    assert result.value == errno.ENOENT


def test_a_workspace_is_fresh_every_time(strict: Sandbox) -> None:
    plant = "open('/workspace/left', 'w').close(); open('/tmp/left', 'w').close()"
    assert strict.execute(plant).ok
    look = "import os; os.listdir('/workspace') + os.listdir('/tmp')"
    assert strict.execute(look).value == []


def test_directories_of_its_own_are_fresh_writable_and_bounded() -> None:
    files = Filesystem(own=("/logs", "/srv/tests"))
    policy = with_limits(policy_named("strict", filesystem=files), workspace_bytes=2**20)
    plant = (
        "open('/logs/x', 'w').write('1'); open('/srv/tests/x', 'w').close(); open('/logs/x').read()"
    )
    with Sandbox(policy=policy) as sandbox:
        done = sandbox.execute(plant)
        assert (done.value, done.violations) == ("1", ())
        look = "import os; os.listdir('/logs') + os.listdir('/srv/tests')"
        assert sandbox.execute(look).value == []
        fill = errno_of("open('/logs/x', 'wb').write(bytes(2 << 20))")
        assert sandbox.execute(fill).value == errno.ENOSPC
        above = sandbox.execute(errno_of("open('/srv/x', 'w')"))
        assert above.value in (errno.EROFS, errno.EACCES)
        with sandbox.session() as session:
            session.execute("open('/logs/kept', 'w').write('2')")
            (branch,) = session.branch(replay=False)
            with branch:
                assert branch.execute("open('/logs/kept').read()").value == "2"


def test_the_root_cannot_be_written(standard: Sandbox) -> None:
    for directory in ("/", "/etc", "/usr", "/dev", "/proc"):
        result = standard.execute(errno_of(f"open('{directory}/x', 'w')"))
        assert result.value in (errno.EROFS, errno.EACCES, errno.ENOENT), directory


def test_what_is_shown_to_be_read_cannot_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may be started under this policy, but not those that are only shown."""
    code = "import subprocess\ntry: e = subprocess.run(['/usr/sbin/ldconfig', '--version'], capture_output=True).returncode\nexcept OSError as error: e = -error.errno\ne"
    files = Filesystem(read=("/usr/sbin",))
    programs = Processes(subprocesses=True, execute=("/usr/bin", "/usr/lib"))
    policy = policy_named("standard", filesystem=files, processes=programs)
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(code).value == -errno.EACCES
    binds = tuple(
        Bind(path=path, executable=True) for path in ("/usr/bin", "/usr/lib", "/usr/sbin")
    )
    with sandbox_with_plan(monkeypatch, policy, binds=binds) as sandbox:
        assert sandbox.execute(code).value == 0
