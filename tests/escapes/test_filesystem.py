"""The mount namespace: nothing of the host but what the policy shows."""

import errno
from pathlib import Path

import pytest

from cellwright import Sandbox
from cellwright.policies.plan import Bind
from cellwright.policies.policy import Filesystem, Processes
from tests.conftest import policy_named
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
