"""The standard library works in a cell: CPython's own tests of it run there.

What fails is in EXPECTED with the denial that explains it.  A failure that is not in the table fails
this test, and so does an entry that fails no longer.
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.policies.policy import MIB, Policy
from tests.conftest import policy_named

HAS_TESTS = (Path(sysconfig.get_path("stdlib")) / "test" / "test_json").is_dir() or (
    Path(sys.base_prefix) / f"lib/python3.{sys.version_info.minor}/test/test_json"
).is_dir()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TESTS, reason="this host has no 'stdlib_tests': its Python came without test"),
]

STRICT = (
    "test_json", "test_re", "test_math", "test_collections", "test_datetime", "test_random",
    "test_sqlite3", "test_zlib", "test_struct", "test_decimal", "test_itertools", "test_functools",
    "test_string", "test_textwrap", "test_statistics", "test_fractions", "test_heapq", "test_bisect",
    "test_csv", "test_hashlib", "test_base64", "test_pickle", "test_copy", "test_enum",
    "test_dataclasses", "test_contextlib", "test_queue", "test_array", "test_bytes", "test_dict",
    "test_set", "test_list", "test_gzip", "test_bz2", "test_lzma", "test_unicodedata", "test_calendar",
    "test_operator", "test_typing", "test_uuid", "test_difflib", "test_ast", "test_tempfile",
    "test_pathlib", "test_shutil", "test_zoneinfo", "test_xml_etree", "test_html",
    "test_configparser", "test_tomllib", "test_secrets",
)  # fmt: skip
STANDARD = ("test_threading", "test_subprocess", "test_thread", "test_sys_setprofile", "test_pipes")

NO_PROCESSES = "strict refuses fork and exec"

# (profile, test id) -> which denial explains it
EXPECTED: dict[tuple[str, str], str] = {}

RUNNER = """
import io, os, sys, unittest
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.argv = ["unittest"]
from test import support
support.verbose = 0

failed = []

def note(case, kind):
    failed.append([case.id(), kind])

class Result(unittest.TestResult):
    def addFailure(self, test, err):
        note(test, self._exc_info_to_string(err, test)[-400:])
    def addError(self, test, err):
        note(test, self._exc_info_to_string(err, test)[-400:])
    def addSubTest(self, test, subtest, err):
        if err is not None:
            note(test, self._exc_info_to_string(err, test)[-400:])
    def addUnexpectedSuccess(self, test):
        note(test, "unexpected success")

result = Result()
out, sys.stdout, sys.stderr = sys.stdout, io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
suite = unittest.defaultTestLoader.loadTestsFromName("test." + name)
suite.run(result)
{"run": result.testsRun, "failed": failed, "skipped": len(result.skipped)}
"""


def roomy(profile: str) -> Policy:
    policy = policy_named(profile)
    limits = msgspec.structs.replace(
        policy.limits, wall_seconds=90.0, cpu_seconds=120.0, memory_bytes=2048 * MIB, cpus=2.0,
        workspace_bytes=512 * MIB, processes=256, workspace_inodes=100_000,
    )  # fmt: skip
    return msgspec.structs.replace(policy, limits=limits)


def run_suite(sandbox: Sandbox, name: str) -> dict[str, object]:
    result = sandbox.execute(RUNNER, inputs={"name": name})
    assert isinstance(result.value, dict), (result.reason, result.error, result.stderr[-2000:])
    return result.value


def check(profile: str, sandbox: Sandbox, name: str) -> None:
    value = run_suite(sandbox, name)
    assert value["run"], f"nothing of test.{name} ran"
    failed = {case: why for case, why in value["failed"]}  # type: ignore[attr-defined]
    expected = {
        case for of, case in EXPECTED if of == profile and case_of(case) == name
    }
    unexplained = {case: why for case, why in failed.items() if case not in expected}
    assert not unexplained, f"not explained by a denial: {unexplained}"
    assert expected <= failed.keys(), f"fails no longer: {expected - failed.keys()}"


def case_of(case: str) -> str:
    """Return the module in a test id such as test.test_json.test_dump.TestCDump.test_x."""
    return case.removeprefix("setUpClass (").removeprefix("setUpModule (").split(".")[1].rstrip(")")


@pytest.mark.parametrize("name", STRICT)
def test_a_module_of_the_standard_library_works_under_strict(
    strict_and_roomy: Sandbox, name: str
) -> None:
    check("strict", strict_and_roomy, name)


@pytest.mark.parametrize("name", STANDARD)
def test_a_module_that_starts_processes_works_under_standard(
    standard_and_roomy: Sandbox, name: str
) -> None:
    check("standard", standard_and_roomy, name)


@pytest.fixture(scope="module")
def strict_and_roomy() -> Iterator[Sandbox]:
    with Sandbox(policy=roomy("strict")) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def standard_and_roomy() -> Iterator[Sandbox]:
    with Sandbox(policy=roomy("standard")) as sandbox:
        yield sandbox
