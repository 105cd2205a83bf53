"""The module in C, built by each Python of this host, under every Python of this host: one file serves all
of them (PEP 384), in a wheel and in a checkout that several Pythons share."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCE = ROOT / "runner" / "kernel" / "steps.c"
MINORS = range(11, 16)
HEADERS = (
    "import os, sysconfig; path = sysconfig.get_path('include'); "
    "print(path if os.path.isfile(path + '/Python.h') else '')"
)
# Arguments with lengths, and answers, of each kind that the module has.
USE = """
import _steps
try:
    _steps.count(b"")
except ValueError as error:
    print(error)
try:
    _steps.execute(b"x" * 100, [])
except ValueError as error:
    print(error)
print(sorted(_steps.NUMBERS)[0])
"""


@functools.cache
def pythons() -> dict[str, str]:
    """Return the Pythons of PATH and pyenv that start, by minor version: this one, and others."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {f"3.{sys.version_info.minor}": sys.executable}
    folders = (*os.get_exec_path(), *sorted(map(str, pyenv.glob("versions/*/bin"))))
    for minor, folder in itertools.product(MINORS, folders):
        path = os.path.join(folder, f"python3.{minor}")
        if os.access(path, os.X_OK) and f"3.{minor}" not in found:
            tried = subprocess.run([path, "-Ic", "pass"], capture_output=True, check=False)
            if tried.returncode == 0:
                found[f"3.{minor}"] = path
    return found


def built(version: str, place: Path) -> bool:
    """Build the module with the headers of one Python; False if it has none."""
    said = subprocess.run(
        [pythons()[version], "-Ic", HEADERS], capture_output=True, text=True, check=True
    )
    if not (headers := said.stdout.strip()):
        return False
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{headers}",
        str(SOURCE),
        "-o",
    ]
    subprocess.run([*command, str(place / "_steps.abi3.so")], check=True)
    return True


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("builder", [f"3.{minor}" for minor in MINORS])
def test_what_one_python_builds_works_with_all(builder: str, tmp_path: Path) -> None:
    if builder not in pythons() or not built(builder, tmp_path):
        pytest.skip(f"this host has no Python {builder} with headers")
    answers = {}
    for version, path in pythons().items():
        command = [path, "-c", USE]
        done = subprocess.run(
            command, env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        answers[version] = done.stdout, done.stderr
    (expected,) = set(answers.values())
    assert expected[0].startswith("a list of steps cannot be loaded: it is shorter than its header")
    assert expected[0].count("\n") == 3
    assert expected[1] == ""
