"""config.json of a container, and the choice of a runtime: pure parts and made-up programs."""

import os
import stat
from pathlib import Path

import pytest

from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import Host
from cellwright.policies.errors import LaunchError, PolicyError
from cellwright.policies.policy import Policy
from cellwright.runner.oci import oci_runtime as runtime
from cellwright.runner.oci.bundle import Ids, Mount, container_config, open_rootfs
from cellwright.runner.oci.container import _without_inner
from cellwright.runner.oci.oci_runtime import OciRuntime, default_runtime, find_oci_runtime
from tests.conftest import CAPS

PLAN = compile_policy(
    Policy(optional_layers=CAPS),
    Host(landlock_abi=4, cgroups=dict.fromkeys(("memory", "cpu", "pids"), "")),
)
MOUNT = Mount("/usr/lib/python3.11", "/usr/lib/python3.11")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_container_of_root_has_only_the_capabilities_of_a_launcher() -> None:
    config = container_config(PLAN, ("/bin/python",), (MOUNT,), None)
    process = config["process"]
    assert process["noNewPrivileges"] is True
    assert process["env"] == []
    assert process["cwd"] == "/"
    kept = set(process["capabilities"]["bounding"])
    assert "CAP_SYS_ADMIN" in kept
    assert kept.isdisjoint(
        {"CAP_NET_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_PTRACE", "CAP_MKNOD", "CAP_BPF"}
    )
    assert {tuple(names) for names in process["capabilities"].values()} == {tuple(sorted(kept))}
    assert "inheritable" not in process["capabilities"]
    assert "/proc/sys" in config["linux"]["readonlyPaths"]
    assert "/proc/kcore" in config["linux"]["maskedPaths"]


def test_a_container_without_root_has_one_id_and_one_capability() -> None:
    config = container_config(PLAN, ("/bin/python",), (MOUNT,), Ids(1001, 1002))
    linux = config["linux"]
    assert {"type": "user"} in linux["namespaces"]
    assert linux["uidMappings"] == [{"containerID": 0, "hostID": 1001, "size": 1}]
    assert linux["gidMappings"] == [{"containerID": 0, "hostID": 1002, "size": 1}]
    assert config["process"]["capabilities"]["effective"] == ["CAP_SETFCAP"]


@pytest.mark.parametrize("ids", [None, Ids(1001, 1001)])
def test_every_mount_is_read_only_unless_the_policy_writes_there(ids: Ids | None) -> None:
    config = container_config(PLAN, ("x",), (MOUNT, Mount("/data", "/data", writable=True)), ids)
    rights = {each["destination"]: set(each["options"]) for each in config["mounts"]}
    assert {"ro", "nosuid", "nodev"} <= rights["/usr/lib/python3.11"]
    assert {"rw", "nosuid", "nodev"} <= rights["/data"]
    assert config["root"] == {"path": "root", "readonly": True}
    assert {each["type"] for each in config["linux"]["namespaces"]} >= {
        "pid", "mount", "ipc", "uts", "network",
    }  # fmt: skip


def test_a_mount_that_an_outer_one_shows_anyway_is_left_out() -> None:
    outer, inner = Mount("/usr", "/usr"), Mount("/usr/lib/x.so", "/usr/lib/x.so")
    other = Mount("/usr/lib/y.so", "/opt/y.so")
    assert _without_inner([other, inner, outer]) == [outer, other]


@pytest.mark.parametrize("named", ["", 7, "docker", "podman", "bash", None])
def test_what_is_no_runtime_is_refused_by_name(named: object) -> None:
    with pytest.raises(PolicyError, match="runtime: "):
        find_oci_runtime(named)


def test_a_runtime_that_is_not_there_or_not_known_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="not installed"):
        find_oci_runtime(tmp_path / "crun")
    with pytest.raises(LaunchError, match="no OCI runtime that is known"):
        find_oci_runtime(program(tmp_path / "bash", "echo bash version 5.2"))
    with pytest.raises(LaunchError, match="--version failed: broken"):
        find_oci_runtime(program(tmp_path / "runc", "echo broken >&2; exit 3"))


@pytest.mark.parametrize(
    ("name", "said", "kernel", "holes"),
    [
        ("runc", "runc version 1.1.5+ds1", "shared", "CVE-2024-21626"),
        ("runc", "runc version 1.4.0", "shared", ""),
        ("mine", "crun version 1.8.1\ncommit: f8", "shared", ""),
        ("crun", "crun version 1.4.3", "shared", "CVE-2022-27650"),
        ("runsc", "runsc version release-20260105.0\nspec: 1.1.0", "gvisor", ""),
        ("krun", "crun version 1.21", "vm", ""),
        ("krun", "crun version 1.19", "vm", "CVE-2025-24965"),
        ("youki", "youki version 0.5.5", "shared", "CVE-2025-62161"),
    ],
)
def test_a_runtime_is_known_by_what_it_says(
    name: str, said: str, kernel: str, holes: str, tmp_path: Path
) -> None:
    found = find_oci_runtime(program(tmp_path / name, f"echo '{said}'"))
    assert found.kernel == kernel
    assert holes in found.holes
    assert bool(found.holes) == bool(holes)


def test_the_default_is_the_first_runtime_that_the_cgroups_permit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers = tmp_path / "cgroup.controllers"
    monkeypatch.setattr(runtime, "_PLACES", str(tmp_path))
    monkeypatch.setattr(runtime, "_UNIFIED", str(controllers))
    assert default_runtime() == "crun"  # crun is not installed, as the error says
    for name in ("crun", "runc", "runsc"):
        program(tmp_path / name, f"echo {name} version 9.9.9")
    assert default_runtime() == "crun"
    controllers.write_text("\n")
    assert default_runtime() == "crun"
    controllers.write_text("hugetlb\n")
    assert default_runtime() == "runc"
    (tmp_path / "runc").unlink()
    assert default_runtime() == "crun"  # runsc holds no sessions; crun says what it refuses


def test_the_hint_of_a_runtime_that_fails_names_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_PLACES", str(tmp_path))
    failing = OciRuntime(str(program(tmp_path / "crun", "echo no >&2; exit 1")), "crun", (9, 9, 9))
    with pytest.raises(LaunchError, match=r"failed at start .*: no\nhint: install another runtime"):
        failing.call(failing.command("/state", "start", "x"))
    program(tmp_path / "runc", "exit 0")
    with pytest.raises(LaunchError, match=r"\nhint: name another runtime: --runtime runc, "):
        failing.call(failing.command("/state", "start", "x"))
    monkeypatch.setattr(runtime, "_SECONDS", 0.1)
    slow = OciRuntime(str(program(tmp_path / "crun", "exec /bin/sleep 9")), "crun", (9, 9, 9))
    with pytest.raises(LaunchError, match=r"did not end .*\nhint: name another .*--runtime runc, "):
        slow.call(slow.command("/state", "start", "x"))


def test_a_rootfs_shows_all_but_what_cells_have_of_their_own(tmp_path: Path) -> None:
    for name in ("usr/bin", "etc", "proc", "dev", "tmp", "run", "opt"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    (tmp_path / "etc/os-release").write_text("ID=tiny\n")
    (tmp_path / "etc/localtime").symlink_to("/usr/share/zoneinfo/UTC")
    found = open_rootfs(str(tmp_path))
    assert found.trees == ("/etc", "/opt", "/usr")
    assert found.files == ("/opt", "/usr", "/etc/os-release")
    assert found.links == (("/bin", "usr/bin"), ("/etc/localtime", "/usr/share/zoneinfo/UTC"))
    assert found.has("/usr/lib/x")
    assert found.has("/bin/sh")
    assert not found.has("/home/me")


def test_a_rootfs_that_another_user_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    tmp_path.chmod(0o777)
    with pytest.raises(PolicyError, match="can be changed by another user"):
        open_rootfs(str(tmp_path))


def test_a_rootfs_must_be_a_directory_other_than_the_hosts(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="No such file"):
        open_rootfs(str(tmp_path / "nowhere"))
    with pytest.raises(PolicyError, match="must not be the host's own root"):
        open_rootfs("/")
    with pytest.raises(PolicyError, match="there is no directory"):
        open_rootfs(str(tmp_path))


def test_a_command_line_keeps_the_notes_of_a_runtime_in_its_bundle() -> None:
    command = OciRuntime("/usr/bin/crun", "crun", (1, 8, 1)).command("/b/state", "start", "x")
    assert command == [
        "/usr/bin/crun",
        "--cgroup-manager=disabled",
        "--root",
        "/b/state",
        "start",
        "x",
    ]
    command = OciRuntime("/usr/bin/runc", "runc", (1, 4, 0)).command("/b/state", "start", "x")
    assert command == ["/usr/bin/runc", "--root", "/b/state", "start", "x"]


def test_a_bundle_is_of_its_owner_alone() -> None:
    from cellwright.runner.oci.bundle import Bundle

    bundle = Bundle((("/lib64", "usr/lib64"),), "/usr/bin/crun")
    try:
        assert stat.S_IMODE(os.stat(bundle.path).st_mode) == 0o700
        assert os.readlink(f"{bundle.path}/root/lib64") == "usr/lib64"
    finally:
        bundle.remove()
    assert not os.path.exists(bundle.path)
