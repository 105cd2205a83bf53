"""Sets of packages: made of wheels that no host code parses, whole or not there, and never changed."""

import glob
import os
import signal
import stat
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cellwright import HostSettings, PackageError, PackageStore, Policy, PolicyError, Sandbox
from cellwright.harness.cli.main import main
from cellwright.harness.sandbox.packages.resolution import run_tool
from cellwright.harness.sandbox.packages.store_directory import NO_DEADLINE
from cellwright.policies.policy import Packages
from tests.conftest import OPTIONAL
from tests.harness.packages.wheels import (
    FILENAME,
    Part,
    good_wheel,
    parts_of,
    store_at,
    write_wheel,
)

pytestmark = pytest.mark.needs("userns")
OTHER = {"other/__init__.py": b"import thing\nanswer = thing.answer + 1\n"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: `other` requires `thing`, and both have a part of the namespace `shared`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    good_wheel(folder, {"thing.py": b"answer = 42\n", "shared/a.py": b"a = 1\n"})
    good_wheel(folder, OTHER | {"shared/b.py": b"b = 2\n"}, name="other", requires="thing")
    return folder


def left_in(store: PackageStore) -> list[str]:
    """Return what is below new/, where nothing stays once nobody is at work."""
    return os.listdir(store.directory / "new")


def test_a_set_has_what_is_required_and_cells_import_it(store: PackageStore) -> None:
    policy = Policy(optional_layers=OPTIONAL)
    with Sandbox(
        policy=policy, packages=["other"], pool=0, host=HostSettings(package_store=store)
    ) as box:
        result = box.execute(
            "import other, shared.a, shared.b, sys\n"
            "other.answer, shared.a.a + shared.b.b, other.__cached__.endswith('.pyc')"
        )
        assert result.value == [43, 3, True], result.error
        assert result.violations == ()
        refused = box.execute("import other\nopen(other.__file__, 'a')")
    assert "PermissionError" in str(refused.error) or "Read-only" in str(refused.error)
    with Sandbox(policy=policy, pool=0) as box:
        assert "No module named 'other'" in str(box.execute("import other").error)


def test_the_policy_can_ask_for_packages(store: PackageStore) -> None:
    policy = Policy(packages=Packages(require=("thing",)), optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0, host=HostSettings(package_store=store)) as box:
        assert box.execute("import thing\nthing.answer").value == 42


def test_a_set_is_made_once_and_named_by_its_wheels(store: PackageStore, wheels: Path) -> None:
    made = store.build(store.lock(["other"]))
    again = store.build(store.lock(["other", "thing"]))
    assert again.id == made.id
    assert [each.id for each in store.list()] == [made.id]
    assert left_in(store) == []
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert store.build(store.lock(["other"])) == again  # nothing is asked again


def test_sets_share_the_files_of_their_wheels(store: PackageStore) -> None:
    one, two = store.build(store.lock(["thing"])), store.build(store.lock(["other"]))
    assert one.id != two.id
    assert Path(one.directory, "thing.py").samefile(Path(two.directory, "thing.py"))
    assert Path(one.directory, "thing.py").stat().st_mode & 0o777 == 0o444


def test_a_lock_file_makes_the_same_set(store: PackageStore, tmp_path: Path) -> None:
    from cellwright.harness.sandbox.packages.lock import pylock_text

    lock = store.lock(["other"])
    path = tmp_path / "pylock.toml"
    path.write_text(pylock_text(lock))
    assert store.lock(path) == lock


def test_a_requirements_file_with_hashes_is_obeyed(store: PackageStore, tmp_path: Path) -> None:
    digest = store.lock(["thing"]).wheels[0].sha256
    path = tmp_path / "two words" / "requirements.txt"
    path.parent.mkdir()
    path.write_text(f"thing==1.0 --hash=sha256:{digest}\n")
    assert [each.sha256 for each in store.lock(path).wheels] == [digest]
    path.write_text(f"thing==1.0 --hash=sha256:{digest[::-1]}\n")
    with pytest.raises(PackageError, match="pip: "):
        store.lock(path)


def test_a_wheel_of_a_local_version_is_found_by_its_quoted_address(
    store: PackageStore, wheels: Path
) -> None:
    from cellwright.harness.sandbox.packages.lock import wheel_of

    assert wheel_of("https://h/a-1%2Bcpu-py3-none-any.whl", "0" * 64).version == "1+cpu"
    with pytest.raises(PackageError, match="not a wheel"):
        wheel_of("https://h/..%2F..%2Fa.tar.gz", "0" * 64)
    assert wheel_of("https://h/..%2F..%2Fa-1-py3-none-any.whl", "0" * 64).filename == (
        "a-1-py3-none-any.whl"
    )


def test_a_wheel_that_changed_after_it_was_locked_is_refused(
    store: PackageStore, wheels: Path
) -> None:
    lock = store.lock(["thing"])
    good_wheel(wheels, {"thing.py": b"answer = 'another'\n"})
    with pytest.raises(PackageError, match="pip: "):
        store.build(lock)
    assert store.list() == ()
    assert left_in(store) == []


def test_a_source_distribution_is_refused_and_never_executed(
    store: PackageStore, wheels: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheels / "evil-1.0.zip", "w") as archive:
        archive.writestr("evil-1.0/setup.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
        archive.writestr("evil-1.0/PKG-INFO", "Metadata-Version: 1.0\nName: evil\nVersion: 1.0\n")
    with pytest.raises(PackageError, match="No matching distribution") as refused:
        store.lock(["evil"])
    assert "only wheels are used" in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_a_hostile_wheel_is_refused_by_the_cell_that_opens_it(
    store: PackageStore, wheels: Path, tmp_path: Path
) -> None:
    parts = [*parts_of({"thing.py": b""}), Part(b"../../outside.py", b"x")]
    write_wheel(wheels / FILENAME, parts)
    with pytest.raises(PackageError, match="not a plain path"):
        store.build(store.lock(["thing"]))
    assert (store.list(), left_in(store)) == ((), [])
    assert not list(tmp_path.rglob("outside.py"))


def test_a_store_may_be_named_from_the_working_directory(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = store_at(Path("store"), Path("wheels"))
    made = store.build(store.lock(["thing"]))
    assert Path(made.directory, "thing.py").is_file()


def test_a_large_file_is_copied_in_pieces(tmp_path: Path, wheels: Path) -> None:
    """The host would otherwise hold as much memory as a wheel of zeros unpacks to."""
    zeros = Part(b"thing/zeros.bin", bytes(64 << 20), method=zipfile.ZIP_DEFLATED)
    write_wheel(wheels / FILENAME, [*parts_of({"thing/__init__.py": b""}), zeros])
    store = store_at(tmp_path / "store", wheels)
    lock = store.lock(["thing"])
    tracemalloc.start()
    try:
        made = store.build(lock)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.size_bytes > 64 << 20
    assert most < 16 << 20, most


def test_packages_that_have_one_file_in_two_forms_are_refused(
    store: PackageStore, wheels: Path
) -> None:
    good_wheel(wheels, {"Thing.py": b"answer = 1\n"}, name="other", requires="thing")
    with pytest.raises(PackageError, match="both have"):
        store.build(store.lock(["other"]))
    assert store.list() == ()


@pytest.mark.parametrize("limits", [{"max_bytes": 4096}, {"allow": ["other"]}], ids=str)
def test_a_set_beyond_what_is_allowed_is_refused(
    limits: dict[str, object], tmp_path: Path, wheels: Path
) -> None:
    good_wheel(wheels, {"thing.py": b"#" * 8192})
    store = store_at(tmp_path / "store", wheels, **limits)
    with pytest.raises(PackageError):
        store.build(store.lock(["other"]))
    assert store_at(tmp_path / "store", wheels).list() == ()


def test_no_more_wheels_are_unpacked_than_a_set_may_have(tmp_path: Path, wheels: Path) -> None:
    """A thousand wheels of the largest size would otherwise fill the disk before they are counted."""
    requires = None
    for name in ("first", "second", "third", "fourth"):
        good_wheel(wheels, {f"{name}.py": b"#" * 60_000}, name=name, requires=requires or "")
        requires = name
    store = store_at(tmp_path / "store", wheels, max_bytes=100_000)
    with pytest.raises(PackageError, match="at most 100000"):
        store.build(store.lock(["fourth"]))
    assert len(os.listdir(store.directory / "wheels")) == 2


def test_a_tool_that_writes_without_end_is_ended(tmp_path: Path) -> None:
    """As pip does with what a hostile index sends: many files, or one again and again."""
    program = "import signal\nfor n in range(64):\n open(f'{n}', 'wb').write(bytes(1 << 20))\nsignal.pause()"
    command = [sys.executable, "-c", program]
    with pytest.raises(PackageError, match="had written more than"):
        run_tool("pip", command, {}, str(tmp_path), NO_DEADLINE, 32 << 20)


def test_the_policys_list_of_packages_holds_for_a_sandbox(store: PackageStore) -> None:
    policy = Policy(packages=Packages(allow=("thing",)), optional_layers=OPTIONAL)
    with pytest.raises(PackageError, match=r"packages\.allow: must have other"):
        Sandbox(policy=policy, packages=["other"], host=HostSettings(package_store=store))
    with Sandbox(
        policy=policy, packages=["thing"], pool=0, host=HostSettings(package_store=store)
    ) as box:
        assert box.execute("import thing\nthing.answer").value == 42


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda path: (path.chmod(0o644), path.write_text("answer = 43\n")),
    "removed": lambda path: path.unlink(),
    "replaced": lambda path: (path.unlink(), path.write_text("answer = 42\n")),
    "made executable": lambda path: path.chmod(0o555),
    "added to": lambda path: path.with_name("more.py").write_text("x"),
    "replaced by a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_set_that_was_changed_is_not_used(
    change: Callable[[Path], object], store: PackageStore
) -> None:
    made = store.build(store.lock(["thing"]))
    store.open(["thing"]).close()
    change(Path(made.directory, "thing.py"))
    with pytest.raises(PackageError, match="was changed"):
        store.open(["thing"])
    store.remove(made.id)
    store.open(["thing"]).close()  # made again


def test_the_command_line_locks_builds_lists_and_removes_a_set(
    tmp_path: Path, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, tag = tmp_path / "pylock.toml", sys.implementation.cache_tag
    place = ("--directory", str(tmp_path / "store"))
    source = ("--find-links", str(wheels), "--no-index", "--python", sys.executable)
    assert main(["env", "lock", "other", "-o", str(lock), *place, *source]) == 0
    assert "thing" in lock.read_text()
    assert main(["env", "build", str(lock), *place, *source, "--optional", "cgroup"]) == 0
    made = capsys.readouterr().out.strip()
    assert main(["env", "list", *place]) == 0
    line = capsys.readouterr().out
    assert line.startswith(made[:12])
    assert f"  {tag}  " in line
    assert "other 1.0, thing 1.0" in line
    assert main(["env", "remove", made[:12], *place]) == 0
    assert main(["env", "list", *place]) == 0
    assert capsys.readouterr().out == ""


def test_a_change_that_hides_its_time_is_found_by_its_digest(store: PackageStore) -> None:
    made = store.build(store.lock(["thing"]))
    path = Path(made.directory, "thing.py")
    before = path.stat()
    path.chmod(0o644)
    path.write_text("answer = 43\n")
    path.chmod(0o444)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    store.check(made.id)
    with pytest.raises(PackageError, match="was changed"):
        store.check(made.id, contents=True)


def test_a_set_in_use_is_neither_removed_nor_pruned(store: PackageStore) -> None:
    policy = Policy(optional_layers=OPTIONAL)
    with Sandbox(
        policy=policy, packages=["thing"], pool=0, host=HostSettings(package_store=store)
    ) as box:
        (made,) = store.list()
        with pytest.raises(PackageError, match="in use"):
            store.remove(made.id)
        assert store.prune(max_age_seconds=0) == ()
        assert box.execute("import thing\nthing.answer").value == 42
    assert store.prune(max_age_seconds=0) == (made.id,)
    assert (store.list(), os.listdir(store.directory / "wheels")) == ((), [])


def test_sandboxes_have_one_set_open_at_the_same_time(store: PackageStore) -> None:
    policy = Policy(optional_layers=OPTIONAL)
    with (
        Sandbox(
            policy=policy, packages=["thing"], pool=0, host=HostSettings(package_store=store)
        ) as one,
        Sandbox(
            policy=policy, packages=["thing"], pool=0, host=HostSettings(package_store=store)
        ) as two,
    ):
        assert [box.execute("import thing").ok for box in (one, two)] == [True, True]


def test_pruning_by_size_keeps_the_last_used(store: PackageStore) -> None:
    old, new = store.build(store.lock(["thing"])), store.build(store.lock(["other"]))
    os.utime(store.directory / "sets" / old.id, (1, 1))
    assert store.prune(max_bytes=new.size_bytes) == (old.id,)
    assert [each.id for each in store.list()] == [new.id]
    assert len(os.listdir(store.directory / "wheels")) == 2  # the set that is left has both


BUILD = textwrap.dedent("""
    import sys
    from cellwright import PackageStore
    store = PackageStore(
        sys.argv[1], find_links=sys.argv[2], index=False, optional_layers=sys.argv[3:]
    )
    print(store.build(store.lock(["other"])).id)
""")


def building(store: PackageStore, wheels: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(store.directory), str(wheels), *OPTIONAL]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_processes_that_make_one_set_at_once_get_the_same(
    store: PackageStore, wheels: Path
) -> None:
    processes = [building(store, wheels) for _ in range(3)]
    told = [each.communicate(timeout=120) for each in processes]
    assert {out for out, _ in told} == {f"{store.build(store.lock(['other'])).id}\n"}, told
    assert left_in(store) == []


def test_a_process_that_is_killed_leaves_nothing_half_made(
    store: PackageStore, wheels: Path
) -> None:
    """Killed when pip runs, when the first wheel is opened, and when the first one is there."""
    for sign in ("new/*/wanted.txt", "new/*/*/site", "wheels/*/manifest.json"):
        with building(store, wheels) as process:
            while process.poll() is None and not glob.glob(f"{store.directory}/{sign}"):
                pass
            os.killpg(process.pid, signal.SIGKILL)
        assert all(store.get(each.id) for each in store.list())
    made = store.build(store.lock(["other"]))
    store.check(made.id, contents=True)
    assert left_in(store) == []


@pytest.mark.needs("root")
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_full_disk_leaves_nothing_half_made(
    method: int, store: PackageStore, wheels: Path
) -> None:
    """A disk that is full when the wheel comes, and one that is when its files come."""
    large = Part(b"large.bin", bytes(1 << 20), method=method)
    write_wheel(wheels / FILENAME, [*parts_of({"thing.py": b"answer = 42\n"}), large])
    store.directory.mkdir()
    # A file system of 256 KiB in a mount namespace of its own, which ends with the process.
    inner = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", str(store.directory)]
    script = BUILD.replace("print(", "import os\ntry:\n    print(", 1).rstrip() + (
        "\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
        "for place in ('new', 'sets'):\n"
        "    path = os.path.join(sys.argv[1], place)\n"
        "    print(place, os.listdir(path) if os.path.isdir(path) else [])\n"
    )
    shell = '"$0" "$@"'
    setup = " ".join(inner)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{setup} && exec {shell}", sys.executable, "-c", script,
         str(store.directory), str(wheels), *OPTIONAL],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "PackageError" in done.stdout, done
    assert "No space left" in done.stdout
    assert "new []\nsets []\n" in done.stdout


def test_wrong_arguments_are_told_by_name(
    tmp_path: Path, wheels: Path, store: PackageStore
) -> None:
    with pytest.raises(PolicyError, match="find_links: must be a directory"):
        PackageStore(tmp_path, find_links=tmp_path / "missing")
    with pytest.raises(PolicyError, match="find_links: required with index=False"):
        PackageStore(tmp_path, index=False)
    for wrong in ("-e .", "thing @ https://192.0.2.1/thing.whl", "--index-url=x", 1, b"thing"):
        with pytest.raises(PolicyError, match="packages: "):
            store.lock([wrong])  # type: ignore[list-item]
    (tmp_path / "pylock.toml").write_text("lock-version = '1.0'")
    with pytest.raises(PackageError, match=r"pylock\.toml"):
        store.lock(tmp_path / "pylock.toml")


def test_a_store_that_others_may_write_to_is_refused(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PackageError, match="others may write"):
        store_at(tmp_path / "open", wheels).lock(["thing"])


@pytest.mark.parametrize("mode", [0o444 | stat.S_ISUID, 0o644], ids=oct)
def test_a_file_with_another_mode_is_a_change(mode: int, store: PackageStore) -> None:
    made = store.build(store.lock(["thing"]))
    Path(made.directory, "thing.py").chmod(mode)
    with pytest.raises(PackageError, match=r"thing.py was changed"):
        store.check(made.id)


def test_a_changed_file_never_gets_into_another_set(store: PackageStore) -> None:
    """Sets share files: a set that is made after the change would have it too."""
    first, second = store.build(store.lock(["thing"])), store.lock(["other"])
    changed = Path(first.directory, "thing.py")
    told = changed.stat()
    changed.chmod(0o644)
    changed.write_bytes(b"answer = 43\n")
    changed.chmod(0o444)
    os.utime(changed, ns=(told.st_atime_ns, told.st_mtime_ns))
    with pytest.raises(PackageError, match=r"thing.py was changed after the wheel") as refused:
        store.build(second)
    assert "remove all sets" in str(refused.value)
    store.remove(first.id)
    store.check(store.build(second).id, contents=True)


def test_a_set_without_a_readable_manifest_is_made_again(store: PackageStore) -> None:
    made = store.build(store.lock(["thing"]))
    (Path(made.directory).parent / "manifest.json").write_text("{")
    assert store.list() == ()
    assert store.build(made.lock).id == made.id
    store.check(made.id, contents=True)


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf")])
def test_pruning_by_no_number_is_refused(limit: float, store: PackageStore) -> None:
    for name in ("max_age_seconds", "max_bytes"):
        with pytest.raises(PolicyError, match=f"{name}: must be from 0"):
            store.prune(**{name: limit})


def test_a_wheel_with_many_long_names_that_are_left_out_is_opened(
    store: PackageStore, wheels: Path
) -> None:
    names = [f"thing-1.0.data/scripts/{number:0200}/{'x' * 250}" for number in range(300)]
    good_wheel(wheels, {"thing.py": b""} | dict.fromkeys(names, b""))
    store.build(store.lock(["thing"]))


def test_a_package_whose_file_is_a_directory_of_another_is_refused(
    store: PackageStore, wheels: Path
) -> None:
    good_wheel(wheels, {"thing.py/a.py": b""}, name="other", requires="thing")
    with pytest.raises(PackageError, match=r"and another package both have 'thing.py"):
        store.build(store.lock(["other"]))
