"""Inside a container: what it takes away, what is said about that, and what works in spite of it."""

import json
import os
import subprocess
from pathlib import Path

import pyseccomp
import pytest

from cellwright.policies.compiling.host import ALWAYS
from tests.conftest import CAPS
from tests.runner.test_ordinary_user import PRELUDE, PYTHON, USER, readable

pytestmark = [
    pytest.mark.needs("root", "userns"),
    pytest.mark.skipif(
        not Path(PYTHON).exists(), reason="the system has no Python of this version"
    ),
]
__all__ = ["readable"]  # the fixture

bubblewrapped = pytest.mark.needs("bwrap")
BWRAP = ("bwrap", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp")
TRY = """
from cellwright import CellwrightError
from cellwright.harness.cli.helping.doctor import examine
try:
    with box("strict") as sandbox:
        layers, refusal = sandbox.execute("1").layers, ""
except CellwrightError as error:
    layers, refusal = (), str(error)
launcher = [finding for finding in examine() if finding.layer == "launcher"][0]
tell(layers=layers, refusal=refusal, doctor=launcher.verdict, repair=launcher.repair)
"""


def script(place: Path) -> tuple[str, ...]:
    return (PYTHON, "-I", "-c", PRELUDE.format(paths=[str(place)], lost=list(CAPS)) + TRY)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def inside(
    place: Path, *options: str, user: int = USER, passed: tuple[int, ...] = ()
) -> dict[str, object]:
    """Try a sandbox inside bubblewrap, started by `user` with the descriptors `passed`."""
    return run((*BWRAP, *options, *script(place)), user, passed)


def run(command: tuple[str, ...], user: int, passed: tuple[int, ...] = ()) -> dict[str, object]:
    return told(
        subprocess.run(
            command, user=user, group=user, extra_groups=[], cwd="/", pass_fds=passed,
            env={"PATH": "/usr/sbin:/usr/bin", "HOME": "/nowhere"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, check=False,
        )
    )  # fmt: skip


@bubblewrapped
def test_with_all_of_proc_everything_but_the_caps_holds(readable: Path) -> None:
    answer = inside(readable, "--bind", "/proc", "/proc")
    assert {*ALWAYS, "listener", "landlock"} <= set(answer["layers"]), answer  # type: ignore[call-overload]
    assert answer["doctor"] == "PASS"


@bubblewrapped
def test_a_masked_proc_is_refused_and_the_repair_unmasks_it(readable: Path) -> None:
    """A new /proc would show what the container covered, so the kernel allows none
    (fs/namespace.c, mount_too_revealing)."""
    answer = inside(readable, "--unshare-pid", "--proc", "/proc", "--tmpfs", "/proc/fs")
    assert "fsmount proc: Operation not permitted" in str(answer["refusal"])
    assert answer["doctor"] == "FAIL"
    assert "systempaths=unconfined" in str(answer["repair"])


def filter_of_an_engine() -> int:
    """Return a descriptor of a filter that refuses what Docker's does to who lacks CAP_SYS_ADMIN."""
    program = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for call in ("mount", "umount2", "unshare", "setns", "pivot_root", "fsopen", "open_tree"):
        program.add_rule(pyseccomp.ERRNO(1), call)
    program.add_rule(pyseccomp.ERRNO(38), "clone3")
    with open(os.memfd_create("filter"), "wb+") as file:
        program.export_bpf(file)
        file.seek(0)
        return os.dup(file.fileno())


@bubblewrapped
def test_what_an_engine_forbids_is_named_all_at_once(readable: Path) -> None:
    """As with Docker's defaults, where one repair after the other would be a round each."""
    descriptor = filter_of_an_engine()
    masked = ("--unshare-pid", "--proc", "/proc", "--tmpfs", "/proc/fs")
    try:
        answer = inside(readable, *masked, "--seccomp", str(descriptor), passed=(descriptor,))
    finally:
        os.close(descriptor)
    assert "unshare: Operation not permitted" in str(answer["refusal"])
    for option in ("seccomp=unconfined", "systempaths=unconfined"):
        assert f"--security-opt {option}" in str(answer["repair"])


@bubblewrapped
def test_a_filter_alone_is_named_alone(readable: Path) -> None:
    descriptor = filter_of_an_engine()
    try:
        answer = inside(
            readable, "--bind", "/proc", "/proc", "--seccomp", str(descriptor), passed=(descriptor,)
        )
    finally:
        os.close(descriptor)
    assert "seccomp=unconfined" in str(answer["repair"])
    assert "systempaths" not in str(answer["repair"])


def in_a_chroot(place: Path, mount: str, root: str = "/mnt", user: int = USER) -> dict[str, object]:
    enter = f'{mount} && exec chroot --userspec="$0" {root} "$@"'
    return run(("unshare", "--mount", "sh", "-c", enter, f"{user}:{user}", *script(place)), 0)


def test_a_chroot_is_refused_and_named(readable: Path) -> None:
    """user_namespaces(7): none is made for a process in a chroot."""
    answer = in_a_chroot(readable, "mount --rbind / /mnt")
    assert "unshare: Operation not permitted" in str(answer["refusal"])
    assert "chroot" in str(answer["repair"])


# A root that is no mount point, as debootstrap makes it.
DIRECTORY = """
mount -t tmpfs none /mnt && mkdir /mnt/root && for each in /*; do
  if [ -L $each ]; then cp -P $each /mnt/root
  elif [ -d $each ] && [ $each != /mnt ]; then mkdir /mnt/root$each && mount --rbind $each /mnt/root$each
  fi
done"""


@pytest.mark.needs("root")
def test_a_chroot_is_named_to_root_too(readable: Path) -> None:
    answer = in_a_chroot(readable, DIRECTORY, "/mnt/root", 0)
    assert "mount: Invalid argument" in str(answer["refusal"])
    assert "chroot" in str(answer["repair"])


def test_a_host_without_proc_is_refused_and_named(readable: Path) -> None:
    answer = in_a_chroot(readable, "mount --bind / /mnt && mount --bind /dev /mnt/dev")
    assert "/proc" in str(answer["refusal"])
    assert "mount -t proc" in str(answer["repair"])


@bubblewrapped
def test_without_libseccomp_the_refusal_names_the_package(readable: Path) -> None:
    (library,) = Path("/usr/lib").glob("*/libseccomp.so.2")
    lacking = ("--ro-bind", "/dev/null", str(library.resolve()))
    answer = inside(readable, "--bind", "/proc", "/proc", *lacking)
    assert "libseccomp was not found" in str(answer["refusal"])
    assert str(answer["repair"]).startswith("apt-get install libseccomp2, or dnf install")


@bubblewrapped
def test_user_namespaces_that_the_container_forbids_are_named(readable: Path) -> None:
    forbidden = ("--unshare-user", "--disable-userns")
    answer = inside(readable, "--bind", "/proc", "/proc", *forbidden)
    assert "unshare: No space left on device" in str(answer["refusal"])
    assert "user.max_user_namespaces" in str(answer["repair"])


@bubblewrapped
def test_root_that_cannot_become_another_user_is_refused(readable: Path) -> None:
    answer = inside(readable, "--bind", "/proc", "/proc", "--cap-drop", "ALL", user=0)
    assert "becoming uid" in str(answer["refusal"])
    assert "--user 1000" in str(answer["repair"])


CHANGE_IDS = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
KILL = ("--cap-add", "CAP_KILL")


@bubblewrapped
def test_root_that_could_not_end_its_cells_is_refused(readable: Path) -> None:
    answer = inside(readable, "--bind", "/proc", "/proc", *CHANGE_IDS, user=0)
    assert "root may not signal its own cells" in str(answer["refusal"])
    assert "--cap-add KILL" in str(answer["repair"])


@bubblewrapped
def test_root_without_the_right_to_mount_works_as_another_user(readable: Path) -> None:
    answer = inside(readable, "--bind", "/proc", "/proc", *CHANGE_IDS, *KILL, user=0)
    assert set(ALWAYS) <= set(answer["layers"]), answer  # type: ignore[call-overload]


# Root of a rootless container: a user namespace with some ids, 0 among them

IN_NAMESPACE = """
import ctypes, os, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
print("in", flush=True)
sys.stdin.readline()  # the map is written
os.setresgid(0, 0, 0), os.setresuid(0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def as_mapped_root(place: Path, ids: str) -> dict[str, object]:
    with subprocess.Popen(
        [PYTHON, "-I", "-c", IN_NAMESPACE, *script(place)], cwd="/", env={"HOME": "/nowhere"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        for kind in ("uid", "gid"):
            Path(f"/proc/{process.pid}/{kind}_map").write_text(ids)
        output, errors = process.communicate("go\n", timeout=300)
    return told(subprocess.CompletedProcess([], process.returncode, output, errors))


def test_root_of_a_rootless_container_gives_its_cells_another_of_its_ids(readable: Path) -> None:
    answer = as_mapped_root(readable, "0 1000000 65536")
    assert set(ALWAYS) <= set(answer["layers"]), answer  # type: ignore[call-overload]


def test_root_that_has_no_other_id_is_refused(readable: Path) -> None:
    answer = as_mapped_root(readable, "0 1000000 1")
    assert "no other id" in str(answer["refusal"])
