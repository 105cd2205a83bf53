"""`devices.gpu`: names of nodes, the group of requests, narrowing, and what the rest must permit."""

import pytest

from cellwright.policies.advice.explanation import explain
from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.gpus import (
    DriverFile,
    GpuFiles,
    GpuNode,
    check_gpu,
    vendor_of,
    vendors,
    with_gpu,
)
from cellwright.policies.compiling.host import Host
from cellwright.policies.compiling.syscalls import syscall_table
from cellwright.policies.errors import PolicyError
from cellwright.policies.narrowing import exceeds, narrow
from cellwright.policies.plan import PathRule
from cellwright.policies.policy import Devices, Isolation, Limits, Policy
from cellwright.policies.profiles.loading import load_policy, policy_of_data, profile_names

LIBRARY = DriverFile("/usr/lib/libcuda.so.1", "/opt/driver/libcuda.so.580")
NODES = tuple(map(GpuNode, ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")))
HOST = Host(
    cgroups={"memory": "", "cpu": "", "pids": ""},
    landlock_abi=7,
    gpu=GpuFiles(NODES, (LIBRARY,)),
)


def gpu(*names: str) -> Policy:
    return Policy(devices=Devices(gpu=names if len(names) != 1 or "0" in names[0] else names[0]))


def test_a_policy_without_devices_has_none_and_no_profile_has() -> None:
    plan = compile_policy(Policy(), HOST)
    assert plan.devices == ()
    assert not any("gpu" in name for name in (*plan.groups, *plan.layers))
    assert not any(load_policy(name).devices.gpu for name in profile_names())


@pytest.mark.parametrize(
    ("policy", "devices"),
    [
        (gpu("nvidia"), ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")),
        (gpu("nvidia0"), ("nvidia0", "nvidiactl", "nvidia-uvm")),
        (gpu("nvidia0", "nvidiactl"), ("nvidia0", "nvidiactl", "nvidia-uvm")),
    ],
)
def test_the_named_gpus_come_with_the_nodes_that_each_needs(
    policy: Policy, devices: tuple[str, ...]
) -> None:
    plan = compile_policy(policy, HOST)
    assert plan.devices == devices
    rules = [rule for rule in plan.path_rules if rule.path.startswith("/dev/nvidia")]
    assert rules == [PathRule(path=f"/dev/{name}", write=True, control=True) for name in devices]
    assert [bind.path for bind in plan.binds] == [LIBRARY.path]
    assert "gpu_nvidia" in plan.groups
    assert plan.layers[-1] == "gpu_nvidia"


@pytest.mark.parametrize(
    "names",
    [
        ("sda",), ("nvidia0", "sda"), ("../sda0",), ("nvidia00",), ("nvidia0/../mem0",), ("mem0",),
        ("nvidia0\n",), ("nvidiactl", "kvm0"), ("nvidia0", "kfd"), ("dri/card0",), ("dri/renderD1",),
        ("nvidia",), ("/dev/nvidia0",), ("nvidia-caps/nvidia-cap0",),
    ],
)  # fmt: skip
def test_no_other_name_is_a_gpu(names: tuple[str, ...]) -> None:
    with pytest.raises(PolicyError, match=r"^devices\.gpu: must be"):
        vendor_of(names)


def test_a_host_without_it_is_one_sentence() -> None:
    none = Host(cgroups=HOST.cgroups, landlock_abi=7)
    with pytest.raises(PolicyError, match=r"^devices\.gpu: this host has no NVIDIA GPU"):
        compile_policy(gpu("nvidia"), none)
    with pytest.raises(PolicyError, match=r"^devices\.gpu: this host has no /dev/nvidia20"):
        compile_policy(gpu("nvidia20"), HOST)
    closed = GpuFiles((GpuNode("nvidia0", "its mode is 600"), *NODES[1:]), (LIBRARY,))
    with pytest.raises(PolicyError, match="cells cannot open /dev/nvidia0: its mode is 600"):
        compile_policy(gpu("nvidia0"), Host(cgroups=HOST.cgroups, landlock_abi=7, gpu=closed))
    bare = Host(cgroups=HOST.cgroups, landlock_abi=7, gpu=GpuFiles(NODES))
    with pytest.raises(PolicyError, match=r"libcuda\.so\.1 of the driver was not found"):
        compile_policy(gpu("nvidia"), bare)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(devices=Devices(gpu="nvidia"), isolation=Isolation(kernel="own")), "kernel"),
        (Policy(devices=Devices(gpu="nvidia"), optional_layers=("listener",)), "listener"),
        (Policy(devices=Devices(gpu="nvidia"), optional_layers=("cgroup_memory",)), "RLIMIT_AS"),
    ],
)
def test_the_rest_of_the_policy_must_permit_it(policy: Policy, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        check_gpu(policy)


def test_opens_are_watched_since_the_listener_answers_some() -> None:
    from cellwright.policies.policy import Filesystem

    silent = Filesystem(watch=False)
    assert "openat" not in compile_policy(Policy(filesystem=silent), HOST).watched.values()
    with_one = Policy(filesystem=silent, devices=Devices(gpu="nvidia"))
    assert "openat" in compile_policy(with_one, HOST).watched.values()


def test_a_caller_may_narrow_and_not_widen() -> None:
    whole, one, other = gpu("nvidia"), gpu("nvidia0"), gpu("nvidia10")
    assert narrow(whole, one).devices == narrow(one, whole).devices == one.devices
    assert narrow(whole, Policy()).devices == narrow(one, other).devices == Devices()
    assert narrow(whole, gpu("amd")).devices == narrow(one, gpu("amd")).devices == Devices()
    assert exceeds(one, whole) == ()
    assert exceeds(one, one) == ()
    assert exceeds(one, Policy()) == ("devices.gpu: the GPU nvidia0",)
    assert exceeds(whole, one) == ("devices.gpu: the GPU nvidia",)


def test_the_argument_raises_limits_and_lowers_none() -> None:
    wide = Policy(limits=Limits(processes=4000))
    found = with_gpu(wide, True)
    assert found.devices.gpu == "nvidia"
    assert found.limits.processes == 4000
    assert found.limits.open_files == 4096
    assert found.limits.memory_bytes == 16 << 30
    assert with_gpu(wide, ["nvidia0"]).devices.gpu == ("nvidia0",)
    assert with_gpu(wide, False) is wide
    for wrong in (1, "nvidi", ["sda"], {"nvidia0": 1}):
        with pytest.raises(PolicyError):
            with_gpu(wide, wrong)


def test_a_file_names_it_both_ways() -> None:
    assert policy_of_data({"devices": {"gpu": "nvidia"}}).devices.gpu == "nvidia"
    assert policy_of_data({"devices": {"gpu": ["nvidia0"]}}).devices.gpu == ("nvidia0",)


def test_explain_says_what_is_trusted() -> None:
    text = "\n".join(explain(compile_policy(gpu("nvidia0"), HOST), gpu("nvidia0")))
    for words in ("show /dev/nvidia0 as a device", "trust the driver of NVIDIA", "no cap", "H200"):
        assert words in text
    assert "trust the driver" not in "\n".join(explain(compile_policy(Policy(), HOST), Policy()))


def requests(group: str) -> set[tuple[int, int]]:
    """Return mask and value of each request of ioctl(2) that a group allows."""
    table = syscall_table()
    rules = [*table.groups[group], *table.judged[group]]
    conditions = [rule.conditions[0] for rule in rules if rule.call == "ioctl"]
    assert all(each.argument == 1 for each in conditions)
    return {(each.mask, each.value) for each in conditions}


def test_requests_are_compared_by_type_and_number_or_whole() -> None:
    found = requests("gpu_nvidia")
    assert {mask for mask, _ in found} == {0xFFFF, 0xFFFFFFFF}
    assert all(value >> 8 == 0x46 for mask, value in found if mask == 0xFFFF)
    assert not {value for _, value in found} & {0x46D3, 0x464D, 0x4639, 0x4634, 0x4635, 62, 63}


# What the driver reads of a number is its low 8 bits and the size (nvidia_ioctl in kernel-open/nvidia/nv.c),
# whatever the type: requests of its that are in no group, by the size that it wants.
REFUSED = {0xD3: 16, 0x4D: 40, 0x39: 120, 0x34: 28, 0x35: 24, 0x41: 48, 0x5C: 16, 0x5D: 16}
# Answered by the kernel before any driver is asked (do_vfs_ioctl in fs/ioctl.c), or by the listener.
BEFORE = {0x5421, 0x5450, 0x5451, 0x5452}


def test_no_request_of_another_group_means_more_to_the_driver() -> None:
    groups = [name for name in syscall_table().groups if not name.startswith("gpu_")]
    for group in groups:
        if group == "interfaces":  # the listener answers those, and lets none go on
            continue
        for mask, value in requests(group):
            assert mask >= 0xFFFFFFFE, (group, hex(value))
            size = value >> 16 & 0x3FFF
            assert value in BEFORE or REFUSED.get(value & 0xFF) != size, (group, hex(value))


@pytest.mark.parametrize("name", vendors())
def test_every_vendor_has_a_group_and_says_whether_it_was_tried(name: str) -> None:
    vendor = vendors()[name]
    assert vendor.group == f"gpu_{name}"
    assert vendor.group in syscall_table().groups
    assert (vendor.tried != "") == (name == "nvidia")
    assert vendor.needed in vendor.libraries
    assert all(map(vendor.knows, (*vendor.control, *vendor.further)))
    assert not any(map(vendor.is_card, (*vendor.control, *vendor.further)))
    assert {*vendor.limits} <= {*Limits.__struct_fields__}
