"""Root of an image attacks: its limits, what it may change, and what of the launcher it can reach."""

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import HostSettings, Sandbox
from cellwright.harness.sandbox.images.image import StoredImage
from tests.conftest import CAPS, policy_named, with_limits
from tests.escapes import test_posture as posture
from tests.escapes.image_cells import CAPABILITIES, OWN_TO_ROOT, ids_of, in_an_image, made_image
from tests.escapes.live_cell import NAMESPACES, LiveCell, status
from tests.escapes.test_payloads import OWN, case_of, verdict_of

pytestmark = pytest.mark.needs("busybox", "root", "userns", "image")
NS_GET_USERNS = 0xB701  # ioctl_ns(2)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> StoredImage:
    return made_image(tmp_path_factory.mktemp("image"), ids_of("root"))


@pytest.fixture(scope="module")
def sandbox(image: StoredImage) -> Iterator[Sandbox]:
    with in_an_image(ids_of("root"), image, policy_named("workshop"), pool=0) as box:
        yield box


@pytest.mark.parametrize("counts", [pytest.param(True, marks=pytest.mark.needs("cgroup")), False])
def test_the_ids_of_a_cell_share_its_limits(image: StoredImage, counts: bool) -> None:
    """Without cgroups RLIMIT_NPROC alone bounds the processes of a cell."""
    (payload,) = (path for path in OWN if case_of(path) == "LAY-41")
    policy = with_limits(policy_named("workshop"), processes=40)
    host = HostSettings()
    if not counts:
        policy = msgspec.structs.replace(policy, optional_layers=CAPS)
        host = HostSettings(cgroup_root="/nonexistent")
    with in_an_image(ids_of("root"), image, policy, pool=0, host=host) as box:
        assert ("rlimit_nproc" in box.layers) != counts
        header = "import os; os.environ['SBXT_PROCESSES'] = '40'\n"
        escaped, detail = verdict_of(box.execute(header + payload.read_text()), "LAY-41")
    assert escaped is False, detail


LISTEN = """
import os, socket
if {user}:
    os.setgid({user})
    os.setuid({user})
socket.create_server(("127.0.0.1", 80)).close()
os.getuid()
"""
PORTS = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


@pytest.mark.parametrize(("kind", "uid"), [("root", 1000), ("one", 0)])
def test_every_id_of_an_image_listens_on_low_ports_of_its_cell_alone(
    tmp_path: Path, kind: str, uid: int
) -> None:
    """Where there is one id, the program believes that it became another, and nothing is changed."""
    before = PORTS.read_text()
    policy = policy_named("workshop")
    network = msgspec.structs.replace(policy.network, loopback=True)
    policy = msgspec.structs.replace(policy, network=network)
    ids = ids_of(kind)
    with in_an_image(ids, made_image(tmp_path, ids), policy, pool=0) as box:
        result = box.execute(LISTEN.format(user=1000))
    assert (result.value, result.error) == (uid, None)
    assert PORTS.read_text() == before
    with Sandbox(policy=policy, pool=0) as box:  # without an image the kernel's own rule stays
        assert "Permission denied" in str(box.execute(LISTEN.format(user=0)).error)


@pytest.fixture(scope="module", params=["root", "one"])
def cell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCell]:
    """A cell in which root inside waits."""
    ids = ids_of(request.param)
    image = made_image(tmp_path_factory.mktemp("image"), ids)
    with (
        in_an_image(ids, image, policy_named("workshop"), pool=0) as box,
        posture._living(box) as living,
    ):
        yield living


def test_root_inside_has_these_capabilities_and_ids(cell: LiveCell) -> None:
    seen, ids = status(cell.guest), ids_of("root")
    kept = f"{CAPABILITIES:016x}"
    assert [seen[name] for name in posture.CAPABILITIES] == ["0" * 16, kept, kept, kept, "0" * 16]
    assert {*seen["Uid"].split(), *seen["Gid"].split()} == {str(ids.root[0])}
    assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Seccomp_filters"]) == ("1", "2", "1")
    assert seen["Groups"] == ""
    for name in ("uid_map", "gid_map"):
        inside, outside, count = Path(f"/proc/{cell.guest}/{name}").read_text().split()
        assert (inside, outside) == ("0", str(ids.root[0]))
        assert count in ("1", "65536")
    assert Path(f"/proc/{cell.guest}/setgroups").read_text() == (
        "deny\n" if count == "1" else "allow\n"
    )


def test_the_user_namespace_of_the_guest_owns_no_other(cell: LiveCell) -> None:
    posture.test_every_namespace_differs_from_the_hosts_and_the_launchers(cell)

    def owner(kind: str, request: int = NS_GET_USERNS) -> int:
        with open(f"/proc/{cell.guest}/ns/{kind}") as file:
            found = fcntl.ioctl(file, request)
        try:
            return os.fstat(found).st_ino
        finally:
            os.close(found)

    launchers = os.stat(f"/proc/{cell.launcher}/ns/user").st_ino
    assert {owner(kind) for kind in NAMESPACES if kind != "user"} == {launchers}
    assert owner("user") != os.stat(f"/proc/{cell.guest}/ns/user").st_ino


def test_the_mounts_are_those_of_the_image_and_the_cells_own(cell: LiveCell) -> None:
    lines = Path(f"/proc/{cell.guest}/mountinfo").read_text().splitlines()
    mounts = {line.split()[4]: line.split() for line in lines}
    assert len(mounts) == len(lines)  # none covers another
    tops = {path for path in mounts if not path.startswith(("/.cellwright/", "/dev/"))}
    assert tops == {"/", "/.cellwright", "/dev", "/proc", "/sys", "/workspace"}
    for path, fields in mounts.items():
        flags = set(fields[5].split(","))
        assert "nosuid" in flags, path
        assert "nodev" in flags or path.startswith("/dev/"), path
        assert ("rw" in flags) == (path in ("/", "/workspace") or path.startswith("/dev/")), path
        assert fields[3] not in ("/layers", "/places", "/changes", "/image")
    assert {"lowerdir=/places:/layers/0", "userxattr"} <= set(mounts["/"][-1].split(","))
    assert not {"layers", "places", "changes", "image"} & {*os.listdir(f"/proc/{cell.guest}/root")}


def test_the_guest_has_no_descriptor_of_the_launchers(cell: LiveCell) -> None:
    directory = f"/proc/{cell.guest}/fd"
    kinds = {n: os.readlink(f"{directory}/{n}").split(":")[0] for n in os.listdir(directory)}
    assert kinds == {"0": "pipe", "1": "pipe", "2": "pipe", "3": "socket"}
    posture.test_nothing_of_the_environment_or_the_checkout_shows(cell)
    posture.test_the_working_directory_and_root_are_the_cells(cell)


def test_layers_are_not_changed(image: StoredImage, sandbox: Sandbox) -> None:
    """Neither by writing, which copies a file first, nor by owners, modes, names and attributes."""
    (layer,) = image.layers
    before = _listing(layer)
    line = (
        "cd /usr/share; echo more >> notes; chown 5:5 notes; chmod 0 notes; touch -d 2001-01-01 notes;"
        "ln notes other; mv notes moved; rm -r /home; mkdir /home; cp /bin/busybox /bin/new; echo done"
    )
    assert sandbox.run(line, shell=True).stdout == "done\n"
    assert _listing(layer) == before


def _listing(directory: str) -> list[tuple[object, ...]]:
    found = []
    for above, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = os.path.join(above, name)
            each = os.lstat(path)
            told = (
                each.st_mode,
                each.st_uid,
                each.st_gid,
                each.st_size,
                each.st_mtime_ns,
                each.st_nlink,
            )
            found.append((path, *told, *os.listxattr(path, follow_symlinks=False)))
    return sorted(found)


@pytest.mark.parametrize("case", ["LAY-04", "LAY-05", "LAY-42"])
def test_root_inside_is_root_of_its_own_files_alone(sandbox: Sandbox, case: str) -> None:
    (payload,) = (path for path in OWN if case_of(path) == case)
    escaped, detail = verdict_of(sandbox.execute(payload.read_text()), case)
    assert escaped == (case in OWN_TO_ROOT), detail
    assert re.fullmatch(OWN_TO_ROOT.get(case, ""), detail)
