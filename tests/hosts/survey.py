#!/usr/bin/env python3
"""Ask a host which layers hold, pass the tests, and say both as one line of JSON.

    scripts/test-hosts --record a b c d      # in each host, kept in results/
    scripts/test-hosts --record a b c e f -- python3 tests/hosts/survey.py --differing   # a part
    .venv/bin/python tests/hosts/survey.py   # here

Standard library only.  The line begins with `survey: `; its end is the end of the output.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

CHECKOUT = Path(__file__).resolve().parents[2]
HOSTED = Path("/opt/venv").is_dir()  # made by layer.py
# The tests that a host can change the end of: what the kernel, cgroups, terminals and the way out refuse or do.
DIFFERING = (
    *(f"tests/escapes/test_{name}.py" for name in (
        "network", "used_networks", "branches", "terminal", "namespaces", "filesystem", "landlock", "seccomp",
        "posture", "limits",
    )),
    *(f"tests/runner/{name}" for name in ("egress", "branching", "test_cgroups.py", "test_supervision.py")),
    *(f"tests/harness/{name}.py" for name in (
        "cli/test_job_control", "test_terminal", "test_live_network", "servers/daemon/test_ends",
    )),
)  # fmt: skip
HERE = ("tests/policies", "tests/runner", "tests/escapes", "tests/harness")  # as --hosted


def main(arguments: list[str]) -> int:
    findings = examine()
    differing = arguments == ["--differing"]
    status, tests = pass_tests(list(DIFFERING) if differing else arguments)
    if differing:
        tests["of"] = "those that a host can change the end of"
    print("survey:", json.dumps(facts() | {"findings": findings, "tests": tests}), flush=True)
    return status


def facts() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary",
    }


def examine() -> list[dict[str, str]]:
    """Return what `cellwright doctor` found; it tries every layer."""
    doctor = (sys.executable, "-m", "cellwright", "doctor", "--json")
    done = subprocess.run(doctor, cwd=CHECKOUT, check=False, text=True, stdout=subprocess.PIPE)
    findings: list[dict[str, str]] = json.loads(done.stdout)
    for finding in findings:
        print(
            finding["verdict"],
            finding["layer"],
            "-",
            finding["proof"],
            finding["repair"],
            flush=True,
        )
    return findings


def pass_tests(arguments: list[str]) -> tuple[int, dict[str, int | str]]:
    """Run `scripts/test`; return its exit status, and how many tests ended how."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        environment = {**os.environ, "PYTEST_ADDOPTS": f"--junitxml={report}"}
        chosen = arguments or HERE
        command = ("scripts/test", *(("--hosted", *arguments) if HOSTED else chosen))
        status = subprocess.run(command, cwd=CHECKOUT, check=False, env=environment).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    failed = counts["failures"] + counts["errors"]
    tests = {"passed": passed, "failed": failed, "skipped": counts["skipped"]}
    return status, tests | {"of": " ".join(arguments) or "all"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
