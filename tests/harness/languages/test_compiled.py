"""Languages of the table: compiled once in a cell of their own, run in others."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellwright import (
    AuditLog,
    HostSettings,
    LaunchError,
    PolicyError,
    Sandbox,
    SandboxStatus,
)
from cellwright.harness.cli.helping import doctor
from cellwright.harness.cli.helping.languages import version_of
from cellwright.harness.sandbox.languages.build_store import BuildStore
from cellwright.harness.sandbox.languages.compiled import Build
from cellwright.judging import Case, Verdict
from cellwright.policies.languages import SPOKEN
from cellwright.policies.languages.table import language_table
from cellwright.runner.host import interpreters
from cellwright.runner.requests.result import CompileResult
from tests.conftest import policy_named

PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
GCC = pytest.mark.needs("gcc")
SAY = '#include <stdio.h>\nint main(void) { puts("%s"); return 0; }\n'


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a test begin with an empty store, and leave the user's alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cellwright" / "builds"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        yield box


def missing(language: str) -> list[str]:
    entry = language_table().called(language)
    assert entry
    return [name for name in entry.programs() if not shutil.which(name, path=interpreters.PLACES)]


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_program_of_each_language_that_is_here_runs_under_strict(
    sandbox: Sandbox, language: str
) -> None:
    """Where a language is not, the error names its package."""
    if missing(language):
        with pytest.raises(LaunchError) as error:
            sandbox.execute(PROGRAMS[language], language)
        entry = language_table().called(language)
        assert entry
        assert error.value.hint == f"install the package {entry.package}"
        return
    result = sandbox.execute(PROGRAMS[language], language, stdin="20 22\n")
    assert (result.stdout, result.reason) == ("42\n", "exit"), result
    assert bool(result.compile) == bool(language_table().called(language).is_compiled)  # type: ignore[union-attr]


@GCC
def test_a_program_is_compiled_once_and_the_result_says_so(sandbox: Sandbox) -> None:
    build = sandbox.compile(SAY % "hello", "c")
    assert (build.ok, build.compile.cached, build.output) == (True, False, "")
    assert build.compile.seconds > 0
    result = sandbox.execute(build)
    assert (result.stdout, result.compile and result.compile.cached) == ("hello\n", True)
    assert result.layers == sandbox.layers
    again = sandbox.execute(SAY % "hello", "c")
    assert again.compile
    assert again.compile.cached
    other = sandbox.compile(SAY % "hello", "c", flags=["-O0"])
    assert not other.compile.cached
    with Sandbox(policy=policy_named("strict"), pool=0) as another:
        assert another.compile(SAY % "hello", "c").compile.cached


@GCC
def test_a_program_of_several_files_takes_input_arguments_and_variables(sandbox: Sandbox) -> None:
    main = (
        '#include "twice.h"\n#include <stdio.h>\n#include <stdlib.h>\n'
        'int main(int count, char **words) { int n; FILE *f = fopen(words[1], "r");\n'
        'if (!f || fscanf(f, "%d", &n) != 1) return 3;\n'
        'printf("%d %s\\n", twice(n), getenv("WORD")); return 0; }\n'
    )
    files = {"twice.h": "int twice(int);", "twice.c": "int twice(int n) { return 2 * n; }"}
    build = sandbox.compile(files={"main.c": main, **files}, language="c")
    assert build.ok, build.output
    result = sandbox.execute(build, arguments=["in"], files={"in": "21"}, inputs={"WORD": "ok"})
    assert result.stdout == "42 ok\n", result


@GCC
@pytest.mark.parametrize("name", ["-o.c", "-Dmain=x.c", "@arguments.c", "-.c"])
def test_a_name_of_a_file_is_no_option(sandbox: Sandbox, name: str) -> None:
    main = "int other(void);\nint main(void) { return other(); }"
    build = sandbox.compile(main, "c", files={name: "int other(void) { return 3; }"})
    assert build.ok, build.output
    assert sandbox.execute(build).exit_code == 3


@GCC
def test_what_a_compiler_refuses_is_a_failure_with_its_words(sandbox: Sandbox) -> None:
    result = sandbox.execute("int main( {", "c")
    assert (result.status, result.reason) == (SandboxStatus.FAILED, "compile")
    assert "main.c:1:11: error" in result.stderr
    assert result.compile
    assert (result.compile.ok, result.compile.exit_code) == (False, 1)
    build = sandbox.compile("int main( {", "c")
    assert not build.ok
    assert build.compile.cached  # it would fail again
    assert "error" in build.output
    assert sandbox.execute(build).reason == "compile"


@GCC
def test_threads_that_ask_for_one_program_compile_it_once() -> None:
    log = AuditLog()
    with Sandbox(policy=policy_named("strict"), pool=2, audit=log) as box:
        with ThreadPoolExecutor(8) as threads:
            done = list(threads.map(lambda _: box.execute(SAY % "once", "c"), range(16)))
        assert {each.stdout for each in done} == {"once\n"}
    languages = [entry.target for entry in log.get_entries()]
    assert languages.count("compile c") == 1
    assert languages.count("c") == 16


@GCC
def test_a_program_reads_no_build_but_its_own(sandbox: Sandbox, own_store: Path) -> None:
    """It runs by the name of its own, which tells nothing of the others; it cannot write there."""
    assert sandbox.compile(SAY % "secret answer", "c").ok
    look = r"""
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <fcntl.h>
int main(int count, char **words) {
    DIR *all = opendir("/builds");
    printf("%s\n", all ? "listed" : strerror(errno));
    char own[300]; snprintf(own, sizeof own, "%s", words[0]);
    printf("%s\n", open(own, O_WRONLY) < 0 ? strerror(errno) : "written");
    strrchr(own, '/')[1] = 0; strcat(own, "new");
    printf("%s\n", open(own, O_CREAT | O_WRONLY, 0600) < 0 ? strerror(errno) : "made");
}
"""
    result = sandbox.execute(look, "c")
    listed, written, made = result.stdout.splitlines()
    assert listed == "Permission denied"
    assert written in ("Text file busy", "Read-only file system", "Permission denied")
    assert made == "Read-only file system"
    shown = own_store / "shown"
    assert len(list(shown.iterdir())) == 2  # outside, root lists both
    assert stat.S_IMODE(shown.stat().st_mode) == 0o311


@GCC
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('#include "/etc/shadow"\nint main(void) { return 0; }', "No such file or directory"),
        ('#include "/etc/passwd"\nint main(void) { return 0; }', "error"),  # the cell's own
        ('#include "/dev/random"\nint main(void) { return 0; }', "error"),
        ("#error secret\n" * 10 + "x" * 100_000, "error"),
    ],
)
def test_a_compiler_that_is_attacked_reads_no_secret(
    sandbox: Sandbox, source: str, reason: str
) -> None:
    build = sandbox.compile(source, "c")
    assert not build.ok
    assert reason in build.output or build.compile.reason != "exit"
    for line in Path("/etc/passwd").read_text().splitlines()[:40]:
        if line.split(":")[0] not in ("root", "nobody", "cell"):
            assert line not in build.output


@GCC
@pytest.mark.needs("cgroup")
def test_a_compiler_without_end_harms_its_own_cell_alone() -> None:
    bomb = (
        "template <int n> struct S { S<n + 1> *left; typename S<n + 1>::T right; typedef int T; };\n"
        "S<0> s; int main() {}"
    )
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        build = box.compile(bomb, "cpp", flags=["-ftemplate-depth=2000000000"])
        assert not build.ok
        assert box.execute("1 + 1").value == 2
        again = box.compile(bomb, "cpp", flags=["-ftemplate-depth=2000000000"])
        assert not again.ok


@GCC
@pytest.mark.needs("cgroup")
def test_a_compiler_ends_at_its_own_time_and_that_is_not_kept(sandbox: Sandbox) -> None:
    tokens = "".join(f"#define A{n + 1} {' '.join([f'A{n}'] * 10)}\n" for n in range(8))
    bomb = f"#define A0 1,\n{tokens}int a[] = {{ A8 }};\nint main(void) {{ return 0; }}"
    for _ in range(2):
        build = sandbox.compile(bomb, "c", compile_timeout=0.2)
        assert (build.compile.reason, build.compile.cached) == ("cpu_time", False)
    result = sandbox.execute(bomb, "c", compile_timeout=0.2)
    assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "compile")
    judged = sandbox.judge(bomb, "c", [Case()], compile_timeout=0.2)
    assert judged.verdict is Verdict.COMPILE_ERROR
    with pytest.raises(PolicyError, match="compile_timeout: must be from"):
        sandbox.compile(SAY % "x", "c", compile_timeout=0)
    assert sandbox.compile(SAY % "x", "c", compile_timeout=10**6).ok  # the language's own limit


@GCC
def test_a_readable_descriptor_ends_a_compiler(sandbox: Sandbox) -> None:
    cancel = os.eventfd(1)
    try:
        assert sandbox.compile(SAY % "x", "c", cancel=cancel).compile.reason == "cancelled"
    finally:
        os.close(cancel)
    assert sandbox.compile(SAY % "x", "c").ok


@GCC
def test_the_command_limits_a_compiler(tmp_path: Path) -> None:
    file = tmp_path / "main.c"
    file.write_text(SAY % "x")
    command = [sys.executable, "-Im", "cellwright", "run", str(file), "--compile-timeout"]
    done = subprocess.run([*command, "20"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "x\n", done.stderr
    done = subprocess.run([*command, "-1"], capture_output=True, text=True, timeout=60, check=False)
    assert "compile_timeout: must be from" in done.stderr


def test_a_store_keeps_no_more_than_its_bytes(own_store: Path) -> None:
    store = BuildStore(own_store, most_bytes=1_000_000)
    done = CompileResult(ok=True, status=SandboxStatus.COMPLETED, reason="exit")
    names = [store.name_of(bytes([number])) for number in range(12)]
    for number, name in enumerate(names):
        store.keep(name, done, {"main": bytes(100_000)})
        os.utime(own_store / "entries" / name, (number, number))
    kept = [name for name in names if store.find(name)]
    assert kept == names[-len(kept) :]  # the most recently used
    assert 5 <= len(kept) <= 10
    assert {each.name for each in (own_store / "shown").iterdir()} == set(kept)


def test_empty_files_and_words_of_compilers_count(own_store: Path) -> None:
    store = BuildStore(own_store, most_bytes=1_000_000)
    done = CompileResult(ok=True, status=SandboxStatus.COMPLETED, reason="exit")
    words = CompileResult(
        ok=False, status=SandboxStatus.FAILED, reason="exit", output="x" * 600_000
    )
    first, second, third = (store.name_of(bytes([number])) for number in range(3))
    store.keep(first, done, {str(number): b"" for number in range(200)})
    os.utime(own_store / "entries" / first, (1, 1))
    store.keep(second, words, {})
    assert store.find(first) is None  # 800 KB of empty files and 600 KB of words
    store.keep(third, words, {})
    assert store.find(third)


def test_another_user_or_key_knows_no_names(tmp_path: Path) -> None:
    one, other = BuildStore(tmp_path / "a"), BuildStore(tmp_path / "b")
    assert one.name_of(b"x") != other.name_of(b"x")
    assert one.name_of(b"x") == BuildStore(tmp_path / "a").name_of(b"x")
    assert stat.S_IMODE((tmp_path / "a" / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x]\ntitle = 'X'", "missing required field"),
        ("[python]\ntitle='P'\nextensions=['.q']\nsource='a.q'\npackage=''\nversion=['q']\nrun=['q']", "with sessions"),
        ("[x]\ntitle='X'\nextensions=['.q']\nsource='a.q'\npackage=''\nversion=['q']\nrun=['q', '{nope}']", "{nope} is unknown"),
        ("[x]\ntitle='X'\nextensions=['.q']\nsource='a.b'\npackage=''\nversion=['q']\nrun=['q']", "must have one of"),
        ("[x]\ntitle='X'\nextensions=['.q']\nsource='a.q'\npackage=''\nversion=['q']\nrun=['q']\nlimits={wall=3}", "is no limit"),
        ("[x", "Expected ']'"),
    ],
)  # fmt: skip
def test_a_table_with_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "more.toml"
    file.write_text(text)
    with pytest.raises(PolicyError, match="more.toml") as error:
        language_table().with_file(file)
    assert message in str(error.value)


def test_a_build_has_its_own_language_and_flags(sandbox: Sandbox) -> None:
    compiled = CompileResult(ok=False, status=SandboxStatus.FAILED, reason="exit")
    build = Build(language="c", source="int main(void) {}", compile=compiled)
    with pytest.raises(PolicyError, match="own language"):
        sandbox.execute(build, "cpp")
    with pytest.raises(PolicyError, match="own flags"):
        sandbox.execute(build, flags=["-O0"])
    with pytest.raises(PolicyError, match="Perl is not compiled"):
        sandbox.compile("1", "perl")
    with pytest.raises(PolicyError, match="Perl has no compiler"):
        sandbox.execute("1", "perl", flags=["-w"])


AWK = """
[awk]
title = "awk"
extensions = [".awk"]
source = "main.awk"
package = "mawk"
version = ["mawk", "-W", "version"]
run = ["awk", "-v", "memory={memory_mib}", "-f", "{source}"]
"""


def test_a_file_adds_a_language(tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text(AWK)
    host = HostSettings(languages=file)
    with Sandbox(policy=policy_named("strict"), pool=0, host=host) as box:
        result = box.execute("{ print $1 + $2, memory }", "awk", stdin="20 22\n")
        assert result.stdout == "42 256\n", result
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        assert "unknown language 'awk'" in str(box.execute("{}", "awk").error)
    program = tmp_path / "sum.awk"
    program.write_text("{ print $1 + $2 }")
    command = [sys.executable, "-Im", "cellwright", "run", str(program), "--stdin", "-"]
    done = subprocess.run(
        [*command, "--languages", str(file)],
        input="1 2\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "3\n", done.stderr


def test_the_command_lists_languages_with_versions_and_packages() -> None:
    command = [sys.executable, "-Im", "cellwright", "languages", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {*SPOKEN, *language_table().names()}
    assert rows["python"]["version"].startswith("Python 3.")
    assert rows["cpp"]["kind"] == "compiled"
    assert all(row["package"] for row in rows.values())
    assert all(bool(row["version"]) != bool(row["missing"]) for row in rows.values())


def test_a_version_is_that_of_the_program_which_cells_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "bash"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    language = interpreters.HostLanguage("bash", "", "", "", "", (), ("bash", "--version"))
    assert version_of(language).startswith("GNU bash")


def test_a_language_without_sessions_is_refused_with_what_to_do(sandbox: Sandbox) -> None:
    with pytest.raises(PolicyError, match="there are no sessions in cpp") as error:
        sandbox.session(language="c++")
    assert "without a session" in error.value.hint


def test_the_doctor_names_languages_that_are_here_and_packages_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "shutil.which", lambda name, **_: f"/usr/bin/{name}" if name == "perl" else None
    )
    told = doctor._languages().proof
    assert told.startswith("this host also has perl; packages of Debian bring c (gcc libc6-dev), ")
    assert all(
        f"{each.name} ({each.package})" in told for each in language_table() if each.name != "perl"
    )
