"""Packages of single calls: a launcher for each set, kept while memory allows, in the call's time."""

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright import (
    HostSettings,
    PackageError,
    PackageStore,
    Policy,
    PolicyError,
    PoolSettings,
    Sandbox,
    exceeds,
    narrow,
)
from cellwright.harness.sandbox.local import LocalCells
from cellwright.harness.sandbox.packages.required import HotSets, has_module, imports_of
from cellwright.policies.policy import Limits, Packages
from tests.conftest import OPTIONAL, policy_named
from tests.harness.packages.wheels import good_wheel, store_at

pytestmark = pytest.mark.needs("userns")
BORN = b"import os\nborn = os.readlink('/proc/self/ns/net')\n"
IS_PRELOADED = "import os, {0}\n{0}.born != os.readlink('/proc/self/ns/net')"
PATIENT = Limits(wall_seconds=300.0)  # a set is built within the time of the call
POLICY = Policy(limits=PATIENT, optional_layers=OPTIONAL)
LEARNING = replace(POLICY, packages=Packages(learn_preload=True))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    good_wheel(folder, {"thing.py": BORN, "shared/a.py": b"a = 1\n"})
    good_wheel(folder, {"other/__init__.py": BORN, "other/part.py": b""}, name="other")
    return folder


@pytest.fixture
def box(store: PackageStore) -> Iterator[Sandbox]:
    with Sandbox(policy=POLICY, pool=0, host=HostSettings(package_store=store)) as sandbox:
        yield sandbox


def hot_sets_of(sandbox: Sandbox) -> HotSets:
    cells = sandbox._cells
    assert isinstance(cells, LocalCells)
    return cells._packaged._sets()


def set_of(store: PackageStore, lock: str) -> str:
    return next(each.id for each in store.list() if str(each.lock) == lock)


def test_a_call_has_the_packages_that_it_names_and_no_others(box: Sandbox) -> None:
    code = "from importlib.util import find_spec\n[bool(find_spec(n)) for n in ('thing', 'other')]"
    assert box.execute(code).value == [False, False]
    assert box.execute(code, packages=["thing"]).value == [True, False]
    assert box.execute(code, requirements=["other==1.*"]).value == [False, True]
    assert box.execute(code, packages=["thing", "other"]).value == [True, True]
    assert box.execute(code).value == [False, False]


def test_the_packages_of_the_sandbox_are_in_every_set(store: PackageStore) -> None:
    with Sandbox(
        policy=POLICY, packages=["thing"], pool=0, host=HostSettings(package_store=store)
    ) as sandbox:
        assert sandbox.execute("import thing").ok
        assert sandbox.execute("import thing, other", packages=["other"]).ok


def test_commands_and_sessions_have_packages(store: PackageStore) -> None:
    standard = replace(policy_named("standard"), limits=PATIENT)
    with Sandbox(policy=standard, pool=0, host=HostSettings(package_store=store)) as sandbox:
        with sandbox.session(packages=["thing"]) as session:
            assert session.execute("import thing\nthing.born != ''").value is True
            with pytest.raises(PolicyError, match=r"packages: a session has the same packages"):
                session.execute("1", packages=["other"])
            branch = session.fork()
            assert branch.execute("thing.born != ''").value is True
            with pytest.raises(PolicyError, match=r"packages: session .* was opened with others"):
                sandbox.session(session.id, packages=["other"])
        ran = sandbox.run(["/bin/sh", "-c", "echo hello"], packages=["thing"])
        assert ran.stdout == "hello\n", ran


def test_a_session_keeps_its_launcher_when_its_set_is_evicted(store: PackageStore) -> None:
    least = PoolSettings(size=0, packages_bytes=1)
    with Sandbox(policy=POLICY, pool=least, host=HostSettings(package_store=store)) as sandbox:
        with sandbox.session(packages=["thing"]) as session:
            session.execute("import thing\nx = 1")
            assert sandbox.execute("import other", packages=["other"]).ok
            assert len(list(hot_sets_of(sandbox))) == 1
            assert session.execute("x").value == 1
            with pytest.raises(PackageError, match="in use"):
                store.remove(set_of(store, "thing 1.0"))
        store.remove(set_of(store, "thing 1.0"))


def test_the_least_recently_used_launcher_ends_beyond_the_cap(store: PackageStore) -> None:
    with Sandbox(policy=POLICY, pool=0, host=HostSettings(package_store=store)) as sandbox:
        assert sandbox.execute("1", packages=["thing"]).ok
        (hot,) = hot_sets_of(sandbox)
        one, launcher = hot.supervisor.memory_bytes(), hot.supervisor.generation.launcher
        for _ in range(2):
            assert sandbox.execute("1", packages=["other"]).ok
        assert len(list(hot_sets_of(sandbox))) == 2
        assert next(iter(hot_sets_of(sandbox))) is hot
    other = set_of(store, "other 1.0")
    assert one > 1 << 20
    assert launcher.memory_bytes() == 0  # gone
    cap = PoolSettings(size=0, packages_bytes=one * 5 // 2)
    with Sandbox(policy=POLICY, pool=cap, host=HostSettings(package_store=store)) as sandbox:
        for wanted in (["thing"], ["other"], ["thing"], ["thing", "other"]):
            assert sandbox.execute("1", packages=wanted).ok
        assert len(list(hot_sets_of(sandbox))) == 2
        assert store.prune(max_age_seconds=0) == (other,)


def test_a_set_that_is_not_built_in_the_time_of_the_call_is_refused(tmp_path: Path) -> None:
    """The index accepts a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        store = PackageStore(tmp_path / "store", index_url=url, optional_layers=OPTIONAL)
        with Sandbox(policy=POLICY, pool=0, host=HostSettings(package_store=store)) as sandbox:
            with pytest.raises(PackageError, match="was not built within 2 s, the timeout") as late:
                sandbox.execute("1", packages=["thing"], timeout=2)
            assert "cellwright env build" in str(late.value)
            assert sandbox.execute("1").value == 1


def test_a_set_that_another_process_builds_is_waited_for_in_the_time_of_the_call(
    store: PackageStore, box: Sandbox
) -> None:
    lock = store.lock(["thing"])
    (store.directory / "held").mkdir(exist_ok=True)
    held = os.open(store.directory / "held" / f"build-{lock.id}", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(PackageError, match="was not built within 1 s"):
            box.execute("1", packages=["thing"], timeout=1)
    finally:
        os.close(held)
    assert box.execute("import thing", packages=["thing"]).ok


def test_a_cancelled_call_stops_building(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        store = PackageStore(tmp_path / "store", index_url=url, optional_layers=OPTIONAL)
        with Sandbox(policy=POLICY, pool=0, host=HostSettings(package_store=store)) as sandbox:
            run = sandbox.start("1", packages=["thing"])
            with silent.accept()[0]:  # pip waits for an answer
                run.cancel()
                with pytest.raises(PackageError, match="cancelled while the set of packages was"):
                    run.result()


def test_calls_that_want_one_set_at_once_build_it_once(store: PackageStore, box: Sandbox) -> None:
    results: list[bool] = []

    def call() -> None:
        results.append(box.execute("import thing", packages=["thing"]).ok)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == [True] * 4
    assert (len(store.list()), len(list(hot_sets_of(box)))) == (1, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"language": "bash", "packages": ["thing"]}, "packages: only Python programs have them"),
        ({"packages": ["thing"], "requirements": ["other"]}, "requirements: another name for pack"),
        ({"packages": ["-e ."]}, "packages: must be requirements such as"),
        ({"packages": [5]}, "packages: must be requirements such as"),
        ({"packages": 5}, "packages: must be a list of requirements"),
    ],
)
def test_what_no_call_may_name_is_refused(
    given: dict[str, object], said: str, box: Sandbox
) -> None:
    with pytest.raises(PolicyError, match=said):
        box.execute("true", **given)  # type: ignore[arg-type]


def test_a_call_adds_nothing_to_a_lock_file(store: PackageStore, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("thing\n")
    with Sandbox(
        policy=POLICY,
        packages=tmp_path / "requirements.txt",
        pool=0,
        host=HostSettings(package_store=store),
    ) as sandbox:
        assert sandbox.execute("import thing").ok
        with pytest.raises(PolicyError, match="packages: a call cannot add packages to the lock f"):
            sandbox.execute("1", packages=["other"])


def test_the_policys_list_of_packages_holds_for_calls(store: PackageStore) -> None:
    policy = replace(POLICY, packages=Packages(allow=("thing",)))
    with Sandbox(policy=policy, pool=0, host=HostSettings(package_store=store)) as sandbox:
        assert sandbox.execute("import thing", packages=["thing"]).ok
        with pytest.raises(PackageError, match=r"packages\.allow: must have other"):
            sandbox.execute("1", packages=["other"])


def test_a_module_that_the_policy_names_is_preloaded_where_a_set_has_it(
    store: PackageStore,
) -> None:
    policy = replace(POLICY, packages=Packages(preload=("thing",)))
    with Sandbox(policy=policy, pool=0, host=HostSettings(package_store=store)) as sandbox:
        assert sandbox.execute(IS_PRELOADED.format("thing"), packages=["thing"]).value is True
        assert sandbox.execute(IS_PRELOADED.format("other"), packages=["other"]).value is False
    with Sandbox(
        policy=policy, packages=["thing"], pool=0, host=HostSettings(package_store=store)
    ) as sandbox:
        assert sandbox.execute(IS_PRELOADED.format("thing")).value is True


@pytest.mark.parametrize("own", [True, False])
def test_what_programs_import_is_preloaded_by_the_next_launcher(
    own: bool, store: PackageStore
) -> None:
    both = ["thing", "other"]
    of_box, of_call = (both, ()) if own else (None, both)
    with Sandbox(
        policy=LEARNING, packages=of_box, pool=1, host=HostSettings(package_store=store)
    ) as sandbox:

        def is_preloaded(name: str) -> list[object]:
            result = sandbox.execute(IS_PRELOADED.format(name), packages=of_call)
            sandbox.settle()
            return [result.value, result.pool_hit]

        assert is_preloaded("thing")[0] is False
        assert is_preloaded("thing") == [True, True]
        assert is_preloaded("other") == [False, True]
        assert is_preloaded("other") == [True, True]


def test_sessions_teach_what_they_import(store: PackageStore) -> None:
    with Sandbox(policy=LEARNING, pool=1, host=HostSettings(package_store=store)) as sandbox:
        with sandbox.session(packages=["thing"]) as session:
            assert session.execute(IS_PRELOADED.format("thing")).value is False
        sandbox.settle()
        with sandbox.session(packages=["thing"]) as session:
            assert session.execute(IS_PRELOADED.format("thing")).value is True


def test_nothing_is_learnt_unless_the_policy_says_so(store: PackageStore) -> None:
    with Sandbox(
        policy=POLICY, packages=["thing"], pool=1, host=HostSettings(package_store=store)
    ) as sandbox:
        for _ in range(2):
            assert sandbox.execute(IS_PRELOADED.format("thing")).value is False
            sandbox.settle()


def test_a_module_that_cannot_be_imported_ahead_leaves_the_launcher_as_it_was(
    tmp_path: Path, wheels: Path
) -> None:
    thread = (
        b"import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    good_wheel(wheels, {"thing.py": BORN + thread})
    store = store_at(tmp_path / "store", wheels)
    with Sandbox(
        policy=LEARNING, packages=["thing"], pool=1, host=HostSettings(package_store=store)
    ) as sandbox:
        for _ in range(3):
            result = sandbox.execute(IS_PRELOADED.format("thing"))
            assert (result.ok, result.value) == (True, False), result
            sandbox.settle()


def test_closing_ends_a_launcher_that_is_on_its_way(store: PackageStore) -> None:
    for _ in range(3):
        with Sandbox(policy=LEARNING, pool=1, host=HostSettings(package_store=store)) as sandbox:
            assert sandbox.execute("import thing", packages=["thing"]).ok
        assert not [each for each in threading.enumerate() if each.name == "cellwright-preload"]


def test_a_program_names_modules_but_only_those_of_the_set_count(store: PackageStore) -> None:
    code = (
        "import thing, other.part as p, os\n  from shared import a, nothing\n"
        "from other import *\nimport ..x\nfrom . import thing\nimport other.__main__\n"
        "text = '''\nimport thing.nothing\n'''\n"
    )
    site = store.build(store.lock(["thing", "other"])).directory
    named = {each for each in imports_of(code) if has_module(site, each)}
    assert named == {"thing", "other", "other.part", "shared.a"}
    assert len(list(imports_of("import " + "a, " * 100_000))) < 500
    assert not list(imports_of(" " * 200_000 + "import thing"))


def test_a_policy_is_narrowed_in_what_it_preloads_of_packages() -> None:
    wide = Policy(packages=Packages(preload=("a", "b"), learn_preload=True))
    less = Policy(packages=Packages(preload=("b",)))
    assert narrow(wide, less).packages == less.packages
    assert exceeds(less, wide) == ()
    assert exceeds(wide, less) == (
        "packages.preload: importing a ahead",
        "packages.learn_preload: importing ahead what programs import",
    )
    with pytest.raises(PolicyError, match=r"packages\.preload: must be names of modules"):
        Sandbox(policy=Policy(packages=Packages(preload=("a b",))))
