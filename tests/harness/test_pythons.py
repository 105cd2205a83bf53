"""Other Pythons of the host: found by version, and as good for cells as the one that runs cellwright."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import (
    HostSettings,
    LaunchError,
    PackageError,
    PackageStore,
    PauseSettings,
    PolicyError,
    PoolSettings,
    Sandbox,
)
from cellwright.harness.sandbox.pythons import (
    HostPython,
    find_python,
    pythons,
    this_python,
)
from tests.conftest import OPTIONAL, policy_named
from tests.harness.packages.wheels import good_wheel
from tests.harness.test_cli import run
from tests.host_settings import of_the_host

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHERS = [each for each in ("3.11", "3.12", "3.13") if each != OURS]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory without any Python, and nothing but /usr/bin on PATH."""
    for name in ("PYENV_ROOT", "XDG_DATA_HOME", "UV_PYTHON_INSTALL_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:relative:")
    return tmp_path


def interpreter_at(path: Path, version: str, packages: tuple[str | None, ...] = ("/p",)) -> Path:
    """Write a program that answers as a Python of that version does."""
    major, minor, micro = map(int, version.split("."))
    said = json.dumps(
        {"path": str(path), "version": (major, minor, micro), "tag": f"cpython-{major}{minor}",
         "packages": packages}
    )  # fmt: skip
    return script_at(path, f"echo '{said}'")


def script_at(path: Path, line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


PLACES = (
    "bin/python3.99",
    ".pyenv/versions/3.99.1/bin/python3.99",
    ".local/share/uv/python/cpython-3.99.1-linux-x86_64-gnu/bin/python3.99",
)


@pytest.mark.parametrize("place", PLACES)
def test_a_python_is_found_by_its_version(home: Path, place: str) -> None:
    path = interpreter_at(home / place, "3.99.1")
    for wanted in ("3.99", "3.99.1", "python3.99", "python:3.99"):
        assert find_python(wanted) == HostPython(str(path), (3, 99, 1), "cpython-399", ("/p",))
    assert find_python(None, "python:3.99").path == str(path)
    assert find_python(path).path == str(path)
    with pytest.raises(LaunchError, match=r"there is no Python 3\.99\.2"):
        find_python("3.99.2")


def test_directories_of_pyenv_and_uv_may_be_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(home / "pyenv [1]"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(home / "uv"))
    interpreter_at(home / "pyenv [1]/versions/3.98.0/bin/python3.98", "3.98.0")
    interpreter_at(home / "uv/cpython-3.99.0-linux/bin/python3.99", "3.99.0")
    assert find_python("3.98").version == (3, 98, 0)
    assert find_python("3.99").version == (3, 99, 0)


def test_the_first_that_can_start_cells_is_taken_and_broken_ones_are_passed_over(
    home: Path,
) -> None:
    script_at(home / "bin/python3.99", "echo pyenv: command not found >&2; exit 127")
    interpreter_at(home / ".pyenv/versions/3.99.1/bin/python3.99", "3.99.1", (None,))
    good = interpreter_at(home / ".pyenv/versions/3.99.2/bin/python3.99", "3.99.2")
    assert find_python("3.99").path == str(good)
    good.unlink()
    with pytest.raises(LaunchError, match="lacks msgspec, which starts") as raised:
        find_python("3.99")
    place = home / ".local/state/cellwright/pythons/cpython-399"
    assert f"-m pip install --target {place} msgspec" in raised.value.hint


def test_without_such_a_python_those_that_are_there_are_named(home: Path) -> None:
    other = interpreter_at(home / "bin/python3.12", "3.12.77")
    with pytest.raises(LaunchError, match=r"no Python 3\.99 on PATH, in pyenv or in uv") as raised:
        find_python("3.99")
    assert str(this_python()) in raised.value.hint
    assert f"3.12.77 ({other})" in raised.value.hint
    assert str(this_python()) in map(str, pythons())


def test_our_own_version_is_the_python_that_runs_cellwright(home: Path) -> None:
    interpreter_at(home / f"bin/python{OURS}", f"{OURS}.99")
    assert find_python(None) == find_python(OURS) == find_python(None, "python") == this_python()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"python": "3.10"}, PolicyError, "python: must be 3.11 or newer, got '3.10'"),
        ({"python": "2.7.18"}, PolicyError, "python: must be 3.11 or newer"),
        (
            {"python": "3"},
            LaunchError,
            "python: cannot start 3: No such file.*\nhint: name a version",
        ),
        (
            {"python": 3.12},
            PolicyError,
            r"python: must be a version such as '3\.12', or a path, got 3",
        ),
        (
            {"runtime": "node:20"},
            PolicyError,
            "runtime: must be such as 'python:3.12', got 'node:20'",
        ),
        ({"runtime": "python:"}, PolicyError, "runtime: must be such as"),
        ({"runtime": 5}, PolicyError, "runtime: must be such as"),
        (
            {"runtime": "python:3.12", "python": "3.12"},
            PolicyError,
            "cannot be combined with python",
        ),
    ],
)
def test_an_invalid_version_is_refused(
    home: Path, given: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Sandbox(host=HostSettings(**given))  # type: ignore[arg-type]


def test_a_path_to_an_older_python_or_to_no_python_is_refused(home: Path) -> None:
    with pytest.raises(LaunchError, match=r"must be 3\.11 or newer, got 3\.9\.0"):
        find_python(interpreter_at(home / "old", "3.9.0"))
    for line in ("true", "echo '{}'", "echo '[1' ; exit 1", "echo what >&2; exit 3"):
        with pytest.raises(LaunchError, match="as interpreter: (no answer|what)"):
            find_python(script_at(home / "none", line))


def test_a_daemon_decides_which_python_it_has() -> None:
    with pytest.raises(PolicyError, match="connect: cannot be combined with python"):
        Sandbox(connect="/nowhere", host=HostSettings(python="3.12"))
    done = run("--connect", "/nowhere", "--python", "3.12", "-c", "1")
    assert done.returncode == 2
    assert "--python cannot be combined with --connect" in done.stderr


# Pythons that this host has


def other_python(version: str) -> HostPython:
    for each in pythons():
        if each.version[:2] == tuple(map(int, version.split("."))):
            return each
    pytest.skip(f"this host has no Python {version}")


@pytest.fixture(scope="module", params=OTHERS)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostPython]:
    """Yield another Python, with the packages of launchers in a state directory of its own."""
    found = other_python(request.param)
    state = tmp_path_factory.getbasetemp() / "state"
    target = state / "cellwright/pythons" / found.tag
    command = [found.path, "-m", "pip", "install", "-q", "--retries", "0", "--target", str(target)]
    if not target.exists():
        done = subprocess.run(
            [*command, "msgspec"],
            env=of_the_host(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"{found} cannot install what starts cells: {done.stderr[-300:]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        yield find_python(request.param)


@pytest.fixture(scope="module", params=[0, 2], ids=["on demand", "parked"])
def sandbox(request: pytest.FixtureRequest, other: HostPython) -> Iterator[Sandbox]:
    version = ".".join(map(str, other.version[:2]))
    with Sandbox(
        policy=policy_named("standard"), pool=request.param, host=HostSettings(python=version)
    ) as made:
        yield made


def test_programs_run_in_it_behind_the_same_layers(sandbox: Sandbox, other: HostPython) -> None:
    code = "import sys\nprint(sys.argv[1:], n)\n[list(sys.version_info[:3]), sys.path]"
    result = sandbox.execute(code, inputs={"n": 1}, arguments=["a"])
    assert result.ok, result.to_dict()
    version, path = result.value
    assert tuple(version) == other.version
    assert not [each for each in path if "site-packages" in each or "pythons" in each]
    assert result.stdout == "['a'] 1\n"
    assert result.violations == ()
    with Sandbox(policy=policy_named("standard"), pool=0) as ours:
        assert result.layers == ours.execute("1").layers
    refused = sandbox.execute("open('/etc/shadow')")
    assert refused.error == "FileNotFoundError: [Errno 2] No such file or directory: '/etc/shadow'"
    assert [each.rule for each in refused.violations] == ["mount_ns: not shown"]
    assert sandbox.execute("while True: pass", timeout=0.2).reason == "wall_time"
    assert (
        sandbox.execute("import msgspec").error == "ModuleNotFoundError: No module named 'msgspec'"
    )


def test_idioms_and_sessions_work_in_it(sandbox: Sandbox) -> None:
    shows = "class Shows:\n    def _repr_html_(self): return '<b>'\ndisplay(Shows())"
    assert [each.data for each in sandbox.execute(shows).artifacts] == [b"<b>"]
    assert sandbox.execute("import asyncio\nawait asyncio.sleep(0, 5)").value == 5
    assert sandbox.execute("exit(3)").exit_code == 3
    raised = sandbox.execute("def fail():\n    1 / 0\nfail()")
    assert raised.traceback is not None
    assert 'File "<cell>", line 2, in fail' in raised.traceback
    assert "/runner/" not in raised.traceback
    with sandbox.session() as session:
        session.execute("import threading\nx = 1")
        assert session.execute("while True: pass", timeout=0.2).reason == "wall_time"
        assert session.execute("x + _ if '_' in globals() else x").value == 1
        assert session.run([sys.executable]).exit_code in (126, 127)  # our own is not shown
    standard = sandbox.execute("import ctypes, sqlite3, ssl, zoneinfo, lzma, json\n1")
    assert (standard.value, standard.violations) == (1, ())


def test_a_session_in_it_is_branched_and_paused(other: HostPython, tmp_path: Path) -> None:
    """What stops and copies its memory is the Python that runs cellwright."""
    state = """
import decimal, random, sqlite3
def count():
    n = 0
    while True:
        n += yield n
it = count(); next(it)
db = sqlite3.connect(":memory:"); db.execute("create table t (n)")
f = open("notes", "w+"); big = bytearray(range(256)) * 10_000; random.seed(3)
"""
    shows = """
import sys
[it.send(2), db.execute("insert into t values (1)").lastrowid, f.write("x"), f.tell(), len(big),
 random.random(), str(decimal.Decimal(1) / 3), list(sys.version_info[:2])]
"""
    settings = PauseSettings(tmp_path)
    with Sandbox(
        policy=policy_named("strict"), pool=1, host=HostSettings(python=other.path, pauses=settings)
    ) as sandbox:
        source = sandbox.session()
        assert source.execute(state).ok
        first = source.execute(shows).value
        assert tuple(first[-1]) == other.version[:2]
        (branch,) = source.branch(replay=False)
        resumed = sandbox.resume(source.pause())
        answers = [[each.execute(shows).value for _ in range(2)] for each in (branch, resumed)]
        assert answers[0] == answers[1]
        assert [each[0] for each in answers[0]] == [4, 6]
        branch.close()
        resumed.close()


def test_another_language_has_its_launcher_too(sandbox: Sandbox) -> None:
    assert sandbox.execute("echo $((6 * 7))", "bash").stdout == "42\n"


def test_packages_are_those_of_its_version(other: HostPython, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    number = "".join(map(str, other.version[:2]))
    fits = good_wheel(wheels, {"thing.py": b"answer = 42\n"})
    fits.rename(wheels / fits.name.replace("py3-none-any", f"py{number}-none-any"))
    options = {"find_links": wheels, "index": False, "optional_layers": OPTIONAL}
    store = PackageStore(tmp_path / "store", python=other.path, **options)  # type: ignore[arg-type]
    code = "import thing\n[thing.answer, thing.__cached__]"
    for _ in range(2):  # the second time from the kept lock
        host = HostSettings(python=other.path, package_store=store)
        with Sandbox(
            policy=policy_named("strict"), pool=0, packages=["thing"], host=host
        ) as sandbox:
            answer, compiled = sandbox.execute(code).value
            assert answer == 42
            assert compiled.endswith(f".{other.tag}.pyc")
            assert os.path.isfile(compiled)
    ours = PackageStore(tmp_path / "store", **options)  # type: ignore[arg-type]
    with pytest.raises(PackageError, match="No matching distribution|no wheels with a matching"):
        ours.lock(["thing"])
    with pytest.raises(PolicyError, match=f"package_store: must be for {other.tag}, got one for "):
        Sandbox(packages=["thing"], host=HostSettings(python=other.path, package_store=ours))
    with pytest.raises(PackageError, match=f"the lock is for {other.tag}, the store for "):
        ours.build(store.lock(["thing"]))
    locked = tmp_path / "pylock.toml"
    from cellwright.harness.sandbox.packages.lock import pylock_text

    locked.write_text(pylock_text(store.lock(["thing"])))
    assert store.lock(locked) == store.lock(["thing"])
    with pytest.raises(PackageError):
        ours.lock(locked)


def test_the_command_takes_a_version(other: HostPython) -> None:
    version = ".".join(map(str, other.version[:2]))
    done = run("--python", version, "-c", "import sys; list(sys.version_info[:3])")
    assert (done.returncode, done.stdout) == (0, f"{list(other.version)}\n"), done.stderr
    done = run("--python", "3.99", "-c", "1")
    assert done.returncode == 2
    assert str(other) in done.stderr


def test_a_launcher_that_has_served_its_time_is_followed_by_one_of_the_same_python(
    other: HostPython,
) -> None:
    with Sandbox(
        policy=policy_named("strict"),
        pool=PoolSettings(size=0, cells_per_launcher=1),
        host=HostSettings(python=other.path),
    ) as sandbox:
        for _ in range(2):
            value = sandbox.execute("import sys\nlist(sys.version_info[:3])").value
            assert tuple(value) == other.version
