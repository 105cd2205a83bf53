"""The unmodified Python SDK of E2B, against a server whose sandboxes are cells."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    TimeoutException,
)
from e2b_code_interpreter import AsyncSandbox, Sandbox

from tests.harness.servers.e2b.e2b_server import E2bServer

pytestmark = [
    pytest.mark.needs("cgroup"),
    # The SDK opens a client for each call, and leaves it for the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
_DEADLINE = 20.0


@pytest.fixture(scope="module")
def sandbox(e2b: E2bServer) -> Iterator[Sandbox]:
    with Sandbox.create(metadata={"user": "anna"}, envs={"GREETING": "hello"}) as made:
        yield made


def until(holds: Callable[[], bool]) -> None:
    """Ask again until something holds, which another process has to do."""
    deadline = time.monotonic() + _DEADLINE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Sandboxes


def test_a_sandbox_is_made_listed_connected_and_killed(e2b: E2bServer) -> None:
    made = Sandbox.create(timeout=60, metadata={"kind": "listed"})
    assert made.is_running()
    (listed,) = Sandbox.list(query=SandboxQuery(metadata={"kind": "listed"})).next_items()
    assert listed.sandbox_id == made.sandbox_id
    again = Sandbox.connect(made.sandbox_id)
    assert again.run_code("1 + 1").text == "2"
    assert made.kill()
    assert not made.is_running()
    assert not made.kill()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(made.sandbox_id)


def test_a_sandbox_ends_at_its_timeout(e2b: E2bServer) -> None:
    made = Sandbox.create(timeout=60)
    made.set_timeout(120)
    assert (made.get_info().end_at - made.get_info().started_at).total_seconds() > 100
    made.set_timeout(0)
    until(lambda: not made.is_running())


def test_a_paused_sandbox_keeps_its_state_and_answers_nothing(e2b: E2bServer) -> None:
    made = Sandbox.create(timeout=60)
    made.run_code("kept = 5")
    made.pause()
    assert made.get_info().state.value == "paused"
    with pytest.raises((SandboxException, TimeoutException)):
        made.run_code("kept")
    resumed = Sandbox.connect(made.sandbox_id)
    assert resumed.run_code("kept").text == "5"
    resumed.kill()


def test_metrics_are_told(sandbox: Sandbox) -> None:
    (metric,) = sandbox.get_metrics()
    assert metric.mem_used > 0
    assert metric.mem_total == 1024**3


def test_a_wrong_key_is_refused(e2b: E2bServer) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "f" * 40)


def test_hosts_that_the_policy_does_not_allow_are_refused(e2b: E2bServer) -> None:
    network = {"allow_out": ["example.org"], "deny_out": ["0.0.0.0/0"]}
    with pytest.raises(SandboxException, match=r"does not allow 'example.org'"):
        Sandbox.create(network=network)  # type: ignore[arg-type]


def test_a_connection_only_extends_the_life_of_a_sandbox(e2b: E2bServer, sandbox: Sandbox) -> None:
    before = sandbox.get_info().end_at
    assert Sandbox.connect(sandbox.sandbox_id, timeout=10).get_info().end_at == before
    assert Sandbox.connect(sandbox.sandbox_id, timeout=900).get_info().end_at > before


def test_lists_are_filtered_by_template(e2b: E2bServer, sandbox: Sandbox) -> None:
    with Sandbox.create("another") as made:
        found = Sandbox.list(query=SandboxQuery(template="another")).next_items()
        assert [each.sandbox_id for each in found] == [made.sandbox_id]


def test_metrics_are_of_the_range_that_a_client_names(sandbox: Sandbox) -> None:
    now = datetime.now(UTC)
    hours = [timedelta(hours=each) for each in (1, 2)]
    assert sandbox.get_metrics(start=now - hours[1], end=now - hours[0]) == []
    assert sandbox.get_metrics(start=now - hours[0], end=now + hours[0])


def test_a_snapshot_and_a_fork_have_the_files_of_their_sandbox(
    e2b: E2bServer, sandbox: Sandbox
) -> None:
    sandbox.files.write("kept/a.txt", "before")
    snapshot = sandbox.create_snapshot()
    sandbox.files.write("kept/a.txt", "after")
    assert snapshot.snapshot_id in [
        each.snapshot_id for each in sandbox.list_snapshots().next_items()
    ]
    with Sandbox.create(snapshot.snapshot_id) as made:
        assert made.files.read("kept/a.txt") == "before"
    (fork,) = sandbox.fork()
    assert isinstance(fork, Sandbox)
    with fork:
        fork.files.write("kept/b.txt", "of the fork")
        assert fork.files.read("kept/a.txt") == "after"
        assert fork.commands.run("echo $GREETING").stdout == "hello\n"
    assert not sandbox.files.exists("kept/b.txt")
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_a_terminal_is_written_to_resized_and_read_again(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(size=PtySize(rows=24, cols=80), envs={"GIVEN": "given"})
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=132))
    terminal.disconnect()
    again = sandbox.pty.connect(terminal.pid)
    sandbox.pty.send_stdin(terminal.pid, b"echo $GIVEN; stty size; exit 3\n")
    seen: list[bytes] = []
    with pytest.raises(CommandExitException) as failed:
        again.wait(on_pty=seen.append)
    assert failed.value.exit_code == 3
    assert b"given\r\n30 132" in b"".join(seen)
    assert not sandbox.pty.kill(terminal.pid)


def test_a_request_that_a_kill_cuts_off_says_so(e2b: E2bServer) -> None:
    made = Sandbox.create()
    command = made.commands.run("sleep 612", background=True)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(
            made.run_code,
            "print('begun')\nimport time; time.sleep(612)",
            on_stdout=lambda _: made.kill(),
        )
        with pytest.raises(TimeoutException, match="killed"):
            running.result(_DEADLINE)
    with pytest.raises(TimeoutException, match="killed"):
        command.wait()


# Code


def test_code_keeps_its_variables_and_has_results(sandbox: Sandbox) -> None:
    out, err = [], []
    done = sandbox.run_code(
        "import sys\nrows = [1, (2, 3)]\nprint('one')\nprint('two', file=sys.stderr)\nrows",
        on_stdout=lambda line: out.append(line.line), on_stderr=lambda line: err.append(line.line),
    )  # fmt: skip
    assert (done.text, done.error) == ("[1, (2, 3)]", None)
    assert ("".join(out), "".join(err)) == ("one\n", "two\n")
    assert sandbox.run_code("rows[0]").text == "1"


def test_an_error_has_name_value_and_traceback(sandbox: Sandbox) -> None:
    error = sandbox.run_code("def broken():\n    return 1/0\nbroken()").error
    assert error is not None
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "in broken" in error.traceback


def test_values_show_themselves(sandbox: Sandbox) -> None:
    code = """
class Shown:
    def _repr_html_(self): return "<b>bold</b>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_json_(self): return {"a": 1}
display(Shown())
Shown()
"""
    shown, main = sandbox.run_code(code).results
    assert (shown.is_main_result, main.is_main_result) == (False, True)
    assert (main.html, main.png, main.json) == ("<b>bold</b>", "iVBORw==", {"a": 1})


def test_contexts_have_variables_of_their_own(sandbox: Sandbox) -> None:
    sandbox.run_code("where = 'default'")
    other = sandbox.create_code_context(cwd="/tmp")
    assert sandbox.run_code("import os; os.getcwd()", context=other).text == "/tmp"
    error = sandbox.run_code("where", context=other).error
    assert error is not None
    assert error.name == "NameError"
    sandbox.run_code("where = 'other'", context=other)
    assert sandbox.run_code("where").text == "default"
    assert sandbox.run_code("where", context=other).text == "other"
    assert other.id in [each.id for each in sandbox.list_code_contexts()]
    sandbox.restart_code_context(other)
    error = sandbox.run_code("where", context=other).error
    assert error is not None
    sandbox.remove_code_context(other)
    with pytest.raises(NotFoundException):
        sandbox.run_code("1", context=other)


def test_variables_of_the_environment(sandbox: Sandbox) -> None:
    assert sandbox.run_code("import os; os.environ['GREETING']").text == "hello"
    done = sandbox.run_code("os.environ['ONCE']", envs={"ONCE": "now"})
    assert done.text == "now"
    assert sandbox.run_code("os.environ.get('ONCE')").text is None
    assert sandbox.commands.run("echo $GREETING").stdout == "hello\n"


def test_code_that_takes_too_long_is_interrupted_and_its_variables_stay(sandbox: Sandbox) -> None:
    sandbox.run_code("kept = 7")
    with pytest.raises(TimeoutException):
        sandbox.run_code("while True: pass", timeout=1)
    assert sandbox.run_code("kept").text == "7"


def test_other_languages_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="run Python"):
        sandbox.run_code("1", language="r")


# Commands


def test_a_command_has_both_streams_and_an_exit_code(sandbox: Sandbox) -> None:
    out: list[str] = []
    done = sandbox.commands.run("echo out; echo err >&2", on_stdout=out.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0)
    assert out == ["out\n"]
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3


def test_a_large_output_is_complete(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert len(done.stdout) == 3_000_000


def test_a_background_command_is_listed_written_to_and_killed(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    assert handle.pid in [each.pid for each in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "typed\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "typed\n"
    sleeper = sandbox.commands.run("sleep 600", background=True)
    assert sandbox.commands.kill(sleeper.pid)
    with pytest.raises(CommandExitException):
        sleeper.wait()
    assert not sandbox.commands.kill(sleeper.pid)


def test_a_command_goes_on_while_code_runs(sandbox: Sandbox) -> None:
    server = sandbox.commands.run("python3 -m http.server 8099", background=True)
    code = """
import urllib.request
for _ in range(100):
    try:
        status = urllib.request.urlopen("http://127.0.0.1:8099/").status
        break
    except OSError:
        import time; time.sleep(0.05)
status
"""
    assert sandbox.run_code(code).text == "200"
    assert sandbox.commands.run("echo meanwhile").stdout == "meanwhile\n"
    server.kill()


def test_a_command_that_takes_too_long_is_killed(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 612", timeout=1)
    until(lambda: "sleep 612" not in str([each.args for each in sandbox.commands.list()]))


# Files


def test_files_are_written_read_listed_renamed_and_removed(sandbox: Sandbox) -> None:
    files = sandbox.files
    assert files.write("deep/a.txt", "text").path == "/home/user/deep/a.txt"
    assert files.write("deep/b.bin", b"\x00\xff").name == "b.bin"
    assert (files.read("deep/a.txt"), bytes(files.read("deep/b.bin", format="bytes"))) == (
        "text",
        b"\x00\xff",
    )
    assert b"".join(files.read("deep/a.txt", format="stream")) == b"text"
    assert [each.name for each in files.list("deep")] == ["a.txt", "b.bin"]
    info = files.rename("deep/a.txt", "deep/c.txt")
    assert (info.path, info.size) == ("/home/user/deep/c.txt", 4)
    assert (files.exists("deep/a.txt"), files.exists("deep/c.txt")) == (False, True)
    files.remove("deep")
    assert not files.exists("deep")
    with pytest.raises(NotFoundException):
        files.read("deep/a.txt")


def test_several_files_at_once_and_directories(sandbox: Sandbox) -> None:
    written = sandbox.files.write_files(
        [{"path": "one.txt", "data": "1"}, {"path": 'odd "name" %41.txt', "data": "2"}]
    )
    assert [each.name for each in written] == ["one.txt", 'odd "name" %41.txt']
    assert sandbox.files.make_dir("directory")
    assert not sandbox.files.make_dir("directory")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("directory")


def test_files_are_those_of_programs(sandbox: Sandbox) -> None:
    sandbox.files.write("data.csv", "a,b\n1,2\n")
    assert sandbox.run_code("open('data.csv').read()").text == "a,b\\n1,2\\n"
    assert sandbox.commands.run("wc -l < data.csv").stdout.strip() == "2"


def test_files_outside_the_home_directory_cannot_be_written(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException):
        sandbox.files.write("/home/other/x.txt", "x")
    with pytest.raises(NotFoundException):
        sandbox.files.read("/etc/shadow")


def test_a_directory_is_watched(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("watched")
    handle = sandbox.files.watch_dir("watched")
    sandbox.files.write("watched/new.txt", "x")
    seen: list[tuple[str, str]] = []

    def has_event() -> bool:
        seen.extend((each.name, each.type.value) for each in handle.get_new_events())
        return ("new.txt", "create") in seen

    until(has_event)
    handle.stop()


def test_events_are_there_right_behind_a_write(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("seen")
    handle = sandbox.files.watch_dir("seen", include_entry=True)
    sandbox.files.write("seen/a.txt", "x")
    events = handle.get_new_events()
    assert [each.type.value for each in events] == ["create", "chmod", "write"]
    assert events[0].entry is not None
    assert events[0].entry.path == "/home/user/seen/a.txt"
    sandbox.files.rename("seen/a.txt", "seen/b.txt")
    assert [(each.name, each.type.value) for each in handle.get_new_events()] == [
        ("a.txt", "rename"),
        ("b.txt", "create"),
    ]
    handle.stop()


def test_files_have_metadata(sandbox: Sandbox) -> None:
    sandbox.files.write("with.txt", "1", metadata={"author": "anna"})
    assert sandbox.files.get_info("with.txt").metadata == {"author": "anna"}
    sandbox.files.write("with.txt", "2")
    assert sandbox.files.get_info("with.txt").metadata is None


def test_a_link_names_the_file_that_it_leads_to(sandbox: Sandbox) -> None:
    sandbox.commands.run("touch target.txt; ln -sf target.txt link.txt")
    assert sandbox.files.get_info("link.txt").symlink_target == "/home/user/target.txt"


def test_a_signed_url_gives_access_to_one_file(e2b: E2bServer, sandbox: Sandbox) -> None:
    sandbox.files.write("shared.txt", "shared")
    url = sandbox.download_url("shared.txt", use_signature_expiration=60)
    with urllib.request.urlopen(url) as answer:  # it names no sandbox: the signature does
        assert answer.read() == b"shared"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url.replace("shared.txt", "data.csv"))
    with pytest.raises(urllib.error.HTTPError, match="401") as expired:
        urllib.request.urlopen(sandbox.download_url("shared.txt", use_signature_expiration=-60))
    assert json.loads(expired.value.read())["message"] == "signature is already expired"


# The form for asyncio


def test_the_asynchronous_sdk_works_too(e2b: E2bServer) -> None:
    async def use() -> tuple[str | None, str, list[str]]:
        made = await AsyncSandbox.create()
        events: list[str] = []
        await made.files.make_dir("watched")
        watch = await made.files.watch_dir(
            "watched", on_event=lambda event: events.append(event.name)
        )
        code, command, _ = await asyncio.gather(
            made.run_code("6 * 7"),
            made.commands.run("echo command"),
            made.files.write("watched/x", "1"),
        )
        async with asyncio.timeout(_DEADLINE):
            while not events:
                await asyncio.sleep(0.05)
        await watch.stop()
        await made.kill()
        return code.text, command.stdout, events

    text, stdout, events = asyncio.run(use())
    assert (text, stdout) == ("42", "command\n")
    assert set(events) == {"x"}
