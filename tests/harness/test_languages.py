"""Other languages, each by a real interpreter in a cell."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import HostSettings, LaunchError, PolicyError, Sandbox, SandboxStatus
from cellwright.policies.languages import (
    LANGUAGES,
    language_called,
    language_of_file,
    language_of_script,
)
from cellwright.runner.host import interpreters
from tests.conftest import OPTIONAL, ROOT, newer_node, policy_named

JAVASCRIPT = pytest.mark.needs("node")
RUBY = pytest.mark.needs("ruby")
EVERY = [
    pytest.param("javascript", marks=JAVASCRIPT), pytest.param("ruby", marks=RUBY), "bash", "sh",
]  # fmt: skip


@pytest.fixture(scope="module", params=[0, 2], ids=["on demand", "parked"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=request.param) as box:
        yield box


HELLO = {
    "javascript": "console.log('hello'); console.error('oh')",
    "ruby": "puts 'hello'\n$stderr.puts 'oh'",
    "bash": "echo hello; echo oh >&2",
    "sh": "echo hello; echo oh >&2",
}


@pytest.mark.parametrize("language", EVERY)
def test_a_program_prints(sandbox: Sandbox, language: str) -> None:
    result = sandbox.execute(HELLO[language], language)
    assert (result.status, result.stdout, result.stderr) == (
        SandboxStatus.COMPLETED, "hello\n", "oh\n",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.violations == ()


@RUBY
def test_ruby_reads_and_writes_utf_8(sandbox: Sandbox) -> None:
    """It asks the locale, of which no file is shown."""
    program = "# \N{SNOWMAN}\nputs 'é'\n[$stdin.read, 'é'.length, File.read('f').valid_encoding?]"
    result = sandbox.execute(program, "ruby", stdin="\N{SNOWMAN}", files={"f": "é"})
    assert (result.stdout, result.value) == ("é\n", ["\N{SNOWMAN}", 1, True]), result


@RUBY
def test_a_hash_whose_keys_have_one_name_in_json_is_shown_as_ruby_does(sandbox: Sandbox) -> None:
    assert sandbox.execute("[{1=>2, '1'=>3}]", "ruby").value == '[{1=>2, "1"=>3}]'


@pytest.mark.parametrize(
    ("language", "program"),
    [  # node itself shortens long text, and says so
        pytest.param("javascript", "Object.fromEntries(Array.from({length: 1e5}, (_, n) => [n, 1e9]))", marks=JAVASCRIPT),
        pytest.param("ruby", "(0...100_000).to_h { |n| [n, 10 ** 9] }", marks=RUBY),
    ],
)  # fmt: skip
def test_what_a_value_lost_is_counted(sandbox: Sandbox, language: str, program: str) -> None:
    result = sandbox.execute(program, language)
    assert result.ok, result
    assert len(result.value) == sandbox.policy.limits.value_bytes
    assert result.truncated["value"] > 400_000


EXITS = {"javascript": "process.exit(7)", "ruby": "exit 7", "bash": "exit 7", "sh": "exit 7"}


@pytest.mark.parametrize("language", EVERY)
def test_its_exit_code_is_the_kernels_word(sandbox: Sandbox, language: str) -> None:
    result = sandbox.execute(EXITS[language], language)
    assert (result.status, result.reason, result.exit_code) == (SandboxStatus.FAILED, "exit", 7)


READS = {
    "javascript": "require('fs').readFileSync(0, 'utf8') + require('fs').readFileSync('f', 'utf8') + process.env.E",
    "ruby": "$stdin.read + File.read('f') + ENV['E']",
}


@pytest.mark.parametrize(
    "language", [pytest.param("javascript", marks=JAVASCRIPT), pytest.param("ruby", marks=RUBY)]
)
def test_it_is_given_what_a_python_program_is(sandbox: Sandbox, language: str) -> None:
    result = sandbox.execute(
        READS[language], language, stdin="s", files={"f": b"f"}, env={"E": "e"}
    )
    assert result.value == "sfe"
    result = sandbox.execute("given", language, inputs={"given": {"a": [1, None, "\u00fc"]}})
    assert result.value == {"a": [1, None, "\u00fc"]}


LISTS_ARGUMENTS = {
    "python": "import json, sys\nprint(json.dumps(sys.argv[1:]))",
    "javascript": "console.log(JSON.stringify(process.argv.slice(2)))",
    "ruby": "require 'json'; puts JSON.generate(ARGV)",
    "bash": """printf '["%s", "%s", "%s", "%s"]' "$1" "$2" "$3" "$4" """,
    "sh": """printf '["%s", "%s", "%s", "%s"]' "$1" "$2" "$3" "$4" """,
}
ARGUMENTS = ["a  b", "--json", "it's \N{SNOWMAN}", "$x `y` *"]


@pytest.mark.parametrize("language", ["python", *EVERY])
def test_a_program_has_its_arguments(sandbox: Sandbox, language: str) -> None:
    code = LISTS_ARGUMENTS[language]
    assert json.loads(sandbox.execute(code, language, arguments=ARGUMENTS).stdout) == ARGUMENTS
    none = json.loads(sandbox.execute(code, language).stdout)
    assert [each for each in none if each] == []


@pytest.mark.parametrize("language", ["python", *EVERY])
def test_arguments_stay_in_a_session_until_a_call_has_others(
    sandbox: Sandbox, language: str
) -> None:
    code = LISTS_ARGUMENTS[language]
    others = ["1\n2", "", "-n", "\\"]
    with sandbox.session(language=language) as session:
        for given, expected in ((ARGUMENTS, ARGUMENTS), ((), ARGUMENTS), (others, others)):
            said = session.execute(code, arguments=given).stdout
            if language in ("bash", "sh"):  # these shells print characters that JSON would escape
                assert all(each in said for each in expected)
            else:
                assert json.loads(said) == expected


@pytest.mark.parametrize("language", ["bash", "sh"])
def test_a_shell_has_inputs_as_variables(sandbox: Sandbox, language: str) -> None:
    code = 'read line; echo "$line $text $list $E"; IFS= read -r f < f; echo "$f"'
    result = sandbox.execute(
        code,
        language,
        stdin="s\n",
        files={"f": "f\n"},
        env={"E": "e"},
        inputs={"text": "a b", "list": [1]},
    )
    assert result.stdout == "s a b [1] e\nf\n"


@JAVASCRIPT
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("const a = 1; a", 1),
        ("({a: [1, null, 'x']})", {"a": [1, None, "x"]}),
        ("undefined", None),
        ("Promise.resolve(5)", 5),
        ("10n", "10n"),
        ("new Map([[1, 2]])", "Map(1) { 1 => 2 }"),
        ("(function f() {})", "[Function: f]"),
        ("const o = {}; o.o = o; o", "<ref *1> { o: [Circular *1] }"),
        ("new Promise((done) => setTimeout(() => done('late'), 5))", "late"),
        ("require('path').join('a', 'b')", "a/b"),
    ],
)
def test_values_of_javascript(sandbox: Sandbox, code: str, value: object) -> None:
    assert sandbox.execute(code, "javascript").value == value


@RUBY
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("{a: [1, nil]}", {"a": [1, None]}),
        ("nil", None),
        (":sym", ":sym"),
        ("(1..3)", "1..3"),
    ],
)
def test_values_of_ruby(sandbox: Sandbox, code: str, value: object) -> None:
    assert sandbox.execute(code, "ruby").value == value


@JAVASCRIPT
@pytest.mark.parametrize("code", ["'x'.repeat(200_000)", "Array(60_000).fill(7)"])
def test_a_large_value_arrives_whole(sandbox: Sandbox, code: str) -> None:
    value = sandbox.execute(code, "javascript").value
    assert value in ("x" * 200_000, [7] * 60_000)


FAILS = {
    "javascript": (
        "let a = 1;\nnull.x",
        "TypeError: Cannot read properties of null",
        "/tmp/cell.js:2",
    ),
    "ruby": ("a = 1\nraise 'told'", "RuntimeError: told", "/tmp/cell.rb:2"),
}


@pytest.mark.parametrize(
    "language", [pytest.param("javascript", marks=JAVASCRIPT), pytest.param("ruby", marks=RUBY)]
)
def test_what_it_raises_is_told_with_its_own_lines_only(sandbox: Sandbox, language: str) -> None:
    code, error, place = FAILS[language]
    result = sandbox.execute(code, language)
    assert (result.status, result.reason, result.exit_code) == (
        SandboxStatus.FAILED,
        "exception",
        1,
    )
    assert str(result.error).startswith(error)
    assert place in str(result.traceback)
    for ours in ("[eval]", "node:", "-e:"):
        assert ours not in str(result.traceback)
    assert result.stderr.rstrip("\n") == str(result.traceback).rstrip("\n")


@JAVASCRIPT
@pytest.mark.parametrize(
    "code",
    [
        "throw 5",
        "Promise.reject(new Error('later'))",
        "setTimeout(() => { throw new Error('x') }, 1)",
        "let x = ;",
    ],
)
def test_every_way_to_fail_in_javascript_is_a_failure(sandbox: Sandbox, code: str) -> None:
    assert sandbox.execute(code, "javascript").status is SandboxStatus.FAILED


@pytest.mark.parametrize("language", EVERY)
def test_limits_hold_whatever_the_language(sandbox: Sandbox, language: str) -> None:
    endless = {
        "javascript": "for (;;) {}",
        "ruby": "loop {}",
        "bash": "while :; do :; done",
        "sh": "while :; do :; done",
    }
    late = sandbox.execute(endless[language], language, timeout=0.5)
    assert (late.status, late.reason) == (SandboxStatus.TIMEOUT, "wall_time")


@pytest.mark.parametrize("language", EVERY)
def test_what_is_refused_is_noted_whatever_the_language(sandbox: Sandbox, language: str) -> None:
    reads = {
        "javascript": "require('fs').readFileSync('/etc/shadow')",
        "ruby": "File.read('/etc/shadow')",
        "bash": "read x < /etc/shadow",
        "sh": "read x < /etc/shadow",
    }
    result = sandbox.execute(reads[language], language)
    assert result.status is SandboxStatus.FAILED
    assert [each.arguments[0] for each in result.violations] == ["'/etc/shadow'"]


@pytest.mark.parametrize("language", EVERY)
def test_under_the_strict_profile_nothing_else_can_be_started(
    sandbox: Sandbox, language: str
) -> None:
    starts = {
        "javascript": "require('child_process').execFileSync('/bin/true')",
        "ruby": "system('/bin/true') or raise 'no'",
        "bash": "/bin/true",
        "sh": "/bin/true",
    }
    assert sandbox.execute(starts[language], language).status is SandboxStatus.FAILED


@pytest.mark.parametrize("language", ["bash", "sh"])
def test_a_shell_brings_no_program_along(sandbox: Sandbox, language: str) -> None:
    """What it can execute is itself: not a file of the workspace, not one through the loader."""
    given = Path("/usr/bin/id").resolve().read_bytes()
    loader = next(Path("/lib64").glob("ld-*")) if Path("/lib64").exists() else Path("/lib/ld.so")
    for code in ("exec ./own", f"exec {loader} ./own"):
        result = sandbox.execute(code, language, files={"own": given})
        assert result.status is SandboxStatus.FAILED
        assert "uid=" not in result.stdout


START_UP = {
    "javascript": ({"NODE_OPTIONS": "--require ./evil.js"}, "evil.js", "console.log('evil')"),
    "ruby": ({"RUBYOPT": "-r./evil.rb"}, "evil.rb", "puts 'evil'"),
    "bash": ({"BASH_ENV": "evil.sh", "ENV": "evil.sh"}, "evil.sh", "echo evil"),
    "sh": ({"ENV": "evil.sh"}, "evil.sh", "echo evil"),
}


@pytest.mark.parametrize("code", ["echo a | cat", "echo $(echo a)", "(echo a)", "echo a & wait"])
def test_a_shell_forks_where_the_policy_allows_subprocesses_and_nowhere_else(
    strict: Sandbox, standard: Sandbox, code: str
) -> None:
    assert standard.execute(code, "bash").stdout == "a\n"
    refused = strict.execute(code, "bash")
    assert (refused.stdout, refused.ok) == ("", False)
    assert "Operation not permitted" in refused.stderr


@pytest.mark.parametrize("language", EVERY)
def test_the_hosts_environment_and_start_up_files_do_nothing(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's variables do not come along; files of the workspace are not start-up files."""
    variables, name, code = START_UP[language]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    files = {name: code, ".bashrc": code, ".profile": code, ".irbrc": code, ".noderc": code}
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        result = box.execute(HELLO[language], language, files=files)
    assert result.stdout == "hello\n"


def test_a_shell_under_the_standard_profile_has_its_commands(standard: Sandbox) -> None:
    code = "set -o pipefail; printf '3\\n1\\n2\\n' | sort | head -1 > out; cat out; echo $((6 * 7)) $(basename /a/b)"
    result = standard.execute(code, "bash")
    assert result.stdout == "1\n42 b\n"
    assert [each.path for each in result.files] == ["out"]


def test_a_language_that_is_not_installed_names_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreters, "PLACES", "/nowhere")
    with (
        Sandbox(policy=policy_named("strict"), pool=0) as box,
        pytest.raises(LaunchError, match=r"ruby is not installed(.|\n)*install the package ruby"),
    ):
        box.execute("1", "ruby")


TYPED = pytest.mark.needs("newer_node")


@TYPED
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("interface P { x: number }\nconst p: P = { x: 5 };\np.x as number", 5),
        ("const twice = <T,>(t: T): T[] => [t, t]; twice<string>('a')", ["a", "a"]),
        ("enum Colour { Red, Green }\nColour.Green", 1),
        ("process.argv[1]", "/tmp/cell.ts"),
        ("Promise.resolve<number>(6)", 6),
    ],
)
def test_values_of_typescript(typed: Sandbox, code: str, value: object) -> None:
    result = typed.execute(code, "typescript")
    assert (result.value, result.stderr, result.violations) == (value, "", ())


@TYPED
@pytest.mark.parametrize(
    ("code", "error", "place"),
    [
        ("const a: number = 1;\nnull.x", "TypeError: Cannot read properties", "/tmp/cell.ts:2"),
        ("const a: number = ;", "SyntaxError: ", "/tmp/cell.ts:1"),
    ],
)
def test_errors_of_typescript_have_the_programs_lines(
    typed: Sandbox, code: str, error: str, place: str
) -> None:
    result = typed.execute(code, "typescript")
    assert str(result.error).startswith(error)
    assert place in str(result.traceback)
    assert "[eval]" not in result.stderr


@TYPED
def test_an_interpreter_that_is_named_is_the_one_that_runs(typed: Sandbox) -> None:
    version = subprocess.run(
        [newer_node(), "--version"], capture_output=True, text=True, check=True
    )
    result = typed.execute("console.log(process.version)", "javascript")
    assert (result.stdout, result.violations) == (version.stdout, ())


def test_a_node_that_cannot_strip_types_is_named_with_what_is_needed(tmp_path: Path) -> None:
    old = tmp_path / "node"
    old.write_text("#!/bin/sh\necho v20.1.0 undefined\n")
    old.chmod(0o755)
    needed = r"node is v20\.1\.0, .* node 22\.13 or newer(.|\n)*interpreters="
    with (
        Sandbox(
            policy=policy_named("strict"),
            pool=0,
            host=HostSettings(interpreters={"javascript": str(old)}),
        ) as box,
        pytest.raises(LaunchError, match=needed),
    ):
        box.execute("1", "typescript")


def test_a_node_without_the_option_for_small_address_spaces_does_without(tmp_path: Path) -> None:
    says = "node: it is not allowed in NODE_OPTIONS"
    nodes = {name: tmp_path / name for name in ("old", "new")}
    nodes["old"].write_text(
        f'#!/bin/sh\n[ -z "$NODE_OPTIONS" ] || {{ echo {says} >&2; exit 9; }}\n'
    )
    nodes["new"].write_text("#!/bin/sh\n")
    for name, refusal in (("old", says), ("new", ""), ("none", "")):
        if name in nodes:
            nodes[name].chmod(0o755)
        found = interpreters.HostInterpreter("javascript", str(tmp_path / name), (), (), ())
        assert interpreters.why_no_node_option(found) == refusal
    compiled = interpreters.HostInterpreter("c", "/builds", (), (), ())
    assert interpreters.why_no_node_option(compiled) == interpreters.why_no_node_option(None)


@pytest.mark.parametrize(
    ("interpreters", "complaint"),
    [
        (
            {"python": "/usr/bin/python3"},
            "interpreters: 'python' must be one of bash, javascript, ruby, sh",
        ),
        ({"typescript": "/usr/bin/node"}, "'typescript' must be one of"),
        ({"bash": "bash"}, "'bash' is not an absolute path"),
        ({"bash": 5}, "5 is not an absolute path"),
        ({"bash": "/nowhere/bash"}, "/nowhere/bash cannot be executed"),
        ({"bash": "/etc/passwd"}, "/etc/passwd cannot be executed"),
    ],
)
def test_interpreters_that_make_no_sense_are_refused(
    interpreters: dict[str, str], complaint: str
) -> None:
    with pytest.raises(PolicyError, match=complaint):
        Sandbox(policy=policy_named("strict"), host=HostSettings(interpreters=interpreters)).close()


@JAVASCRIPT
def test_inputs_may_be_larger_than_an_argument(sandbox: Sandbox) -> None:
    result = sandbox.execute("text.length", "javascript", inputs={"text": "x" * 1_000_000})
    assert result.value == 1_000_000


def test_an_unknown_language_is_rejected_and_known_names_are_told(strict: Sandbox) -> None:
    result = strict.execute("x", "cobol")
    assert result.status is SandboxStatus.REJECTED
    assert "python, bash, javascript, ruby, sh, typescript" in str(result.error)


def test_a_session_says_which_language_it_runs(strict: Sandbox) -> None:
    with (
        strict.session() as session,
        pytest.raises(PolicyError, match="this session runs python only, got bash"),
    ):
        session.execute("echo", "bash")


def test_names_of_languages_and_files() -> None:
    assert [language_called(each) for each in ("python3", "js", "node", "rb", "bash", "c")] == [
        "python", "javascript", "javascript", "ruby", "bash", None,
    ]  # fmt: skip
    assert [language_of_file(each) for each in ("a.js", "b.sh", "c.rb", "d.py", "e", "", "f.ts")] == [
        "javascript", "sh", "ruby", "python", None, None, "typescript",
    ]  # fmt: skip
    first = (
        "#!/bin/sh -e",
        "#! /usr/bin/env -S node --x",
        "#!/usr/bin/python3.11",
        "#!/bin/awk",
        "#!",
        "1",
    )
    assert [language_of_script(each.encode()) for each in first] == [
        "sh", "javascript", "python", None, None, None,
    ]  # fmt: skip
    assert all(each.package for each in LANGUAGES.values())


def test_the_command_runs_a_file_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "hello.sh").write_text("echo hello from $0")
    optional = [part for layer in OPTIONAL for part in ("--optional", layer)]
    command = [
        sys.executable,
        "-m",
        "cellwright",
        "run",
        *optional,
        "--json",
        str(tmp_path / "hello.sh"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert json.loads(done.stdout)["stdout"] == "hello from /tmp/hello.sh\n"


def test_the_command_reads_a_pipe_once() -> None:
    """As `cellwright run <(...)` has it: the first line of the source tells the language."""
    optional = [part for layer in OPTIONAL for part in ("--optional", layer)]
    reading, writing = os.pipe()
    os.write(writing, b"#!/bin/sh\necho hello from sh")
    os.close(writing)
    with open(reading) as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "cellwright", "run", *optional, f"/dev/fd/{reading}"], cwd=ROOT,
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, pass_fds=[pipe.fileno()],
        )  # fmt: skip
    assert (done.stdout, done.stderr) == ("hello from sh\n", "")


def test_the_shells_of_the_host_are_there() -> None:
    """Else the tests above would say nothing."""
    assert shutil.which("bash")
    assert shutil.which("sh")


@pytest.mark.needs("node")
def test_only_the_launcher_of_the_language_that_is_named_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cellwright.runner.launching import spawn

    started: list[int] = []
    start = spawn._spawn
    monkeypatch.setattr(
        spawn, "_spawn", lambda *given: started.append(start(*given)) or started[-1]
    )
    with Sandbox(
        policy=policy_named("strict"), pool=0, host=HostSettings(language="js")
    ) as sandbox:
        assert sandbox.execute("6 * 7", "javascript").value == 42
        assert len(started) == 1
        assert sandbox.execute("6 * 7").value == 42
        with sandbox.session() as session:
            assert session.execute("6 * 7").value == 42
        assert len(started) == 2
    with pytest.raises(PolicyError, match="unknown language 'cobol'"):
        Sandbox(host=HostSettings(language="cobol"))
