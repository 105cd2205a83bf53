"""Hostile indexes, folders and lock files make the host execute no code and ask nowhere else."""

import json
import os
import resource
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cellwright import HostSettings, PackageError, PackageStore, PolicyError, Sandbox
from cellwright.harness.cli.exit_status import _message_of
from cellwright.harness.sandbox.packages.lock import (
    Lock,
    check_requirements,
    read_requirements,
    wheel_of,
)
from cellwright.harness.sandbox.packages.package_sources import WheelSource
from cellwright.harness.sandbox.packages.resolution import fetch, resolve
from cellwright.harness.sandbox.packages.store_directory import _copy
from cellwright.harness.sandbox.pythons import this_python
from cellwright.policies.policy import Policy
from tests.conftest import OPTIONAL
from tests.harness.packages.wheels import (
    FILENAME,
    good_wheel,
    parts_of,
    store_at,
    write_wheel,
)
from tests.host_settings import pip_conf

pytestmark = pytest.mark.needs("userns")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    good_wheel(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source distribution that writes a file `ran` beside itself as soon as it is built."""
    tree = tmp_path / "sources" / "evil-1.0"
    tree.mkdir(parents=True)
    (tree / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tree / "backend.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    path = tmp_path / "sources" / "evil-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, "evil-1.0")
    return path


def test_pip_alone_would_execute_it(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-Im", "pip", "install", "--dry-run", "--no-index", "--quiet"]
    subprocess.run(
        [*command, "--only-binary", ":all:", str(source)], capture_output=True, check=False
    )
    assert (tmp_path / "ran").exists()


def test_an_address_in_the_metadata_of_a_wheel_is_never_built(
    store: PackageStore, wheels: Path, source: Path, tmp_path: Path
) -> None:
    good_wheel(wheels, {}, name="other", requires=f"evil @ {source.as_uri()}")
    with pytest.raises(PackageError, match="only wheels"):
        store.lock(["other"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("line", ["-e {tree}", "{tree}", "{source}", "--no-binary :all:\nevil"])
def test_pip_builds_nothing_whatever_it_is_asked(
    line: str, wheels: Path, source: Path, tmp_path: Path
) -> None:
    asked = line.format(tree=source.parent / "evil-1.0", source=source)
    with pytest.raises(PackageError, match="only wheels"):
        resolve([asked], WheelSource(str(source.parent), index=False), this_python())
    assert not (tmp_path / "ran").exists()


def test_a_wheel_at_an_address_in_metadata_is_refused(
    store: PackageStore, wheels: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hidden = good_wheel(elsewhere, {"hidden.py": b""}, name="hidden")
    good_wheel(wheels, {}, name="other", requires=f"hidden @ {hidden.as_uri()}")
    with pytest.raises(PackageError, match="requires an address"):
        store.lock(["other"])


@pytest.mark.parametrize(
    "line",
    [
        "-e .", "--index-url https://h/", "--extra-index-url=https://h/", "--find-links /tmp",
        "--no-binary :all:", "-r other.txt", "-c other.txt", "--pre", "./thing", "git+https://h/a",
        "thing @ file:///tmp/a.whl", "https://h/thing-1.0-py3-none-any.whl", "thing==${HOME}",
        "thing; platform_version == '${HOME}'", "thing --config-settings=a=b",
        "thing==1.0 --hash=md5:00", "thing \\\n-e .",
    ],
)  # fmt: skip
def test_a_requirements_file_names_packages_and_hashes_only(
    line: str, store: PackageStore, tmp_path: Path
) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"thing==1.0\n{line}\n")
    with pytest.raises((PackageError, PolicyError), match="requirements.txt: "):
        store.lock(path)


@pytest.mark.parametrize(
    "text",
    [
        # escapes in a marker: the lines that pip reads would have what they stand for
        r"""thing; os_name != 'x"\n--extra-index-url https://h/ #'""",
        r"""thing; os_name != 'x"\x27 #\n--extra-index-url https://h/'""",
        r"thing; os_name != '\x24{HOME}'", r"thing; os_name != '\0'",
        "thing===1\\", "thing; os_name != 'x\n-e .'", "thing; os_name != '\u202e'",
        f"thing; {'(' * 500}os_name != 'x'{')' * 500}", "-r other.txt", "--index-url=https://h/",
    ],
)  # fmt: skip
def test_a_requirement_is_one_line_that_means_what_it_says(text: str) -> None:
    with pytest.raises(PolicyError, match="packages: must be requirements such as"):
        check_requirements("packages", [text])


def _lock_of(lock: Path, sha256: str, **wheel: str) -> Path:
    """Write a lock of `thing` with one wheel."""
    fields = "".join(f"{key} = {json.dumps(value)}\n" for key, value in wheel.items())
    lock.write_text(
        'lock-version = "1.0"\ncreated-by = "test"\n[[packages]]\nname = "thing"\n'
        f'version = "1.0"\n[[packages.wheels]]\n{fields}hashes = {{sha256 = "{sha256}"}}\n'
    )
    return lock


@pytest.mark.parametrize("dot", [".", "%2e"])
@pytest.mark.parametrize("end", ["", "?/x-y-z", "#/x-y-z"])
def test_a_file_name_that_stands_for_millions_of_tags_is_refused(
    dot: str, end: str, store: PackageStore, tmp_path: Path
) -> None:
    """packaging makes each of them: 236 s for 27 million (measured)."""

    def tags(count: int) -> str:
        return "-".join(dot.join(f"{kind}{each}" for each in range(count)) for kind in "pna")

    lock = tmp_path / "pylock.toml"
    with pytest.raises(PackageError, match="more than 100000 tags"):
        store.lock(_lock_of(lock, "0" * 64, url=f"https://h/thing-1.0-{tags(300)}.whl{end}"))
    with pytest.raises(PackageError, match="No wheel found matching"):
        store.lock(_lock_of(lock, "0" * 64, url=f"https://h/thing-1.0-{tags(3)}.whl{end}"))


@pytest.mark.parametrize("build", ["%00", "%1b[2J", "%ff", "a" * 300])
def test_a_file_name_that_no_index_serves_is_refused(
    build: str, store: PackageStore, tmp_path: Path
) -> None:
    url = f"https://h/thing-1.0-1{build}-py3-none-any.whl"
    with pytest.raises(PackageError, match="the lock has an invalid file name"):
        store.lock(_lock_of(tmp_path / "pylock.toml", "0" * 64, url=url))


@pytest.mark.parametrize(
    ("path", "url"),
    [
        (FILENAME, f"file:///folder/{FILENAME}"),
        (f"a b#c/{FILENAME}", f"file:///folder/a%20b%23c/{FILENAME}"),
        (f"/other/{FILENAME}", f"file:///other/{FILENAME}"),
        (f"https://h/{FILENAME}", f"file:///folder/https%3A/h/{FILENAME}"),
        (f"//h/{FILENAME}", f"file:////h/{FILENAME}"),
    ],
)
def test_a_path_in_a_lock_is_never_an_address(
    path: str, url: str, store: PackageStore, tmp_path: Path
) -> None:
    (wheel,) = store.lock(_lock_of(tmp_path / "pylock.toml", "0" * 64, path=path)).wheels
    assert wheel.url.replace(tmp_path.as_uri(), "file:///folder") == url


def test_a_requirements_file_may_have_comments_and_long_lines(
    store: PackageStore, tmp_path: Path
) -> None:
    digest = store.lock(["thing"]).wheels[0].sha256
    path = tmp_path / "requirements.txt"
    path.write_text(
        f"# made by a tool\nthing==1.0 ; python_version > '3' \\\n    --hash=sha256:{'0' * 64} \\\n"
        f"    --hash=sha256:{digest}\n    # via other\n\n"
    )
    assert store.lock(path) == store.lock(["thing"])


@pytest.mark.parametrize(
    "url",
    [
        "file:///a\n-e /b\nfile:///thing-1.0-py3-none-any.whl", "thing-1.0-py3-none-any.whl",
        "file:///a --no-binary=:all: /thing-1.0-py3-none-any.whl", "-e/thing-1.0-py3-none-any.whl",
        "https://h/${HOME}/thing-1.0-py3-none-any.whl", "git+https://h/thing-1.0-py3-none-any.whl",
        "https://h/..%252Fthing-1.0-py3-none-any.whl", "https://h/\x1b/thing-1.0-py3-none-any.whl",
    ],
)  # fmt: skip
def test_an_address_in_a_lock_that_pip_could_read_otherwise_is_refused(url: str) -> None:
    with pytest.raises(PackageError):
        wheel_of(url, "0" * 64)


def test_a_lock_that_names_a_directory_builds_nothing(
    store: PackageStore, wheels: Path, source: Path, tmp_path: Path
) -> None:
    (wheels / FILENAME).unlink()
    tree = source.parent / FILENAME
    (source.parent / "evil-1.0").rename(tree)
    with pytest.raises(PackageError):
        store.build(Lock(store.python, (wheel_of(tree.as_uri(), "0" * 64),)))
    assert not (tmp_path / "ran").exists()


def test_without_an_index_nothing_else_is_asked(
    store: PackageStore, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    good_wheel(elsewhere, {"hidden.py": b""}, name="hidden")
    monkeypatch.setenv("PIP_FIND_LINKS", str(elsewhere))
    with pytest.raises(PackageError, match="hidden"):
        store.lock(["hidden"])
    lock = Lock(store.python, (wheel_of("https://127.0.0.1:9/a-1-py3-none-any.whl", "0" * 64),))
    with pytest.raises(PackageError, match="is not in"):
        store.build(lock)
    good_wheel(wheels, {}, name="other", requires="a @ https://127.0.0.1:9/a-1-py3-none-any.whl")
    with pytest.raises(PackageError, match="is refused socket"):
        store.lock(["other"])


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK])
def test_what_is_no_file_in_the_folder_keeps_no_reader_waiting(
    kind: int, store: PackageStore, wheels: Path
) -> None:
    lock = store.lock(["thing"])
    os.mknod(wheels / "other-1.0-py3-none-any.whl", kind | 0o600)
    for attempt in (lambda: store.lock(["other"]), lambda: store.build(lock)):
        with pytest.raises(PackageError, match="other-1.0.*no regular file"):
            attempt()


def test_a_lock_is_met_without_an_index_that_pips_settings_forbid(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve(["thing"], WheelSource(str(wheels), index=False), this_python()).wheels[0]
    there = wheel_of(f"https://127.0.0.1:9/{FILENAME}", found.sha256)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PackageError, match="pip's settings say no-index"):
        fetch([there], WheelSource(), str(tmp_path))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert fetch([there], WheelSource(), str(tmp_path))[there].is_file()


@pytest.mark.slow
def test_metadata_that_takes_all_memory_is_refused(store: PackageStore, wheels: Path) -> None:
    """pip reads the metadata of a wheel as a whole, on the host."""
    with zipfile.ZipFile(wheels / "bomb-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        with file.open("bomb-1.0.dist-info/METADATA", "w") as metadata:
            metadata.write(b"Metadata-Version: 2.1\nName: bomb\nVersion: 1.0\n\n")
            for _ in range(512):
                metadata.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(PackageError, match=r"^pip: "):
        store.lock(["bomb"])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(before, 1 << 20) + 1


def test_a_lock_made_elsewhere_is_met_from_the_folder(store: PackageStore) -> None:
    here = store.lock(["thing"]).wheels[0]
    there = wheel_of(f"https://127.0.0.1:9/{FILENAME}", here.sha256)
    assert store.build(Lock(store.python, (there,))).lock.wheels == (there,)


def test_a_named_index_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "extra"):
        folder = tmp_path / name / "thing"
        folder.mkdir(parents=True)
        wheel = good_wheel(folder, {"thing.py": name.encode()})
        (folder / "index.html").write_text(f"<a href='{wheel.name}'>{wheel.name}</a>")
    mine = (tmp_path / "mine").as_uri()
    (tmp_path / "mine" / "thing" / FILENAME).rename(tmp_path / FILENAME)
    (tmp_path / "mine" / "thing" / "index.html").write_text("")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "extra").as_uri())
    assert resolve(["thing"], WheelSource(), this_python()).wheels
    with pytest.raises(PackageError, match="No matching distribution"):
        resolve(["thing"], WheelSource(index_url=mine), this_python())


def test_what_pip_tells_of_a_wheel_does_not_reach_the_terminal_raw(
    tmp_path: Path, wheels: Path
) -> None:
    """pip names the directories of a wheel that has two, as they are."""
    info = "x\x1b]0;title\x07.dist-info"
    good_wheel(wheels, {f"{info}/METADATA": b""}, name="other")
    store = store_at(tmp_path / "raw", wheels)
    with pytest.raises(PackageError, match="multiple .dist-info directories found") as refused:
        store.lock(["other"])
    assert "x\x1b]0;title" in str(refused.value)
    _, text = _message_of(refused.value)
    assert "\x1b" not in text
    assert r"x\x1b]0;title" in text


def test_a_bug_of_pip_is_told_by_its_last_line(tmp_path: Path, wheels: Path) -> None:
    metadata = f"Metadata-Version: 2.1\nName: other\nVersion: 1.0\nRequires-Dist: x; {'(' * 3000}\n"
    write_wheel(
        wheels / "other-1.0-py3-none-any.whl",
        [
            part._replace(data=metadata.encode()) if part.name.endswith(b"METADATA") else part
            for part in parts_of({}, name="other")
        ],
        info="other-1.0.dist-info",
    )
    with pytest.raises(PackageError, match="^pip: .*(recursion|No matching|nvalid)"):
        store_at(tmp_path / "bug", wheels).lock(["other"])


def test_settings_of_pip_neither_add_packages_nor_leave_out_any(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good_wheel(wheels, {}, name="other", requires="thing")
    good_wheel(wheels, {}, name="more")
    for name in ("other", "thing", "more"):
        place = tmp_path / "index" / name
        place.mkdir(parents=True)
        (wheels / f"{name}-1.0-py3-none-any.whl").rename(place / f"{name}-1.0-py3-none-any.whl")
        (place / "index.html").write_text(f"<a href='{name}-1.0-py3-none-any.whl'>{name}</a>")
    more = tmp_path / "more.txt"
    more.write_text("more\n")
    source = WheelSource(index_url=(tmp_path / "index").as_uri())
    monkeypatch.setenv("PIP_REQUIREMENT", str(more))
    monkeypatch.setenv("PIP_EDITABLE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_DEPS", "1")
    settings = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    pip_conf(settings, "[install]\nno-deps = true\n")
    assert str(resolve(["other"], source, this_python())) == "other 1.0, thing 1.0"
    pip_conf(settings, f"[install]\nrequirement = {more}\n")
    with pytest.raises(PackageError, match="pip's settings require more as well"):
        resolve(["Other>=1"], source, this_python())


def test_a_lock_that_gives_bytes_another_name_is_refused(store: PackageStore, wheels: Path) -> None:
    good_wheel(wheels, {"other.py": b""}, name="other")
    evil = store.lock(["other"]).wheels[0]
    store.build(store.lock(["other"]))
    renamed = Lock(store.python, (wheel_of((wheels / FILENAME).as_uri(), evil.sha256),))
    limited = store_at(store.directory, wheels, allow=["thing"])
    with pytest.raises(PackageError, match="must have other"):
        limited.build(renamed)
    with_more = Lock(store.python, (*renamed.wheels, *store.lock(["thing"]).wheels))
    with pytest.raises(PackageError, match="the lock names .*, but its wheel contains other"):
        limited.build(with_more)


def test_a_set_that_was_made_under_a_higher_limit_is_refused(
    store: PackageStore, wheels: Path
) -> None:
    made = store.build(store.lock(["thing"]))
    limited = store_at(store.directory, wheels, max_bytes=made.size_bytes - 1)
    with pytest.raises(PackageError, match="at most"):
        limited.open(["thing"])


@pytest.mark.parametrize("kind", ["sparse", "many names"])
def test_files_of_a_cell_that_claim_more_than_it_could_write_are_not_copied(
    kind: str, tmp_path: Path
) -> None:
    workspace, target = tmp_path / "workspace", tmp_path / "target"
    workspace.mkdir()
    target.mkdir()
    with (workspace / "file").open("wb") as file:
        file.truncate(1 << 40 if kind == "sparse" else 1000)
    for number in range(0 if kind == "sparse" else 2):
        os.link(workspace / "file", workspace / f"name {number}")
    descriptor = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(PackageError, match="at most 2500"):
            _copy(descriptor, target, 2500)
    finally:
        os.close(descriptor)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_a_set_is_the_same_whatever_the_umask(
    umask: int, store: PackageStore, wheels: Path
) -> None:
    good_wheel(wheels, {"shared/thing.py": b"answer = 42\n"})
    (wheels / FILENAME).chmod(0o600)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.harness.packages.test_hostile_sources import store_at\n"
        "os.umask(int(sys.argv[1]))\n"
        "store_at(Path(sys.argv[2]), Path(sys.argv[3])).open(['thing'])\n"
    )
    arguments = [str(umask), str(store.directory), str(wheels)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    with Sandbox(
        policy=Policy(optional_layers=OPTIONAL),
        packages=["thing"],
        pool=0,
        host=HostSettings(package_store=store),
    ) as box:
        assert box.execute("from shared import thing\nthing.answer").value == 42
    modes = {path.stat().st_mode & 0o7777 for path in Path(store.list()[0].directory).rglob("*")}
    assert modes == {0o755, 0o444}


def test_a_store_that_is_not_there_yet_can_be_pruned(store: PackageStore) -> None:
    assert store.prune(max_bytes=0) == ()


def test_a_store_that_cannot_be_written_says_so(store: PackageStore) -> None:
    store.directory.mkdir(0o700)
    (store.directory / "held").write_text("a file in place of a directory")
    with pytest.raises(PackageError, match="cannot write"):
        store.open(["thing"])


def test_a_requirement_is_bounded_and_its_error_too(tmp_path: Path) -> None:
    """Reading some requirements takes quadratic time: 13 s for 50,000 blanks (measured)."""
    path = tmp_path / "requirements.txt"
    longest = f"thing=={'1.' * 990}0"
    path.write_text(longest)
    assert read_requirements(path) == [longest]
    path.write_text(f"thing=={'1.' * 1000}0")
    with pytest.raises(PolicyError) as refused:
        read_requirements(path)
    assert len(str(refused.value)) < 1000


def test_blanks_in_a_requirements_file_are_no_work(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"thing{' ' * 50_000}== 1.0{' ' * 50_000}--hash=sha256:{'0' * 64}\n")
    assert read_requirements(path) == [f"thing==1.0 --hash=sha256:{'0' * 64}"]
