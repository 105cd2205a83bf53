"""From source distribution to wheel to a clean environment, outside the checkout, of other Pythons too."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import OPTIONAL, ROOT
from tests.host_settings import of_the_host
from tests.runner.test_forked import PROGRAM

pytestmark = pytest.mark.slow
PACKAGES = ("policies", "runner", "harness", "benchmarks")
# Profiles, tables, harnesses of other languages, the command of shells, units: all that is no module.
DATA = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in PACKAGES
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and path.suffix not in (".py", ".pyc", ".md", ".png", ".c", ".so")  # pictures are for documents
    and path.name != "peers-setup"  # for a checkout: it installs what benchmarks compare with
)

PRINTING = {
    "bash": ("bash", "echo 7"), "javascript": ("node", "console.log(7)"), "ruby": ("ruby", "puts 7"),
}  # fmt: skip
FILTER = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has it


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout, without anything that could lead back to it."""
    environment = {
        key: value for key, value in of_the_host().items() if not key.startswith("PYTHON")
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("install")


@pytest.fixture(scope="module")
def sdist(place: Path) -> Path:
    """The tree is copied first: a build leaves files beside pyproject.toml."""
    copied = place / "tree"
    names = [name for name in os.listdir(ROOT) if not name.startswith(".") and name != "dist"]
    copied.mkdir()
    run("cp", "-a", *(ROOT / name for name in names), copied, cwd=place)
    run(sys.executable, "-Im", "build", "--sdist", "--no-isolation", "-o", place, copied, cwd=place)
    (file,) = place.glob("cellwright-*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(sdist: Path, place: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", **FILTER)
    (tree,) = (place / "unpacked").iterdir()
    run(sys.executable, "-Im", "build", "--wheel", "--no-isolation", "-o", place, tree, cwd=place)
    (file,) = place.glob("cellwright-*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel: Path, place: Path) -> Path:
    """A new environment that holds the wheel and what it depends on, nothing else."""
    base = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    return installed(wheel, base, place / "venv")


def installed(wheel: Path, base: str, environment: Path) -> Path:
    run(base, "-Im", "venv", environment, cwd=wheel.parent)
    made = environment / "bin" / "python"
    run(made, "-Im", "pip", "install", "--disable-pip-version-check", "-q", wheel, cwd=wheel.parent)
    return made


def test_the_sdist_has_every_module_and_what_they_read(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        path.relative_to(ROOT).as_posix() for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")
    }  # fmt: skip
    source = "runner/kernel/steps.c"
    assert (
        wanted | set(DATA) | {"cellwright/__init__.py", "pyproject.toml", "LICENSE", source}
        <= names
    )
    assert not any(name.endswith(".so") for name in names)  # it would be of another machine


def test_one_wheel_serves_every_python_from_3_11_on(wheel: Path) -> None:
    _, _, *tags = wheel.name.removesuffix(".whl").split("-")
    assert tags == ["cp311", "abi3", f"linux_{os.uname().machine}"]
    with zipfile.ZipFile(wheel) as archive:
        assert "cellwright/runner/kernel/_steps.abi3.so" in archive.namelist()


def test_the_wheel_has_real_packages_where_the_checkout_has_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    for folder in PACKAGES:
        assert f"cellwright/{folder}/__init__.py" in infos
        assert f"cellwright/{folder}" not in infos
    for name in (*DATA, "py.typed"):
        assert f"cellwright/{name}" in infos
    assert not any(info.external_attr >> 28 == 0o12 for info in infos.values())


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"cellwright"}
    assert not any("__pycache__" in name or name.startswith("cellwright/tests") for name in names)


def test_the_wheel_works_as_a_library_outside_the_checkout(python: Path, place: Path) -> None:
    code = f"""
import cellwright
from cellwright import Sandbox, SandboxConfig
assert {str(place)!r} in cellwright.__file__, cellwright.__file__
with Sandbox(SandboxConfig(optional_layers={OPTIONAL!r})) as sandbox:
    result = sandbox.execute("print('inside'); 1 + 1")
    refused = sandbox.execute("open('/etc/shadow')")
print(result.value, result.stdout.strip(), refused.error.partition(":")[0])
"""
    assert run(python, "-I", "-c", code, cwd=place).split() == ["2", "inside", "FileNotFoundError"]


def test_the_command_is_installed(python: Path, place: Path) -> None:
    command = python.with_name("cellwright")
    out = run(
        command,
        "run",
        "-c",
        "print(6 * 7)",
        *(() if not OPTIONAL else ("--policy", "strict")),
        cwd=place,
    )
    assert "42" in out
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(command, "--version", cwd=place) == f"cellwright {version}\n"


def test_what_is_installed_agrees_with_itself(python: Path, place: Path) -> None:
    assert "No broken requirements" in run(python, "-Im", "pip", "check", cwd=place)


def test_what_a_host_is_given_comes_with_the_wheel(python: Path, place: Path) -> None:
    """The units and the profile are written by the command, from what was installed."""
    command, units = python.with_name("cellwright"), place / "units"
    units.mkdir()
    run(command, "serve", "--units", units, cwd=place)
    assert sorted(os.listdir(units)) == ["cellwright.service", "cellwright.socket"]
    assert "userns," in run(command, "doctor", "--apparmor", cwd=place)


@pytest.mark.parametrize("language", ["bash", "javascript", "ruby"])
def test_other_languages_run_from_the_wheel(python: Path, place: Path, language: str) -> None:
    """Each has a file beside the modules: without it nothing would run."""
    interpreter, program = PRINTING[language]
    if shutil.which(interpreter) is None:
        pytest.skip(f"this host has no {interpreter}")
    code = f"""
from cellwright import Sandbox, SandboxConfig
with Sandbox(SandboxConfig(optional_layers={OPTIONAL!r})) as sandbox:
    print(sandbox.execute({program!r}, {language!r}).stdout)
"""
    assert run(python, "-I", "-c", code, cwd=place).strip() == "7"


# Other Pythons

OTHERS = [f"python3.{minor}" for minor in range(11, 16) if minor != sys.version_info.minor]
HAS_PIP = "import ensurepip"
CAN_COMPILE = """
import ensurepip, os, sysconfig
assert os.path.isfile(sysconfig.get_path("include") + "/Python.h")
"""
WITH_A_TOOL = f"""
from cellwright import Sandbox, SandboxConfig
from cellwright.harness.tools.broker import Broker, Offer
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.tool import Tool

record = {{"type": "object", "properties": {{"n": {{"type": "integer"}}}}, "required": ["n"]}}
spec = ToolSpec(
    name="double", description="Twice n.", owner=ToolOwner.DEVELOPER, parameters=record,
    output_schema=record,
)
broker = Broker(Offer([Tool(spec, lambda given, caller: {{"n": given["n"] * 2}})]))
with Sandbox(SandboxConfig(optional_layers={OPTIONAL!r}), tools=broker) as sandbox:
    called = sandbox.execute("from tools import double\\ndouble(21)['n']")
    refused = sandbox.execute("open('/etc/shadow')")
print(called.value, refused.error.partition(":")[0])
"""


FORKED = f"""
from cellwright import Sandbox
from cellwright.policies.profiles.loading import load_policy
import msgspec
policy = msgspec.structs.replace(load_policy("standard"), optional_layers={OPTIONAL!r})
with Sandbox(policy=policy, pool=0) as sandbox:
    result = sandbox.execute({PROGRAM!r})
print(result.value if result.error is None else result.traceback)
"""


def usable(name: str, condition: str) -> str:
    """Return the first `name` of PATH or pyenv in which the program `condition` succeeds, or nothing."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for folder in (*os.get_exec_path(), *sorted(pyenv.glob("versions/*/bin"))):
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK):
            tried = subprocess.run([path, "-Ic", condition], capture_output=True, check=False)
            if tried.returncode == 0:
                return path
    return ""


@pytest.mark.parametrize("name", [f"python3.{sys.version_info.minor}", *OTHERS])
def test_the_sdist_works_with_each_python(sdist: Path, place: Path, name: str) -> None:
    """Here the module in C is built by that Python."""
    base = usable(name, CAN_COMPILE)
    if not base:
        pytest.skip(f"no {name} of PATH or pyenv starts, with pip and the headers")
    made = installed(sdist, base, place / f"{name}-of-the-sdist")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(made.with_name("cellwright"), "--version", cwd=place) == f"cellwright {version}\n"
    assert run(made, "-I", "-c", WITH_A_TOOL, cwd=place).split() == ["42", "FileNotFoundError"]


@pytest.mark.parametrize("name", OTHERS)
def test_the_wheel_works_with_another_python(wheel: Path, place: Path, name: str) -> None:
    base = usable(name, HAS_PIP)
    if not base:
        pytest.skip(f"no {name} of PATH or pyenv starts, with pip")
    made = installed(wheel, base, place / name)
    if not OPTIONAL:
        run(made.with_name("cellwright"), "doctor", cwd=place)
    assert run(made, "-I", "-c", WITH_A_TOOL, cwd=place).split() == ["42", "FileNotFoundError"]
    assert run(made, "-I", "-c", FORKED, cwd=place).strip() == "8"
