"""The profile for hosts on which AppArmor keeps user namespaces from programs without one."""

import subprocess
import sys

import pytest

from cellwright.harness.cli.helping import repairs
from cellwright.harness.cli.helping.repairs import apparmor_profile
from cellwright.runner.launching.spawn import interpreter
from tests.conftest import ROOT


def test_the_command_prints_it_for_the_python_that_launchers_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cellwright", "doctor", "--apparmor"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == apparmor_profile(interpreter())
    assert f'profile cellwright "{interpreter()}" flags=(unconfined) {{\n  userns,\n' in done.stdout


def test_what_means_something_to_apparmor_means_itself_in_a_path() -> None:
    assert r'cellwright "/a b\[c\]\{d\}\*\?\^\"" flags' in apparmor_profile('/a b[c]{d}*?^"')


@pytest.mark.parametrize(
    ("restricted", "label", "is_meant"),
    [
        ("1", "unconfined", True), ("0", "unconfined", False), ("", "unconfined", False),
        ("1", "cellwright (unconfined)", False), ("1", "docker-default (enforce)", False),
    ],
)  # fmt: skip
def test_doctor_tells_to_install_it_where_the_restriction_is_why_nothing_runs(
    restricted: str, label: str, is_meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are those of Ubuntu 24.04, on which an unconfined program of a user is meant."""
    files = {
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": restricted,
        "/proc/self/attr/apparmor/current": f"{label}\n",
    }
    read = repairs._read
    monkeypatch.setattr(repairs, "_read", lambda path: files.get(path) or read(path))
    words = repairs.repair_of_launch("unshare: Operation not permitted")
    assert ("cellwright doctor --apparmor | sudo tee" in words) == is_meant


@pytest.mark.needs("apparmor")
@pytest.mark.parametrize("path", ["/usr/bin/python3.12", '/a b[c]{d}*?^"\\'])
def test_apparmors_own_parser_takes_it(path: str) -> None:
    def parsed(text: str) -> subprocess.CompletedProcess[str]:
        command = ("apparmor_parser", "--skip-kernel-load", "--skip-cache", "--names")
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    assert parsed(apparmor_profile(path)).stdout == "cellwright\n"
    assert parsed(apparmor_profile(path).replace("userns", "usernz")).returncode != 0
