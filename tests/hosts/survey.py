#!/usr/bin/env python3
"""Ask a host which layers hold, pass the tests, and say both as one line of JSON.

    scripts/test-hosts --record a b c d      # in each host, kept in results/
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
HERE = ("tests/policies", "tests/runner", "tests/escapes", "tests/harness")  # as --hosted


def main(arguments: list[str]) -> int:
    findings = examine()
    status, tests = pass_tests(arguments)
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
