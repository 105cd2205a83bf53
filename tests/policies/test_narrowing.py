"""A caller may only narrow: as properties, and as a table."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright import exceeds, narrow
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import (
    OPTIONAL_LAYERS,
    Devices,
    Evaluator,
    Filesystem,
    Http,
    Isolation,
    Limits,
    Network,
    Packages,
    Policy,
    Processes,
    Python,
    Syscalls,
    Validation,
    check_policy,
    lies_in,
)
from cellwright.policies.privacy_rules import PrivacyRules
from cellwright.policies.profiles.loading import load_policy, profile_names
from cellwright.policies.source.findings import Rules
from cellwright.policies.tool_rules import ToolRule, Tools

PATHS = st.lists(
    st.sampled_from(["/srv", "/srv/a", "/srv/a/b", "/srvx", "/opt", "/usr/bin", "/usr"]),
    max_size=3,
    unique=True,
).map(tuple)
MODULES = ["os", "os.path", "sys", "json"]
NAMES = st.lists(st.sampled_from(MODULES), max_size=2, unique=True).map(tuple)
REQUIREMENTS = st.lists(st.sampled_from(["six", "numpy"]), max_size=2, unique=True).map(tuple)
RULES = st.lists(
    st.builds(
        ToolRule,
        tool=st.sampled_from(["*", "weather.*", "mail.send"]),
        effect=st.sampled_from(["allow", "deny", "approve"]),
        arguments=st.sampled_from([{}, {"to": "*@example.org"}]),
    ),
    max_size=2,
).map(tuple)


PRIVACY = (
    PrivacyRules(), PrivacyRules(enabled=True), PrivacyRules(enabled=True, kinds=("email",), restore=("a:b",)),
    PrivacyRules(enabled=True, kinds=("card", "email"), names=("Ann",), inputs="values", scope="session"),
    PrivacyRules(enabled=True, restore=("a:b", "c:d"), fields={"a:b": "name"}, inputs="texts"),
)  # fmt: skip


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    subprocesses = draw(st.booleans())
    read = draw(PATHS)
    hidden = tuple(
        path for path in ("/srv/a/b", "/usr/bin") if path not in read and lies_in(path, read)
    )
    write = tuple(path for path in draw(PATHS) if path not in hidden)
    return Policy(
        name=draw(st.sampled_from(["a", "b"])),
        filesystem=Filesystem(read=read, write=write, hidden=hidden, watch=draw(st.booleans())),
        processes=Processes(
            threads=draw(st.booleans()), subprocesses=subprocesses, execute_own=draw(st.booleans()), terminal=subprocesses and draw(st.booleans()), execute=tuple(path for path in draw(PATHS) if path not in hidden) if subprocesses else ()
        ),
        network=Network(loopback=draw(st.booleans())),
        packages=Packages(
            require=draw(REQUIREMENTS), allow=draw(REQUIREMENTS), max_bytes=draw(st.integers(1, 9)),
        ),
        limits=Limits(wall_seconds=draw(st.floats(0.1, 100)), processes=draw(st.integers(2, 99))),
        validation=Validation(
            mode=draw(st.sampled_from(["off", "advise", "enforce"])), blocked_imports=draw(NAMES),
            allowed_imports=draw(NAMES), blocked_builtins=draw(NAMES),
        ),
        privacy=draw(st.sampled_from(PRIVACY)),
        tools=Tools(rules=draw(RULES), calls=draw(st.integers(0, 9)), depth=draw(st.integers(0, 3))),
        syscalls=Syscalls(groups=draw(st.sampled_from([(), ("file_watching",)]))),
        environment=draw(st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["1", "2"]))),
        optional_layers=draw(st.lists(st.sampled_from(OPTIONAL_LAYERS), unique=True).map(tuple)),
    )  # fmt: skip


@given(policies(), policies())
def test_what_is_narrowed_exceeds_neither(policy: Policy, by: Policy) -> None:
    lesser = check_policy(narrow(policy, by))
    assert exceeds(lesser, policy) == ()
    assert exceeds(lesser, by) == ()


@given(policies())
def test_a_policy_does_not_exceed_itself_and_narrowing_by_itself_changes_nothing(
    policy: Policy,
) -> None:
    assert exceeds(policy, policy) == ()
    same = narrow(policy, policy)
    assert exceeds(policy, same) == ()


@given(policies(), policies(), policies())
def test_narrowing_twice_is_narrower(policy: Policy, by: Policy, again: Policy) -> None:
    assert exceeds(narrow(narrow(policy, by), again), narrow(policy, by)) == ()


@given(policies(), policies(), st.sampled_from([*MODULES, "os.path.x", "re"]))
def test_what_either_does_not_let_be_imported_the_lesser_does_not(
    policy: Policy, by: Policy, module: str
) -> None:
    """Asked of the rules themselves: a list of allowed modules stands above one of blocked ones."""
    lesser = narrow(policy, by)
    if forbids(policy, module) or forbids(by, module):
        assert forbids(lesser, module)
    if forbids(by, module) and not forbids(policy, module):
        assert exceeds(policy, by)


def test_an_allowed_package_gives_way_to_a_module_in_it_that_is_blocked() -> None:
    package = Policy(validation=Validation(allowed_imports=("os", "json")))
    without = Policy(validation=Validation(blocked_imports=("os.path",)))
    assert forbids(without, "os.path")
    assert not forbids(package, "os.path")
    assert narrow(package, without).validation.allowed_imports == ("json",)
    assert exceeds(package, without)[-1] == "validation.allowed_imports: os is among them"


def forbids(policy: Policy, module: str) -> bool:
    given = policy.validation
    return Rules(given.blocked_imports, given.allowed_imports).forbids_import(module)


@pytest.mark.parametrize("hidden", ["/srv/secret", "/srv/*", "/srv/**/sub", "/**/secret"])
def test_a_path_beneath_one_that_is_hidden_is_more(hidden: str) -> None:
    limit = Policy(filesystem=Filesystem(read=("/srv",), hidden=(hidden,)))
    for files in (
        Filesystem(read=("/srv/secret/sub",)),
        Filesystem(write=("/srv/secret/sub",)),
    ):
        policy = Policy(filesystem=files)
        assert "filesystem.hidden: reading /srv/secret/sub" in exceeds(policy, limit)
        assert narrow(policy, limit).filesystem == Filesystem()


STRICT = Policy()
MORE = {
    "filesystem: reading /srv": Policy(filesystem=Filesystem(read=("/srv",))),
    "filesystem.write: writing /srv": Policy(filesystem=Filesystem(write=("/srv",))),
    "filesystem.hidden: reading /srv/a": Policy(filesystem=Filesystem(read=("/srv",))),
    "filesystem.own: writing files in /logs": Policy(filesystem=Filesystem(own=("/logs",))),
    "filesystem.watch: opening files unnoticed": Policy(filesystem=Filesystem(watch=False)),
    "processes.subprocesses: starting programs": Policy(processes=Processes(subprocesses=True)),
    "processes.execute_own: executing what it writes": Policy(
        processes=Processes(subprocesses=True)
    ),
    "processes.terminal: a terminal": Policy(processes=Processes(subprocesses=True, terminal=True)),
    "processes.debug: tracing": Policy(processes=Processes(subprocesses=True, debug=True)),
    "network.loopback: sockets on its loopback": Policy(network=Network(loopback=True)),
    "http.allow: a.example.org:443 by https": Policy(
        http=Http(allow=(NetworkRule(host="a.example.org"),))
    ),
    "python.path: importing from /srv": Policy(python=Python(path=("/srv",))),
    "python.preload: importing json ahead": Policy(python=Python(preload=("json",))),
    "packages.require: importing six": Policy(packages=Packages(require=("six",))),
    "packages.max_bytes: 8,589,934,593 instead of 8,589,934,592": Policy(
        packages=Packages(max_bytes=(8 << 30) + 1)
    ),
    "syscalls.groups: the system calls of file_watching": Policy(
        syscalls=Syscalls(groups=("file_watching",))
    ),
    "devices.gpu: the GPU nvidia0": Policy(devices=Devices(gpu=("nvidia0",))),
    "isolation.kernel: sharing the host's kernel": Policy(),
    "evaluator.monty: answering expressions outside a cell": Policy(
        evaluator=Evaluator(monty=True)
    ),
    "limits.processes: 65 instead of 64": Policy(limits=Limits(processes=65)),
    "validation.mode: off instead of advise": Policy(validation=Validation(mode="off")),
    "validation.blocked_builtins: exec is not among them": Policy(
        validation=Validation(blocked_builtins=())
    ),
    "tools.calls: 1001 instead of 1000": Policy(tools=Tools(calls=1001)),
    "privacy.enabled: personal data is passed on": Policy(),
    "environment: A=1": Policy(environment={"A": "1"}),
    "optional_layers: going on without landlock": Policy(optional_layers=("landlock",)),
}


@pytest.mark.parametrize("words", MORE)
def test_what_is_more_is_said_in_words(words: str) -> None:
    leasts = {
        "hidden": Policy(filesystem=Filesystem(read=("/srv",), hidden=("/srv/a",))),
        "privacy": Policy(privacy=PrivacyRules(enabled=True)),
        "isolation": Policy(isolation=Isolation(kernel="own")),
    }
    least = next((leasts[word] for word in leasts if word in words), STRICT)
    assert words in exceeds(MORE[words], least)
    assert exceeds(least, MORE[words]) == ()
    assert exceeds(narrow(MORE[words], least), least) == ()


def test_every_field_of_a_policy_counts() -> None:
    """A field that is added and forgotten here could be widened by a caller."""
    compared = {line.partition(":")[0].partition(".")[0] for line in MORE}
    assert compared | {"name"} == {field.name for field in msgspec.structs.fields(Policy)}


def test_a_list_of_allowed_packages_is_narrowed_to_what_both_have() -> None:
    def allowing(*names: str) -> Policy:
        return Policy(packages=Packages(allow=names))

    assert exceeds(STRICT, allowing("six")) == ("packages.allow: more than allowed",)
    assert exceeds(allowing("six", "numpy"), allowing("six")) == (
        "packages.allow: numpy is among them",
    )
    assert narrow(allowing("six", "numpy"), allowing("six")).packages.allow == ("six",)
    assert narrow(STRICT, allowing("six")).packages.allow == ("six",)
    assert "six" not in narrow(allowing("numpy"), allowing("six")).packages.allow
    assert narrow(allowing("numpy"), allowing("six")).packages.allow  # an empty list allows all


def test_a_path_beneath_an_allowed_one_is_within() -> None:
    all_of_it = Policy(filesystem=Filesystem(read=("/srv",)))
    part = Policy(filesystem=Filesystem(read=("/srv/a", "/srvx")))
    assert exceeds(part, all_of_it) == ("filesystem: reading /srvx",)
    assert narrow(part, all_of_it).filesystem.read == ("/srv/a",)


def test_the_profiles_stand_in_their_order() -> None:
    assert set(profile_names()) == {
        "project", "server", "strict", "standard", "tool", "trusted-read", "workshop",
    }  # fmt: skip
    strict = load_policy("strict")
    assert exceeds(load_policy("tool"), strict) == ()
    assert exceeds(load_policy("trusted-read"), strict) == ("filesystem: reading /usr/share",)
    assert exceeds(strict, load_policy("trusted-read")) == ()
    assert exceeds(load_policy("standard"), strict)
    for name in ("server", "workshop"):
        beyond = exceeds(load_policy(name), load_policy("standard"))
        assert {each.partition(".")[0] for each in beyond} <= {
            "limits", "processes", "environment: EMAIL=cell@localhost",
        }  # fmt: skip
