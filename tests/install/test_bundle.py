"""The offline bundle of scripts/release: installed without a network, a compiler, ensurepip or libseccomp."""

import contextlib
import ensurepip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents import NAMES, blocks_of
from tests.host_settings import of_the_host

pytestmark = pytest.mark.slow
VERSION = f"3.{sys.version_info.minor}"
PYTHON = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release for this architecture and this Python alone, without extras."""
    output = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        ROOT / "scripts" / "release",
        "--output",
        output,
        "--pythons",
        VERSION,
    ]
    done = subprocess.run(
        [*command, "--architectures", os.uname().machine, "--extras", ""],
        env=of_the_host() | {"CELLWRIGHT_VENV": sys.prefix}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


def the(release: Path, pattern: str) -> Path:
    (found,) = release.glob(pattern)
    return found


def test_the_wheel_is_for_every_linux_with_glibc(release: Path) -> None:
    wheel = the(release, "*.whl")
    assert "-cp311-abi3-manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (module,) = (each for each in archive.namelist() if each.endswith(".so"))
        assert str(ROOT).encode() not in archive.read(module)


def test_every_file_has_its_digest_and_the_bill_names_every_package(release: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=release, capture_output=True, check=True
    )
    assert done.stdout.count(b": OK") == 3
    bill = json.loads(the(release, "*.cdx.json").read_text())
    with zipfile.ZipFile(the(release, "*.pyz")) as bundle:
        assert json.loads(bundle.read("bom.json")) == bill
        wheels = [name for name in bundle.namelist() if name.endswith(".whl")]
        assert {info.date_time for info in bundle.infolist()} == {bundle.infolist()[0].date_time}
    assert bill["bomFormat"] == "CycloneDX"
    named = {each["name"] for each in bill["components"]}
    assert named == {
        "cellwright",
        "jsonschema_rs",
        "libseccomp",
        "msgspec",
        "pip",
        "psutil",
        "pyseccomp",
    }
    assert len(bill["components"]) == len(wheels) + 1
    assert all(each["hashes"] and each["licenses"] for each in bill["components"])


@pytest.mark.needs("root", "bwrap")
def test_a_host_with_nothing_but_python_installs_it_and_runs_programs(
    release: Path, tmp_path: Path
) -> None:
    compilers = {os.path.realpath(path) for name in ("cc", "gcc") if (path := shutil.which(name))}
    (library,) = Path("/usr/lib").glob("*/libseccomp.so.2")
    hidden = [
        word for path in (*compilers, library.resolve()) for word in ("--ro-bind", "/dev/null", str(path))
    ]  # fmt: skip
    prefix = tmp_path / "prefix"
    command = prefix / "bin" / "cellwright"
    run = f"{command} run --optional cgroup -c"
    script = f"""
{PYTHON} -c 'import socket; socket.create_connection(("192.0.2.1", 80), 1)' 2>&1 | grep -o unreachable
{PYTHON} -c 'import ensurepip; ensurepip.version()' 2>&1 | grep -o AttributeError
{PYTHON} {the(release, "*.pyz")} --prefix {prefix} --commands {tmp_path / "bin"}
{tmp_path / "bin" / "cellwright"} doctor --optional cgroup | tail -n 1
{run} 'print(6 * 7)'
{run} 'open("/etc/shadow")' 2>&1 | grep -o 'refused: openat'
{PYTHON} {the(release, "*.pyz")} --prefix {prefix} --extras web || echo no web
{run} 'print("still here")'
"""
    done = subprocess.run(
        ["bwrap", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--bind", "/proc", "/proc",
         "--bind", tmp_path, tmp_path, "--tmpfs", str(Path(ensurepip.__file__).parent), "--unshare-net",
         *hidden, "sh", "-euc", script],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}, cwd="/", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, verdict, answer, refused, without, after = done.stdout.splitlines()
    assert said[:2] == ["unreachable", "AttributeError"]
    installed = tmp_path / "bin" / "cellwright"  # in a folder that is not on PATH
    assert said[3] == f"{installed} is installed; next: {installed} doctor"
    assert verdict.startswith("PASS  verdict")
    assert (answer, refused, without, after) == ("42", "refused: openat", "no web", "still here")
    assert (prefix / "lib/cellwright/libseccomp.so.2").exists()


@pytest.mark.needs("cgroup")
def test_the_line_of_the_paths_installs_it_and_leaves_nothing_else(
    release: Path, tmp_path: Path
) -> None:
    lines = {
        blocks_of(name)[0].text
        for name in NAMES
        if name.startswith("harness/paths/") and blocks_of(name)
    }
    (line,) = (each for each in lines if "--extras" not in each)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to(PYTHON)
    script = f"{line}cellwright run -c '6 * 7'\npython3 -c 'import cellwright; print(cellwright.Sandbox.__name__)'"
    done = subprocess.run(
        ["/bin/bash", "-euc", script], cwd=release, capture_output=True, text=True, check=False,
        env={"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["42", "Sandbox"]
    assert {path.name for path in tmp_path.iterdir()} <= {"cells", "programs", ".cache"}


def test_a_release_brings_every_extra_that_the_paths_install() -> None:
    brought = runpy.run_path(str(ROOT / "scripts" / "release"))["EXTRAS"].split(",")
    lines = [
        block.text
        for name in NAMES
        if name.startswith("harness/paths/")
        for block in blocks_of(name)
    ]
    wanted = {
        extra
        for line in lines
        for found in re.findall(r"--extras (\S+)", line)
        for extra in found.split(",")
    }
    assert {"mcp", "top"} <= wanted <= {*brought}


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("uid", "mode", "refused"), [(0, 0o755, False), (12345, 0o755, True), (0, 0o777, True)]
)
def test_a_folder_that_another_user_can_change_is_refused(
    tmp_path: Path, uid: int, mode: int, *, refused: bool
) -> None:
    """Its `bin/python` would be started by the person who installs."""
    check_owner = runpy.run_path(str(ROOT / "scripts" / "install_bundle.py"))["check_owner"]
    check_owner(str(tmp_path / "new"))
    os.chown(tmp_path, uid, -1)
    tmp_path.chmod(mode)
    with pytest.raises(SystemExit, match="another user") if refused else contextlib.nullcontext():
        check_owner(str(tmp_path))


def test_what_the_bundle_is_not_for_is_refused(release: Path, tmp_path: Path) -> None:
    bundle = the(release, "*.pyz")
    (tmp_path / "mine").write_text("")
    other = tmp_path / "cellwright-linux-riscv64.pyz"
    shutil.copy(bundle, other)
    for command, why in (
        ((bundle, "--prefix", tmp_path), "has other files: name another --prefix"),
        ((other, "--prefix", tmp_path / "new"), "the bundle is for another architecture"),
    ):
        done = subprocess.run([PYTHON, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert why in done.stderr
