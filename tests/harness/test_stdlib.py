"""The standard library works in a cell: CPython's own tests of it run there.

What fails is in EXPECTED with the denial that explains it.  A failure that is not in the table fails
this test, and so does an entry that passes; not every Python has every entry.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from cellwright import Sandbox, SandboxResult
from cellwright.policies.policy import MIB, Policy
from tests.conftest import policy_named

NO_SOCKETS = "socket(2) is refused, AF_UNIX too"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("stdlib_tests"),
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
SLOW = ("test_subprocess", "test_datetime", "test_threading", "test_queue", "test_unicodedata")
STANDARD = (
    "test_threading", "test_subprocess", "test_thread", "test_sys_setprofile",
    *(["test_pipes"] if sys.version_info < (3, 13) else []),
)  # fmt: skip

# Which denial explains it
NO_PROCESSES = "strict refuses fork and exec"
READ_ONLY = "the standard library is mounted read-only, and the test writes modules beside it"
NOT_EXECUTABLE = "the workspace of strict is mounted noexec: shutil.which finds nothing to execute"
ONE_GROUP = "the cell's /etc/group knows one group, which is not 0"
PIPE_SIZES = "F_SETPIPE_SZ is refused: it draws on the pipe pages of the uid, in every cell"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# (profile, denial) -> the tests that fail for it, without the leading "test."
EXPECTED: dict[tuple[str, str], frozenset[str]] = {
    ("strict", NO_SOCKETS): _names(
        """
        test_pathlib.PathSubclassTest.test_is_socket_true
        test_pathlib.PathTest.test_is_socket_true
        test_pathlib.PosixPathTest.test_is_socket_true
        test_pathlib.test_pathlib.PathSubclassTest.test_is_socket_true
        test_pathlib.test_pathlib.PathTest.test_is_socket_true
        test_pathlib.test_pathlib.PosixPathTest.test_is_socket_true
        """
    ),
    ("standard", PIPE_SIZES): _names(
        """
        test_subprocess.ProcessTestCase.test_pipesizes
        test_subprocess.ProcessTestCaseNoPoll.test_pipesizes
        """
    ),
    ("strict", NOT_EXECUTABLE): _names(
        """
        test_shutil.TestWhich.test_absolute_cmd
        test_shutil.TestWhich.test_basic
        test_shutil.TestWhich.test_environ_path
        test_shutil.TestWhich.test_environ_path_cwd
        test_shutil.TestWhich.test_environ_path_missing
        test_shutil.TestWhich.test_relative_cmd
        test_shutil.TestWhich.test_relative_path
        test_shutil.TestWhichBytes.test_absolute_cmd
        test_shutil.TestWhichBytes.test_basic
        test_shutil.TestWhichBytes.test_environ_path
        test_shutil.TestWhichBytes.test_environ_path_cwd
        test_shutil.TestWhichBytes.test_environ_path_missing
        test_shutil.TestWhichBytes.test_relative_cmd
        test_shutil.TestWhichBytes.test_relative_path
        """
    ),
    ("strict", NO_PROCESSES): _names(
        """
        datetimetester.ExtensionModuleTests_Fast.test_gh_120161
        datetimetester.ExtensionModuleTests_Fast.test_update_type_cache
        test_ast.ASTMainTests.test_cli_file_input
        test_ast.test_ast.ASTMainTests.test_cli_file_input
        test_base64.TestMain.test_decode
        test_base64.TestMain.test_encode_decode
        test_base64.TestMain.test_encode_file
        test_base64.TestMain.test_encode_from_stdin
        test_base64.TestMain.test_prints_usage_with_help_flag
        test_base64.TestMain.test_prints_usage_with_invalid_flag
        test_bytes.ByteArrayTest.test_check_encoding_errors
        test_bytes.BytesTest.test_check_encoding_errors
        test_calendar.CommandLineTestCase.test_help
        test_calendar.CommandLineTestCase.test_html_output_current_year
        test_calendar.CommandLineTestCase.test_html_output_year_css
        test_calendar.CommandLineTestCase.test_html_output_year_encoding
        test_calendar.CommandLineTestCase.test_illegal_arguments
        test_calendar.CommandLineTestCase.test_option_encoding
        test_calendar.CommandLineTestCase.test_option_lines
        test_calendar.CommandLineTestCase.test_option_locale
        test_calendar.CommandLineTestCase.test_option_months
        test_calendar.CommandLineTestCase.test_option_spacing
        test_calendar.CommandLineTestCase.test_option_type
        test_calendar.CommandLineTestCase.test_option_width
        test_calendar.CommandLineTestCase.test_output_current_year
        test_calendar.CommandLineTestCase.test_output_month
        test_calendar.CommandLineTestCase.test_output_year
        test_gzip.TestCommandLine.test_compress_fast_best_are_exclusive
        test_gzip.TestCommandLine.test_compress_infile_outfile
        test_gzip.TestCommandLine.test_compress_infile_outfile_default
        test_gzip.TestCommandLine.test_compress_stdin_outfile
        test_gzip.TestCommandLine.test_decompress_cannot_have_flags_compression
        test_gzip.TestCommandLine.test_decompress_infile_outfile
        test_gzip.TestCommandLine.test_decompress_infile_outfile_error
        test_gzip.TestCommandLine.test_decompress_stdin_stdout
        test_itertools.TestBasicOps.test_tee_dealloc_segfault
        test_json.test_tool.TestTool.test_broken_pipe_error
        test_json.test_tool.TestTool.test_compact
        test_json.test_tool.TestTool.test_ensure_ascii_default
        test_json.test_tool.TestTool.test_help_flag
        test_json.test_tool.TestTool.test_indent
        test_json.test_tool.TestTool.test_infile_outfile
        test_json.test_tool.TestTool.test_infile_stdout
        test_json.test_tool.TestTool.test_jsonlines
        test_json.test_tool.TestTool.test_no_ensure_ascii_flag
        test_json.test_tool.TestTool.test_no_indent
        test_json.test_tool.TestTool.test_non_ascii_infile
        test_json.test_tool.TestTool.test_sort_keys_flag
        test_json.test_tool.TestTool.test_stdin_stdout
        test_json.test_tool.TestTool.test_tab
        test_json.test_tool.TestTool.test_writing_in_place
        test_random.TestModule.test_after_fork
        test_re.ReTests.test_regression_gh94675
        test_sqlite3.test_dbapi.MultiprocessTests.test_ctx_mgr_rollback_if_commit_failed
        test_sqlite3.test_transactions.AutocommitAttribute.test_autocommit_disabled_implicit_shutdown
        test_struct.StructTest.test_struct_cleans_up_at_runtime_shutdown
        test_tempfile.TestMkstempInner.test_noinherit
        test_tempfile.TestRandomNameSequence.test_process_awareness
        test_tempfile.TestTemporaryDirectory.test_del_on_shutdown
        test_tempfile.TestTemporaryDirectory.test_del_on_shutdown_ignore_errors
        test_tempfile.TestTemporaryDirectory.test_exit_on_shutdown
        test_unicodedata.UnicodeMiscTest.test_failed_import_during_compiling
        test_uuid.TestUUIDWithExtModule.testIssue8621
        test_uuid.TestUUIDWithoutExtModule.testIssue8621
        """
    ),
    ("strict", ONE_GROUP): _names(
        """
        """
    ),
    ("strict", READ_ONLY): _names(
        """
        test_pickle.CUnpicklerTests.test_unpickle_module_race
        test_pickle.InMemoryPickleTests.test_unpickle_module_race
        test_pickle.PyUnpicklerTests.test_unpickle_module_race
        """
    ),
}

RUNNER = """
import io, os, sys, unittest
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.argv = ["unittest"]
from test import support
support.verbose = 0
support.use_resources = ["decimal", "walltime"]  # not "cpu" and "tzdata": minutes of arithmetic

failed, passed = [], []

def note(case, kind):
    failed.append([case.id(), kind])

class Result(unittest.TestResult):
    def addSuccess(self, test):
        passed.append(test.id())
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
{"run": result.testsRun, "failed": failed, "passed": passed, "skipped": len(result.skipped)}
"""


def roomy(profile: str) -> Policy:
    policy = policy_named(profile)
    limits = msgspec.structs.replace(
        policy.limits, wall_seconds=90.0, cpu_seconds=120.0, memory_bytes=2048 * MIB, cpus=2.0,
        workspace_bytes=512 * MIB, processes=256, workspace_inodes=100_000,
    )  # fmt: skip
    return msgspec.structs.replace(policy, limits=limits)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], SandboxResult]:
    """Run every suite, two at a time, each in a cell of its own."""
    jobs = [("strict", name) for name in STRICT] + [("standard", name) for name in STANDARD]
    with (
        Sandbox(policy=roomy("strict")) as strict,
        Sandbox(policy=roomy("standard")) as standard,
        ThreadPoolExecutor(2) as pool,
    ):
        sandboxes = {"strict": strict, "standard": standard}
        order = sorted(jobs, key=lambda job: job[1] not in SLOW)  # the long ones first
        run = lambda job: sandboxes[job[0]].execute(RUNNER, inputs={"name": job[1]})  # noqa: E731
        return dict(zip(order, pool.map(run, order), strict=True))


@pytest.mark.parametrize(
    ("profile", "name"),
    [("strict", name) for name in STRICT] + [("standard", name) for name in STANDARD],
)
def test_a_module_of_the_standard_library_works_in_a_cell(
    outcomes: dict[tuple[str, str], SandboxResult], profile: str, name: str
) -> None:
    result = outcomes[profile, name]
    assert isinstance(result.value, dict), (result.reason, result.error, result.stderr[-2000:])
    assert result.value["run"], f"nothing of test.{name} ran"
    failed = {case.removeprefix("test."): why for case, why in result.value["failed"]}
    explained = {case for (of, _), cases in EXPECTED.items() if of == profile for case in cases}
    assert {case: why for case, why in failed.items() if case not in explained} == {}
    passed = {case.removeprefix("test.") for case in result.value["passed"]}
    assert explained & passed == set(), "passes: take it out of the table"
