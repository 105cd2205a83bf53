"""Policy and made-up hosts to plans: tables, no privileges."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.compiling.compile import CellLanguage, compile_policy
from cellwright.policies.compiling.host import ALWAYS, Host
from cellwright.policies.errors import PolicyError, Unenforceable
from cellwright.policies.languages import LANGUAGES
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.plan import PathRule, Plan
from cellwright.policies.policy import (
    MIB,
    OPTIONAL_LAYERS,
    Filesystem,
    Limits,
    Network,
    Policy,
    Processes,
    Python,
)

CGROUPS = {"memory": "", "cpu": "", "pids": ""}
FULL = Host(landlock_abi=7, cgroups=CGROUPS)
NO_CGROUPS = Host(landlock_abi=7, cgroups=dict.fromkeys(CGROUPS, "not delegated"))
CGROUP_LAYERS = ("cgroup_memory", "cgroup_cpu", "cgroup_pids")


def host(**changes: object) -> Host:
    return msgspec.structs.replace(FULL, **changes)


GAPS = {
    "no user namespaces": (host(user_namespaces="off"), {"user_ns": "off"}),
    "no seccomp": (host(seccomp="none"), {"seccomp": "none"}),
    "no listener": (host(listener="old kernel"), {"listener": "old kernel"}),
    "no landlock": (host(landlock_abi=0), {"landlock": "Landlock ABI 0"}),
    "landlock too old": (host(landlock_abi=1), {"landlock": "Landlock ABI 1"}),
    "no cgroups": (NO_CGROUPS, dict.fromkeys(CGROUP_LAYERS, "not delegated")),
    "cgroups unheard of": (host(cgroups={}), dict.fromkeys(CGROUP_LAYERS, "no cgroup controller")),
    "one controller": (
        host(cgroups={"memory": "", "cpu": "busy", "pids": ""}), {"cgroup_cpu": "busy"},
    ),
    "nothing at all": (
        Host(user_namespaces="off", seccomp="none"),
        {"user_ns": "off", "seccomp": "none", "landlock": "Landlock ABI 0"}
        | dict.fromkeys(CGROUP_LAYERS, "no cgroup controller"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("made_up", "gaps"), GAPS.values(), ids=GAPS)
def test_every_gap_is_collected_into_one_refusal(made_up: Host, gaps: dict[str, str]) -> None:
    with pytest.raises(Unenforceable) as refusal:
        compile_policy(Policy(), made_up)
    found = dict(refusal.value.gaps)
    assert found.keys() == gaps.keys()
    for layer, reason in gaps.items():
        assert found[layer].startswith(reason)
        assert f"{layer}: {reason}" in str(refusal.value)
    assert "doctor" in refusal.value.hint


def test_a_full_host_gives_every_layer_and_no_fallback() -> None:
    layers = compile_policy(Policy(), FULL).layers
    assert set(layers) == {*ALWAYS, "listener", "landlock", *CGROUP_LAYERS}
    assert len(layers) == len(set(layers))


OPTIONAL = {
    "all cgroups": (CGROUP_LAYERS, NO_CGROUPS, {"listener", "landlock", "rlimit_as", "rlimit_nproc"}),
    "memory": (
        ("cgroup_memory",), host(cgroups=CGROUPS | {"memory": "no"}),
        {"listener", "landlock", "cgroup_cpu", "cgroup_pids", "rlimit_as"},
    ),
    "pids": (
        ("cgroup_pids",), host(cgroups=CGROUPS | {"pids": "no"}),
        {"listener", "landlock", "cgroup_cpu", "cgroup_memory", "rlimit_nproc"},
    ),
    "cpu has no fallback of its own": (
        ("cgroup_cpu",), host(cgroups=CGROUPS | {"cpu": "no"}),
        {"listener", "landlock", "cgroup_memory", "cgroup_pids"},
    ),
    "landlock": (("landlock",), host(landlock_abi=0), {"listener", *CGROUP_LAYERS}),
    "listener": (("listener",), host(listener="no"), {"landlock", *CGROUP_LAYERS}),
    "optional but there": (OPTIONAL_LAYERS, FULL, {"listener", "landlock", *CGROUP_LAYERS}),
}  # fmt: skip


@pytest.mark.parametrize(("optional", "made_up", "beside"), OPTIONAL.values(), ids=OPTIONAL)
def test_an_optional_layer_is_used_where_it_is_and_said_missing_where_not(
    optional: tuple[str, ...], made_up: Host, beside: set[str]
) -> None:
    plan = compile_policy(Policy(optional_layers=optional), made_up)
    assert set(plan.layers) == {*ALWAYS, *beside}


def test_what_sockets_hold_is_capped_where_a_cell_has_any() -> None:
    loopback = Policy(network=Network(loopback=True), optional_layers=CGROUP_LAYERS)
    assert compile_policy(Policy(), FULL).socket_bytes == 0
    assert compile_policy(loopback, FULL).socket_bytes == loopback.limits.memory_bytes // 4
    assert "cgroup_sockets" in compile_policy(loopback, FULL).layers
    assert "cgroup_sockets" not in compile_policy(loopback, NO_CGROUPS).layers


def test_a_gap_that_is_not_named_optional_still_refuses() -> None:
    with pytest.raises(Unenforceable) as refusal:
        compile_policy(Policy(optional_layers=("cgroup_memory", "cgroup_cpu")), NO_CGROUPS)
    assert dict(refusal.value.gaps) == {"cgroup_pids": "not delegated"}


@pytest.mark.parametrize(
    "layer", ["user_ns", "seccomp", "no_new_privs", "capabilities", "nonsense", ""]
)
def test_no_other_layer_can_be_made_optional(layer: str) -> None:
    with pytest.raises(PolicyError, match="optional_layers"):
        compile_policy(Policy(optional_layers=(layer,)), FULL)


def test_the_fallbacks_bring_their_rlimits_and_only_then() -> None:
    limits = dict(compile_policy(Policy(), FULL).rlimits)
    assert not {"AS", "NPROC"} & limits.keys()
    limits = dict(compile_policy(Policy(optional_layers=CGROUP_LAYERS), NO_CGROUPS).rlimits)
    assert limits["NPROC"] == Limits().processes
    assert limits["AS"] >= Limits().memory_bytes


@pytest.mark.parametrize(
    "language", [name for name, each in LANGUAGES.items() if each.program == "node"]
)
def test_whatever_node_runs_has_room_for_what_v8_reserves(language: str) -> None:
    policy = Policy(optional_layers=CGROUP_LAYERS)
    runs = CellLanguage(language, ("/usr/bin/node",), LANGUAGES[language].reserves_mib)
    limits = dict(compile_policy(policy, NO_CGROUPS, runs=runs).rlimits)
    assert limits["AS"] - policy.limits.memory_bytes == 1024 * MIB


@pytest.mark.parametrize(("abi", "asked"), [(2, 2), (3, 3), (7, 7)])
def test_landlock_is_asked_for_as_the_host_has_it(abi: int, asked: int) -> None:
    assert compile_policy(Policy(), host(landlock_abi=abi)).landlock_abi == asked


def test_without_landlock_no_ruleset_is_made() -> None:
    policy = Policy(optional_layers=("landlock",))
    assert compile_policy(policy, host(landlock_abi=1)).landlock_abi == 0


def test_an_empty_policy_denies() -> None:
    plan = compile_policy(Policy(), FULL)
    assert plan.binds == ()
    assert not plan.loopback
    assert not any(tmpfs.executable for tmpfs in plan.tmpfs)
    assert not any(rule.execute for rule in plan.path_rules)
    writable = {rule.path for rule in plan.path_rules if rule.write}
    assert writable == {"/workspace", "/tmp", "/dev/null", "/dev/zero", "/dev/full"}
    limits = dict(plan.rlimits)
    assert limits["CORE"] == 1
    for name in ("MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO"):
        assert limits[name] == 0
    assert set(plan.environment) == {"HOME", "LANG", "PATH", "TMPDIR", "TZ"}


def test_compiling_is_deterministic() -> None:
    policy = Policy(
        processes=Processes(subprocesses=True, execute=("/usr", "/opt")),
        network=Network(loopback=True),
        environment={"B": "2", "A": "1"},
    )
    plans = {msgspec.msgpack.encode(compile_policy(policy, FULL)) for _ in range(3)}
    assert len(plans) == 1


BINDS = {
    "read": (Policy(filesystem=Filesystem(read=("/data",))), [("/data", False, False)]),
    "write": (Policy(filesystem=Filesystem(write=("/data",))), [("/data", True, False)]),
    "execute": (
        Policy(processes=Processes(subprocesses=True, execute=("/usr",))), [("/usr", False, True)],
    ),
    "read and execute are one mount": (
        Policy(
            filesystem=Filesystem(read=("/usr",)),
            processes=Processes(subprocesses=True, execute=("/usr",)),
        ),
        [("/usr", False, True)],
    ),
    "nothing writable is executable": (
        Policy(
            filesystem=Filesystem(write=("/data",)),
            processes=Processes(subprocesses=True, execute=("/usr",)),
        ),
        [("/data", True, False), ("/usr", False, True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "binds"), BINDS.values(), ids=BINDS)
def test_paths_become_binds(policy: Policy, binds: list[tuple[str, bool, bool]]) -> None:
    plan = compile_policy(policy, FULL)
    assert [(bind.path, bind.writable, bind.executable) for bind in plan.binds] == binds


def test_a_path_named_writable_and_executable_is_mounted_once() -> None:
    policy = Policy(
        filesystem=Filesystem(write=("/data",)),
        processes=Processes(subprocesses=True, execute=("/data",)),
    )
    try:
        plan = compile_policy(policy, FULL)
    except PolicyError:
        return
    assert len([bind for bind in plan.binds if bind.path == "/data"]) == 1


def test_a_path_to_execute_without_subprocesses_shows_nothing_executable() -> None:
    """strict refuses exec itself; a mount that could be executed would be one fence less."""
    policy = Policy(processes=Processes(execute=("/usr",)))
    try:
        plan = compile_policy(policy, FULL)
    except PolicyError:
        return
    assert not any(bind.executable for bind in plan.binds)


@pytest.mark.parametrize("path", ["usr", "", "/a/../etc", "/a\0b", ".", "//dev", "//srv"])
def test_a_path_that_is_not_plain_and_absolute_is_refused(path: str) -> None:
    for policy in (
        Policy(filesystem=Filesystem(read=(path,))),
        Policy(filesystem=Filesystem(write=(path,))),
        Policy(processes=Processes(subprocesses=True, execute=(path,))),
    ):
        with pytest.raises(PolicyError):
            compile_policy(policy, FULL)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/proc",
        "/dev",
        "/workspace",
        "/tmp",
        "/proc/self",
        "/dev/shm",
        "/dev/null",
        "/workspace/x",
    ],
)
def test_a_path_that_would_cover_the_cells_own_is_refused(path: str) -> None:
    with pytest.raises(PolicyError):
        compile_policy(Policy(filesystem=Filesystem(read=(path,))), FULL)


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (("/srv",), "must not hide what filesystem.read shows, got /srv, which hides /srv"),
        (("/srv/**",), None),
        (("/**/a",), "must not hide what filesystem.write shows, got /**/a, which hides /opt/a"),
        (("/etc/x",), "must lie beneath a shown path, got /etc/x"),
        (("srv/x",), "filesystem.hidden: must be a plain absolute path, got 'srv/x'"),
    ],
)
def test_what_is_hidden_lies_beneath_what_is_shown(
    hidden: tuple[str, ...], words: str | None
) -> None:
    files = Filesystem(read=("/srv",), write=("/opt/a",), hidden=hidden)
    if words is None:
        assert compile_policy(Policy(filesystem=files), FULL).hidden == hidden
        return
    with pytest.raises(PolicyError, match=re.escape(words)):
        compile_policy(Policy(filesystem=files), FULL)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (Filesystem(own=("/logs", "/srv/a")), None),
        (Filesystem(own=("/logs", "/logs")), "filesystem.own: must be at most 16 different paths"),
        (Filesystem(own=tuple(f"/{n}" for n in range(17))), "filesystem.own: must be at most 16"),
        (Filesystem(own=("/logs", "/logs/x")), "filesystem.own: must neither lie in a directory"),
        (Filesystem(own=("/srv/a",), read=("/srv",)), "filesystem.own: must neither lie"),
        (Filesystem(own=("/srv",), write=("/srv/a",)), "nor contain one, got /srv"),
        (Filesystem(own=("/usr/local/x",)), "filesystem.own: must neither lie in a directory"),
        (
            Filesystem(own=("/workspace/x",)),
            "filesystem.own: must be outside the cell's own places",
        ),
        (Filesystem(own=("logs",)), "filesystem.own: must be a plain absolute path, got 'logs'"),
    ],
)
def test_directories_of_a_cells_own_lie_apart(files: Filesystem, words: str | None) -> None:
    if words is None:
        plan = compile_policy(Policy(filesystem=files), FULL)
        assert {each.target for each in plan.tmpfs} == {"/workspace", "/tmp", *files.own}
        assert {each.path for each in plan.path_rules if each.write} >= {*files.own}
        return
    with pytest.raises(PolicyError, match=re.escape(words)):
        compile_policy(Policy(filesystem=files), FULL)


def test_a_writable_path_has_its_landlock_rule() -> None:
    plan = compile_policy(Policy(filesystem=Filesystem(write=("/data",))), FULL)
    assert PathRule(path="/data", write=True) in plan.path_rules


def test_limits_reach_the_plan() -> None:
    limits = Limits(
        memory_bytes=64 * MIB, cpus=0.5, processes=8, workspace_bytes=1 * MIB, workspace_inodes=99,
        open_files=77, stack_bytes=MIB, cpu_seconds=2.5,
    )  # fmt: skip
    plan = compile_policy(Policy(limits=limits), FULL)
    assert (plan.memory_bytes, plan.cpus, plan.processes) == (64 * MIB, 0.5, 8)
    assert {(each.size_bytes, each.inodes) for each in plan.tmpfs} == {(MIB, 99)}
    rlimits = dict(plan.rlimits)
    assert (plan.open_files, rlimits["STACK"]) == (77, MIB)
    assert rlimits["CPU"] == 3  # a second more than the exact cap, which the supervisor holds


@pytest.mark.parametrize(("write", "most"), [((), 2 << 40), (("/data",), 64 * MIB)])
def test_a_file_on_the_host_is_no_larger_than_the_workspace(
    write: tuple[str, ...], most: int
) -> None:
    plan = compile_policy(Policy(filesystem=Filesystem(write=write)), FULL)
    assert dict(plan.rlimits)["FSIZE"] == most


PROGRAMS = Processes(subprocesses=True)


@pytest.mark.parametrize(
    ("policy", "made_up", "variables"),
    [
        (Policy(), FULL, {}),
        (Policy(processes=PROGRAMS), FULL, {"GOMEMLIMIT": str(256 * MIB // 10 * 9)}),
        (Policy(python=Python(path=("/opt/p",))), FULL, {"SLURM_MEM_PER_NODE": "192"}),
        (
            Policy(processes=PROGRAMS, limits=Limits(workspace_bytes=1 << 40)),
            FULL,
            {"SLURM_MEM_PER_NODE": "128"},
        ),
        (
            Policy(processes=PROGRAMS, environment={"GOMEMLIMIT": "off"}),
            FULL,
            {"GOMEMLIMIT": "off"},
        ),
        (
            Policy(processes=PROGRAMS, filesystem=Filesystem(write=("/data",))),
            FULL,
            {"DOTNET_EnableWriteXorExecute": "0"},
        ),
        (
            Policy(processes=PROGRAMS, optional_layers=("listener", "cgroup")),
            msgspec.structs.replace(NO_CGROUPS, listener="off"),
            {
                "GOMAXPROCS": "1",
                "NODE_OPTIONS": "--disable-wasm-trap-handler --max-old-space-size=128",
                "ERL_ZFLAGS": "+MIscs 64",
                "MALLOC_ARENA_MAX": "1",
            },
        ),
        (
            Policy(processes=PROGRAMS, optional_layers=("cgroup",)),
            msgspec.structs.replace(NO_CGROUPS, node_option="not allowed in NODE_OPTIONS"),
            {"ERL_ZFLAGS": "+MIscs 64"},
        ),
        (
            Policy(python=Python(path=("/opt/p",), preload=("numpy",))),
            FULL,
            {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        ),
    ],
)
def test_runtimes_are_told_what_they_cannot_see(
    policy: Policy, made_up: Host, variables: dict[str, str]
) -> None:
    environment = compile_policy(policy, made_up).environment
    assert variables.items() <= environment.items()
    if made_up.node_option:
        assert "NODE_OPTIONS" not in environment
    if not variables:
        assert set(environment) == {"HOME", "LANG", "PATH", "TMPDIR", "TZ"}


def test_a_guest_cannot_have_as_many_descriptors_on_their_way_as_the_launcher() -> None:
    """It would silence the launcher, which tells of every cell by sending a descriptor."""
    for hard in (512, 1024, 1100, 1300):
        host = msgspec.structs.replace(FULL, open_files=hard)
        assert compile_policy(Policy(), host).open_files + 253 < hard
    assert compile_policy(Policy(), FULL).open_files == Limits().open_files


def test_an_environment_may_replace_what_we_set() -> None:
    plan = compile_policy(Policy(environment={"TZ": "Europe/Zurich", "X": "y"}), FULL)
    assert (plan.environment["TZ"], plan.environment["X"]) == ("Europe/Zurich", "y")
    assert plan.environment["HOME"] == "/workspace"


policies = st.builds(
    Policy,
    processes=st.builds(Processes, threads=st.booleans(), subprocesses=st.booleans()),
    network=st.builds(Network, loopback=st.booleans()),
    optional_layers=st.lists(st.sampled_from(OPTIONAL_LAYERS), unique=True).map(tuple),
)
hosts = st.builds(
    Host,
    landlock_abi=st.integers(0, 8),
    cgroups=st.fixed_dictionaries({name: st.sampled_from(["", "no"]) for name in CGROUPS}),
)


@given(policies, hosts)
def test_a_plan_has_every_layer_that_its_policy_requires(policy: Policy, made_up: Host) -> None:
    try:
        plan: Plan = compile_policy(policy, made_up)
    except Unenforceable as refusal:
        assert {layer for layer, _ in refusal.gaps}.isdisjoint(policy.optional_layers)
        return
    required = {*ALWAYS, *OPTIONAL_LAYERS} - set(policy.optional_layers)
    assert required <= set(plan.layers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("policy", "learning", "reuses"),
    [
        (Policy(), False, True),
        (Policy(processes=Processes(threads=True, subprocesses=True)), False, True),
        (Policy(network=Network(loopback=True)), False, False),
        (Policy(network=Network(allow=(NetworkRule(host="api.example.org"),))), False, False),
        (Policy(), True, False),  # the listener may let any call go on
    ],
    ids=["nothing", "programs", "loopback", "names", "learning"],
)
def test_a_network_namespace_is_used_again_if_cells_make_only_unix_sockets(
    policy: Policy, learning: bool, reuses: bool
) -> None:
    assert compile_policy(policy, FULL, learning=learning).reuses_network == reuses


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"/srv/other": "/var/lib/changes"}, "must be of filesystem.write, got /srv/other"),
        ({"/srv/shop": "/srv/shop/changes"}, "must not lie in a shown path, got /srv/shop/changes"),
        ({"/srv/shop": "changes"}, "filesystem.changes"),
    ],
)
def test_changes_go_where_no_cell_sees_them(changes: dict[str, str], why: str) -> None:
    files = Filesystem(write=("/srv/shop",), changes=changes)
    with pytest.raises(PolicyError, match=why):
        compile_policy(Policy(name="x", filesystem=files), FULL)
