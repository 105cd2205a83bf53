#!/usr/bin/env python3
"""Ask a host which layers hold, pass the tests, and say both as one line of JSON.

    scripts/test-hosts --record a b c d      # in each host, kept in results/
    scripts/test-hosts --record a b c e f -- python3 tests/hosts/survey.py --differing   # a part
    scripts/test-hosts --record a b c e f -- python3 tests/hosts/survey.py --features    # another
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
# A few tests of each feature that a host decides; emulation leaves no time for all.
FEATURES = tuple(f"tests/{file}.py::test_{name}" for file, names in {
    "escapes/test_used_cgroups": (
        "the_next_cell_has_it_where_the_kernel_resets_its_peak", "it_is_retired_while_a_process_is_in_it",
        "it_serves_as_many_cells_as_the_settings_say", "the_next_cell_is_charged_for_itself_alone",
        "a_session_has_the_cgroup_for_itself", "nothing_is_kept_once_a_sandbox_has_settled",
    ),
    "escapes/test_gpu": (
        "without_a_gpu_one_sentence_says_so", "the_named_nodes_are_devices_and_no_other_node_is_there",
        "a_node_that_is_no_character_device_is_refused",
    ),
    "escapes/test_images": (
        "root_inside_has_these_capabilities_and_ids", "the_mounts_are_those_of_the_image_and_the_cells_own",
        "layers_are_not_changed",
    ),
    "harness/images/test_image_cells": ("programs_are_the_images_and_root_of_its_ids",),
    "harness/workers/test_worker_programs": ("a_program_has_its_streams_in_this_process",),
    "harness/projects/test_exec": (
        "a_command_has_the_streams_and_gives_its_status", "a_review_leaves_the_project_as_it_is",
    ),
    "harness/judging/test_judge": ("a_right_program_is_accepted",),
    "harness/test_languages": ("a_program_prints",),
}.items() for name in names)  # fmt: skip
PARTS = {
    "--differing": ("tests", DIFFERING, "those that a host can change the end of"),
    "--features": (
        "features",
        FEATURES,
        "used cgroups, GPUs, images, workers, exec, judging, languages",
    ),
}
HERE = ("tests/policies", "tests/runner", "tests/escapes", "tests/harness")  # as --hosted


def main(arguments: list[str]) -> int:
    findings = examine()
    part, files, title = PARTS.get(" ".join(arguments), ("tests", arguments, ""))
    status, counts = pass_tests(list(files))
    counts |= {"date": time.strftime("%Y-%m-%d")} | ({"of": title} if title else {})
    print("survey:", json.dumps(facts() | {"findings": findings, part: counts}), flush=True)
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
