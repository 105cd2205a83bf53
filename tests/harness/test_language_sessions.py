"""Sessions in other languages: what stays, what is given, how one is interrupted, how it ends."""

import os
import select
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from cellwright import (
    AuditLog,
    PolicyError,
    Sandbox,
    SandboxResult,
    SandboxStatus,
    Session,
    SessionLost,
    SessionSettings,
    WorkspaceError,
)
from cellwright.results import Executable
from tests.conftest import policy_named, soon
from tests.escapes.test_sessions import told_to_go
from tests.runner.test_leftovers import cgroups_of, descendants, descriptors

FAILED, TIMEOUT = SandboxStatus.FAILED, SandboxStatus.TIMEOUT


class Programs(NamedTuple):
    """The same thing in each language; `shows` is how a result tells what a program says."""

    sets: str  # a variable to 5
    says: str  # it
    defines: str  # definitions that double
    doubles: str  # the variable
    prints: str  # out and err
    fails: str
    exits: str  # the call with 7
    ends: str  # the session with 3
    endless: str
    sleeps: str
    given: str  # input, variable and environment
    writes: str  # a file o
    garbage: str  # on the control channel


_SHELL = Programs(
    "x=5", "echo $x", "twice() { echo $(($1 * 2)); }", "twice $x", "echo out; echo err >&2",
    "if then", "return 7", "exit 3", "while :; do :; done", "read line < /dev/zero",
    'read line; echo "$line$text$E"', "echo made > /workspace/o", "printf garbage >&9",
)  # fmt: skip
_NODE = Programs(
    "const x = 5", "x", "function twice(n) { return n * 2 }", "twice(x)",
    "console.log('out'); console.error('err')", "null.x", "process.exit(7)",
    "process.reallyExit(3)", "for (;;) {}", "new Promise((done) => setTimeout(done, 60000))",
    "require('fs').readFileSync(0, 'utf8').trim() + text + process.env.E",
    "require('fs').writeFileSync('/workspace/o', 'made\\n')", "require('fs').writeSync(3, 'garbage')",
)  # fmt: skip
PROGRAMS = {
    "javascript": _NODE,
    "ruby": Programs(
        "x = 5", "x", "def twice(n) = n * 2", "twice(x)", "puts 'out'\n$stderr.puts 'err'", "nil.x",
        "exit 7", "exit! 3", "loop {}", "sleep", "gets.chomp + text + ENV['E']",
        "File.write('/workspace/o', \"made\\n\")", "IO.for_fd(3, autoclose: false).syswrite('garbage')",
    ),
    "bash": _SHELL,
    "sh": _SHELL,
    "typescript": _NODE._replace(
        sets="const x: number = 5", defines="function twice(n: number): number { return n * 2 }"
    ),
}  # fmt: skip
NEEDS = {"javascript": "node", "ruby": "ruby", "typescript": "newer_node"}
EVERY = [
    pytest.param(name, marks=[pytest.mark.needs(NEEDS[name])] if name in NEEDS else [])
    for name in PROGRAMS
]
SHELLS = ["bash", "sh"]


@pytest.fixture(params=EVERY)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def home(language: str, request: pytest.FixtureRequest) -> Sandbox:
    """The sandbox of `session`."""
    wanted: Sandbox = request.getfixturevalue("typed" if language == "typescript" else "sandbox")
    return wanted


@pytest.fixture(scope="module")
def commands() -> Iterator[Sandbox]:
    """One in which a shell has its commands."""
    with Sandbox(policy=policy_named("standard"), pool=0) as box:
        yield box


@pytest.fixture
def session(language: str, home: Sandbox) -> Iterator[Session]:
    with home.session(language=language) as opened:
        yield opened


def programs_of(session: Session) -> Programs:
    return PROGRAMS[session.language]


def said(result: SandboxResult) -> str:
    """Return the value, or what a shell printed in its place."""
    assert result.ok, result.to_dict()
    return result.stdout.strip() if result.value is None else str(result.value)


# What stays


def test_variables_and_functions_stay(session: Session) -> None:
    programs = programs_of(session)
    session.execute(programs.sets)
    session.execute(programs.defines)
    assert said(session.execute(programs.says)) == "5"
    assert said(session.execute(programs.doubles)) == "10"


def test_output_belongs_to_its_call_and_start_up_says_and_attempts_nothing(
    session: Session,
) -> None:
    for _ in range(2):
        result = session.execute(programs_of(session).prints)
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
        assert result.violations == ()


def test_each_call_is_given_its_own(session: Session) -> None:
    given = programs_of(session).given
    for word in ("one", "two"):
        result = session.execute(
            given, stdin=f"{word}\n", inputs={"text": " it's"}, env={"E": " $x\u00fc"}
        )
        assert said(result) == f"{word} it's $x\u00fc"


@pytest.mark.parametrize(
    ("language", "reads"),
    [
        pytest.param("javascript", "require('fs').readFileSync(0, 'utf8')", marks=pytest.mark.needs("node")),
        pytest.param("ruby", "$stdin.read", marks=pytest.mark.needs("ruby")),
        ("bash", "read line; echo \"$line\""),
        ("sh", "read line; echo \"$line\""),
    ],
)  # fmt: skip
def test_input_is_of_one_call_alone(sandbox: Sandbox, language: str, reads: str) -> None:
    with sandbox.session(language=language) as session:
        assert session.execute(reads, stdin="told").stdout.strip() in ("told", "")
        later = session.execute(reads)
        assert (later.value or later.stdout.strip()) == ""


CONTENT = bytes(range(256)) * 100 + b"%s \\n '\n"


def test_files_come_in_and_go_out(session: Session) -> None:
    session.upload("d/first", CONTENT)  # before the interpreter is there
    session.upload("second", CONTENT)  # by the interpreter
    assert session.download("d/first") == session.download("second") == CONTENT
    made = session.execute(programs_of(session).writes, files={"third": "x"}, collect=["o"])
    assert [file.path for file in made.files] == ["o"]
    assert [each.data for each in made.artifacts] == [b"made\n"]
    assert [file.path for file in session.files()] == ["d/first", "o", "second", "third"]


def test_files_can_be_kept_and_put_into_another_session(session: Session, home: Sandbox) -> None:
    session.upload("d/e/f", b"kept")
    with home.session(language=session.language) as other:
        other.restore(session.snapshot())
        assert other.download("d/e/f") == b"kept"


def test_files_for_which_there_is_no_room_are_an_error(session: Session) -> None:
    session.upload("most", bytes(60 << 20))
    with pytest.raises(WorkspaceError, match="cannot write more: .*"):
        session.upload("more", bytes(6 << 20))
    assert said(session.execute(programs_of(session).sets)) in ("", "5")


@pytest.mark.parametrize("language", SHELLS)
def test_a_shell_without_mkdir_says_so(sandbox: Sandbox, language: str) -> None:
    with sandbox.session(language=language) as session:
        session.execute("x=5")
        with pytest.raises(WorkspaceError, match=r"cannot write new/file: .*(fork|mkdir|new/file)"):
            session.upload("new/file", b"")
        assert said(session.execute("echo $x")) == "5"


@pytest.mark.parametrize("language", SHELLS)
def test_a_shell_with_mkdir_makes_directories(commands: Sandbox, language: str) -> None:
    with commands.session(language=language) as session:
        session.execute("set -C; x=5")
        session.upload("new/er/file", b"there")
        session.upload("new/er/file", b"replaced")
        assert session.download("new/er/file") == b"replaced"


@pytest.mark.parametrize(
    ("language", "asks"),
    [
        pytest.param("javascript", "console.log(require('fs').statSync('run').mode & 0o100)", marks=pytest.mark.needs("node")),
        pytest.param("ruby", "puts File.stat('run').mode & 0o100", marks=pytest.mark.needs("ruby")),
        ("bash", "[ -x run ] && echo 64"),
        ("sh", "[ -x run ] && echo 64"),
    ],
)  # fmt: skip
def test_a_file_may_be_executable(commands: Sandbox, language: str, asks: str) -> None:
    with commands.session(language=language) as session:
        for _ in range(2):  # before the interpreter is there, and by it
            assert session.execute(asks, files={"run": Executable(b"")}).stdout == "64\n"


def test_a_fork_replays_what_was_asked(session: Session) -> None:
    programs = programs_of(session)
    session.upload("data", b"kept")
    session.execute(programs.sets)
    session.execute(programs.fails)
    with session.fork() as branch:
        assert (branch.diverged, branch.language) == ((), session.language)
        assert said(branch.execute(programs.says)) == "5"
        assert branch.download("data") == b"kept"


# How a call ends


def test_a_call_that_fails_leaves_the_session(session: Session) -> None:
    programs = programs_of(session)
    session.execute(programs.sets)
    failed = session.execute(programs.fails)
    assert (failed.status, failed.session_lost) == (FAILED, False)
    assert failed.stderr
    left = session.execute(programs.exits)
    assert (left.status, left.reason, left.exit_code) == (FAILED, "exit", 7)
    assert said(session.execute(programs.says)) == "5"


def test_what_ends_the_process_ends_the_session_by_the_kernels_word(session: Session) -> None:
    ended = session.execute(programs_of(session).ends)
    assert (ended.status, ended.exit_code, ended.session_lost) == (FAILED, 3, True)
    with pytest.raises(SessionLost, match="request 1 ended it: exit, exit code 3"):
        session.execute(programs_of(session).says)


def test_a_program_that_takes_too_long_is_interrupted_and_its_state_stays(
    session: Session,
) -> None:
    programs = programs_of(session)
    session.execute(programs.sets)
    for endless in (programs.endless, programs.sleeps):
        late = session.execute(endless, timeout=0.2)
        assert (late.status, late.reason, late.session_lost) == (TIMEOUT, "wall_time", False)
        assert said(session.execute(programs.says)) == "5"


def test_a_cancelled_call_leaves_the_session(session: Session) -> None:
    programs = programs_of(session)
    session.execute(programs.sets)
    run = session.start(f"{programs.prints}\n{programs.endless}")
    next(run.output())
    run.cancel()
    assert run.result().status is SandboxStatus.CANCELLED
    assert said(session.execute(programs.says)) == "5"


DEAF = {
    "javascript": "(async () => { await 0; for (;;) {} })()",
    "ruby": "trap('INT', 'IGNORE'); loop {}",
    "bash": "trap '' INT; while :; do :; done",
    "sh": "trap '' INT; while :; do :; done",
}
DEAF["typescript"] = DEAF["javascript"]


def test_a_program_that_does_not_yield_is_killed_and_the_session_is_lost(
    session: Session,
) -> None:
    late = session.execute(
        DEAF[session.language], timeout=1.5
    )  # deaf by then, on a busy machine too
    assert (late.status, late.reason, late.session_lost) == (TIMEOUT, "wall_time", True)


def test_words_out_of_turn_are_a_violation(session: Session) -> None:
    programs = programs_of(session)
    broken = session.execute(programs.garbage)
    assert (broken.status, broken.reason) == (SandboxStatus.KILLED, "violation")
    assert broken.session_lost


LATER = {
    "javascript": "setImmediate(() => require('fs').writeSync(3, 'garbage'))",
    "ruby": "Thread.new { sleep 0.05; IO.for_fd(3, autoclose: false).syswrite('garbage') }; nil",
}


@pytest.mark.parametrize(
    "language",
    [
        pytest.param("javascript", marks=pytest.mark.needs("node")),
        pytest.param("ruby", marks=pytest.mark.needs("ruby")),
    ],
)
def test_words_between_two_calls_are_a_violation(sandbox: Sandbox, language: str) -> None:
    with sandbox.session(language=language) as session:
        session.execute(LATER[language])
        control = session.cell._held.cell.control
        assert soon(lambda: bool(select.select([control], [], [], 0)[0]))
        broken = session.execute(PROGRAMS[language].says)
        assert (broken.reason, broken.session_lost) == ("violation", True)
        assert "spoke before it was asked" in str(broken.error)


def test_a_background_job_of_a_shell_that_speaks_between_two_calls_is_one(
    commands: Sandbox,
) -> None:
    with commands.session(language="bash") as session:
        assert session.execute("mkfifo go; (read x <go; printf garbage >&9) &").ok
        with told_to_go(session):
            control = session.cell._held.cell.control
            assert soon(lambda: bool(select.select([control], [], [], 0)[0]))
        broken = session.execute(":")
        assert (broken.reason, broken.session_lost) == ("violation", True)


# Shells


@pytest.mark.parametrize("language", SHELLS)
def test_a_shells_status_is_the_calls(sandbox: Sandbox, language: str) -> None:
    with sandbox.session(language=language) as session:
        for code in (10, 1, 255, 0):
            assert session.execute(f"return {code}").exit_code == code
        session.execute("return 9")
        assert session.execute("echo $?").stdout == "9\n"
        assert session.execute("set -u; echo $nowhere").status is FAILED
        assert session.execute("set +u; set -- a b; shift; echo $1").stdout == "b\n"
        assert session.execute("echo $1").stdout == "b\n"


def test_a_message_of_a_shell_names_the_line_of_the_program(sandbox: Sandbox) -> None:
    with sandbox.session(language="bash") as session:
        assert "/tmp/cell.bash: line 2:" in session.execute(":\nif then").stderr
        assert "/tmp/cell.bash: line 3:" in session.execute(":\n:\nif then").stderr


@pytest.mark.parametrize("language", SHELLS)
def test_commands_jobs_and_the_directory_of_a_shell_stay(commands: Sandbox, language: str) -> None:
    with commands.session(language=language) as session:
        session.execute("mkdir d; cd d; x=$(echo hi | tr a-z A-Z); sleep 60 &")
        assert session.execute("pwd; echo $x").stdout == "/workspace/d\nHI\n"
        late = session.execute("cat | sleep 60; echo never", timeout=0.2)
        assert (late.status, late.session_lost, late.stdout) == (TIMEOUT, False, "")
        assert late.violations == ()
        assert session.execute("kill -0 $! && echo there").stdout == "there\n"


def test_a_shell_of_a_session_reads_and_writes_no_history(commands: Sandbox) -> None:
    with commands.session(language="bash") as session:
        session.execute("echo a!b; PS1='prompt> '")
        result = session.execute('history; echo "[$HISTFILE]"; ls -A /workspace')
        assert (result.stdout, result.stderr) == ("[]\n", "")
        assert session.execute("exit").session_lost


@pytest.mark.parametrize("language", SHELLS)
def test_old_kernels_signal_the_group_by_its_number(
    commands: Sandbox, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cellwright.runner.cells.cell._PROCESS_GROUP", 1 << 30
    )  # EINVAL, as on those
    with commands.session(language=language) as session:
        session.execute("x=5")
        late = session.execute("sleep 60; echo never", timeout=0.2)
        assert (late.status, late.session_lost, late.stdout) == (TIMEOUT, False, "")
        assert said(session.execute("echo $x")) == "5"


# JavaScript and Ruby


@pytest.mark.needs("node")
def test_javascript_has_its_last_value_its_modules_and_awaits_promises(sandbox: Sandbox) -> None:
    with sandbox.session(language="js") as session:
        session.execute("const path = require('path'); class A { m() { return 6 } }")
        assert session.execute("Promise.resolve(path.join('a', 'b'))").value == "a/b"
        assert session.execute("_ + 1").value == "a/b1"
        assert session.execute("new A().m()").value == 6
        never = session.execute("new Promise(() => {})")
        assert "nothing is left that could settle" in str(never.error)
        late = session.execute(
            "setTimeout(() => { throw new Error('late') }, 1); new Promise(() => {})"
        )
        assert (late.reason, late.error) == ("exception", "Error: late")
        assert session.execute("_").value == 6


@pytest.mark.needs("node")
def test_process_stdin_of_javascript_is_of_each_call(sandbox: Sandbox) -> None:
    reads = "(async () => { let t = ''; for await (const d of process.stdin) t += d; return t })()"
    with sandbox.session(language="javascript") as session:
        assert session.execute(reads, stdin="one").value == "one"
        assert session.execute(reads, stdin="two").value == "two"
        assert session.execute(reads).value == ""


@pytest.mark.parametrize(
    ("language", "first", "second"),
    [
        pytest.param(
            "javascript", "function f() {\n  null.x;\n}", "f()", marks=pytest.mark.needs("node")
        ),
        pytest.param("ruby", "def f\n  nil.x\nend", "f", marks=pytest.mark.needs("ruby")),
    ],
)
def test_tracebacks_name_the_call_and_nothing_of_ours(
    sandbox: Sandbox, language: str, first: str, second: str
) -> None:
    with sandbox.session(language=language) as session:
        session.execute(first)
        failed = session.execute(second)
        assert failed.reason == "exception"
        for place in ("<cell 1>:2", "<cell 2>:1"):
            assert place in str(failed.traceback)
        for ours in ("[eval]", "node:", "-e:"):
            assert ours not in str(failed.traceback)


@pytest.mark.needs("ruby")
def test_ruby_has_its_last_value_and_a_handler_of_its_own_decides(sandbox: Sandbox) -> None:
    with sandbox.session(language="ruby") as session:
        session.execute("6 * 7")
        assert session.execute("_ + 1").value == 43
        session.execute("trap('INT') { raise 'enough' }; nil")
        late = session.execute("loop {}", timeout=0.2)
        assert (late.status, late.session_lost) == (TIMEOUT, False)
        assert "enough" in str(late.traceback)
        assert session.execute("abort 'told'").exit_code == 1
        assert session.execute("_").value == 43


# One owner


def test_a_session_runs_its_own_language_and_no_other(session: Session, home: Sandbox) -> None:
    with pytest.raises(PolicyError, match=f"this session runs {session.language} only, got python"):
        session.execute("1", "python")
    named = home.session("named", session.language)
    with named, pytest.raises(PolicyError, match=f"'named' runs {session.language}, got python"):
        home.session("named")


def test_an_unknown_language_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(PolicyError, match="language: unknown language 'cobol'"):
        sandbox.session(language="cobol")


def test_sessions_of_all_languages_are_counted_together() -> None:
    sessions = SessionSettings(alive=2, evict=True)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=sessions) as box:
        first, second = box.session(), box.session(language="bash")
        first.execute("1")
        second.execute(":")
        third = box.session(language="sh")
        assert (first.lost[:12], second.lost, third.lost) == ("it was idle ", "", "")


def test_the_trail_tells_the_language() -> None:
    log = AuditLog()
    with (
        Sandbox(policy=policy_named("strict"), pool=0, audit=log) as box,
        box.session("mine", "bash") as session,
    ):
        session.execute("echo")
    start = next(each for each in log.get_entries() if each.action == "start")
    assert (start.target, start.details["session_id"]) == ("bash", "mine")


def test_sessions_of_shells_leave_nothing() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        with box.session(language="bash") as session:
            session.execute(":")
        before: tuple[object, ...] = ()

        def is_steady() -> bool:  # its launcher makes ready for the next cell
            nonlocal before
            then, before = before, _held()
            return then == before

        assert soon(is_steady)
        for _ in range(10):
            with box.session(language="bash") as session:
                session.execute("x=5")
        assert soon(lambda: _held() == before)


def _held() -> tuple[object, ...]:
    return len(descendants(os.getpid())), cgroups_of(os.getpid()), descriptors(os.getpid())
