"""The behaviour that SWE-ReX asks of a runtime and of its server, and what a cell adds."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import requests
import uvicorn
from swerex import exceptions
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

from cellwright.harness.adapters.evaluation.swe_rex import CellDeployment, SweRexCellRuntime, app_of

TOKEN = "token"


class Served(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """SWE-ReX's server over a cell, which its own client asks."""
    runtime = SweRexCellRuntime(pool=0)
    assert runtime.cell.session
    server = Served(uvicorn.Config(app_of(runtime, TOKEN), port=0, log_level="critical"))
    started = threading.Event()
    startup = server.startup

    async def begin(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = begin  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(30)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(30)
    runtime.cell.close()


@pytest_asyncio.fixture(scope="module")
async def deployed() -> AsyncIterator[SweRexCellRuntime]:
    deployment = CellDeployment(pool=0)
    with pytest.raises(exceptions.DeploymentNotStartedError):
        _ = deployment.runtime
    await deployment.start()
    assert await deployment.is_alive()
    yield deployment.runtime
    await deployment.stop()
    await deployment.stop()


@pytest_asyncio.fixture(params=["deployment", "server"])
async def runtime(request: Any, deployed: SweRexCellRuntime, port: int) -> AsyncIterator[Any]:
    """A runtime with a shell, here and by HTTP."""
    found = deployed
    if request.param == "server":
        found = RemoteRuntime(host="http://127.0.0.1", port=port, auth_token=TOKEN)
    await found.create_session(CreateBashSessionRequest())
    yield found
    await found.close_session(CloseBashSessionRequest())


async def output(runtime: Any, command: str, **more: Any) -> tuple[str, int | None]:
    done = await runtime.run_in_session(BashAction(command=command, timeout=20, **more))
    return done.output, done.exit_code


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("echo 'a b'", "a b\n"),
        ("printf '\\n\\nx\\n\\n'", "\n\nx\n\n"),
        ("printf '  x'", "  x"),
        ("", ""),
        ("\n# nothing\n", ""),
        ("cat <<EOF\none\n\ntwo\nEOF\necho three", "one\n\ntwo\nthree\n"),
        ("for i in 1 2; do\n echo $i\ndone", "1\n2\n"),
        ("[[ $x == $x ]] && A=() && echo yes", "yes\n"),
        ("(sleep 600 &); echo now", "now\n"),
        ("stty size >/dev/null && test -t 1 && echo tty", "tty\n"),
        ("printf '\\033[31mred\\033[0m\\r\\n'", "red\n"),
        ("head -c 100000 /dev/zero | tr '\\0' x | wc -c", "100000\n"),
        ("cat /etc/shadow 2>&1 || true", "cat: /etc/shadow: No such file or directory\n"),
    ],
)
async def test_a_command_prints_what_it_prints(runtime: Any, command: str, printed: str) -> None:
    assert await output(runtime, command) == (printed, 0)


async def test_a_shell_keeps_its_state_and_others_have_their_own(runtime: Any) -> None:
    await output(runtime, "x=1; cd /tmp; f() { echo f$x; }")
    assert await output(runtime, "f; pwd") == ("f1\n/tmp\n", 0)
    await runtime.create_session(CreateBashSessionRequest(session="other"))
    assert await output(runtime, "echo -$x-", session="other") == ("--\n", 0)
    with pytest.raises(exceptions.SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest(session="other"))
    await runtime.close_session(CloseBashSessionRequest(session="other"))
    for call in (
        runtime.close_session(CloseBashSessionRequest(session="other")),
        runtime.run_in_session(BashAction(command="echo", session="other")),
    ):
        with pytest.raises(exceptions.SessionDoesNotExistError):
            await call


async def test_exit_codes_are_checked_as_asked(runtime: Any) -> None:
    assert await output(runtime, "false && true", check="silent") == ("", 1)
    assert await output(runtime, "false", check="ignore") == ("", None)
    with pytest.raises(exceptions.NonZeroExitCodeError, match="mine: Command 'false' failed"):
        await output(runtime, "false", error_msg="mine")


async def test_the_host_runs_nothing_of_an_invalid_command(runtime: Any, tmp_path: Path) -> None:
    """SWE-ReX's own check passes commands through a shell of the host, in a here document."""
    made = tmp_path / "made"
    with pytest.raises(exceptions.BashIncorrectSyntaxError) as caught:
        await output(runtime, f"(a\nSOUNIQUEEOF\ntouch {made}\n")
    assert "syntax error" in caught.value.extra_info["bash_stderr"]
    assert not made.exists()


async def test_a_command_that_takes_too_long_can_be_interrupted(runtime: Any) -> None:
    with pytest.raises(exceptions.CommandTimeoutError):
        await runtime.run_in_session(BashAction(command="sleep 600", timeout=0.3))
    await runtime.run_in_session(BashInterruptAction(timeout=5))
    assert await output(runtime, "echo a") == ("a\n", 0)
    stubborn = "trap '' INT; echo begun; while :; do sleep 1; done"
    with pytest.raises(exceptions.CommandTimeoutError):
        await runtime.run_in_session(BashAction(command=f"bash -c {stubborn!r}", timeout=0.5))
    await runtime.run_in_session(BashInterruptAction(n_retry=1))
    assert await output(runtime, "echo b") == ("b\n", 0)


async def test_an_interactive_program_is_talked_to(runtime: Any) -> None:
    talk = {"is_interactive_command": True, "expect": [">>> "], "timeout": 20}
    await runtime.run_in_session(BashAction(command="python3", **talk))
    done = await runtime.run_in_session(BashAction(command="print('a' * 3)", **talk))
    assert (done.output, done.expect_string) == ("aaa", ">>> ")
    await runtime.run_in_session(BashAction(command="quit()", is_interactive_quit=True, timeout=20))
    assert await output(runtime, "echo back") == ("back\n", 0)
    with pytest.raises(exceptions.CommandTimeoutError):
        await runtime.run_in_session(
            BashAction(command="cat", is_interactive_command=True, expect=["never"], timeout=0.3)
        )
    await runtime.run_in_session(BashInterruptAction(timeout=5))


async def test_a_program_cannot_end_its_command_itself(runtime: Any) -> None:
    """The text that ends a command is new for each, and is typed once the program has begun."""
    forged = "echo 0123456789abcdef:0:0123456789abcdef; exit_code=7; (exit 7)"
    said, code = await output(runtime, forged, check="silent")
    assert code == 7
    assert said.strip() in ("", "0123456789abcdef:0:0123456789abcdef")


async def test_commands_without_a_shell_of_ones_own(runtime: Any) -> None:
    async def execute(command: Any, **more: Any) -> tuple[str, str, int]:
        done = await runtime.execute(Command(command=command, timeout=20, **more))
        return done.stdout, done.stderr, done.exit_code

    assert await execute(["echo", "a b"]) == ("a b\n", "", 0)
    assert await execute("echo $X; pwd >&2", shell=True, env={"X": "1"}, cwd="/tmp") == (
        "1\n", "/tmp\n", 0,
    )  # fmt: skip
    assert await execute("", shell=True, check=True) == ("", "", 0)
    both = "echo out; echo err >&2; exit 3"
    assert await execute(both, shell=True, merge_output_streams=True) == ("out\nerr\n", "", 3)
    with pytest.raises(exceptions.NonZeroExitCodeError):
        await execute(both, shell=True, check=True)
    with pytest.raises(exceptions.CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "600"], timeout=0.2))


async def test_files_are_those_of_the_cell(runtime: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/new/file"
    await runtime.write_file(WriteFileRequest(path=path, content="ä" * 500_000))
    assert (await runtime.read_file(ReadFileRequest(path=path))).content == "ä" * 500_000
    assert not Path(path).exists()
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/etc/shadow"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a").write_text("1")
    await runtime.upload(UploadRequest(source_path=str(folder), target_path="/tmp/to"))
    await runtime.upload(UploadRequest(source_path=str(folder / "a"), target_path="/tmp/other/a"))
    for found in ("/tmp/to/a", "/tmp/other/a"):
        assert (await runtime.read_file(ReadFileRequest(path=found))).content == "1"
        assert not Path(found).exists()


async def test_two_shells_run_at_once(runtime: Any) -> None:
    await runtime.create_session(CreateBashSessionRequest(session="other"))
    waits = output(runtime, "until [ -e /tmp/go ]; do sleep 0.01; done; rm /tmp/go; echo went")
    made = output(runtime, "touch /tmp/go; echo made", session="other")
    assert await asyncio.gather(waits, made) == [("went\n", 0), ("made\n", 0)]
    await runtime.close_session(CloseBashSessionRequest(session="other"))


async def test_a_shell_that_has_ended_says_so(deployed: SweRexCellRuntime) -> None:
    await deployed.create_session(CreateBashSessionRequest(session="ends"))
    with pytest.raises(exceptions.NoExitCodeError, match="the shell has ended"):
        await output(deployed, "exit 3", session="ends")
    await deployed.close_session(CloseBashSessionRequest(session="ends"))


def test_a_client_without_the_token_gets_nothing(port: int) -> None:
    for path in ("is_alive", "execute", "upload"):
        answer = requests.get(f"http://127.0.0.1:{port}/{path}", timeout=20)
        assert answer.status_code in (401, 403)
    headers = {"X-API-Key": "wrong"}
    answer = requests.get(f"http://127.0.0.1:{port}/is_alive", headers=headers, timeout=20)
    assert answer.status_code >= 400
