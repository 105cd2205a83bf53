"""ProgressLine of a command on stderr: at a terminal only, and erased at the end."""

import io
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from cellwright import Runs, Sandbox, ToolFactory, ToolRegistry
from cellwright.harness.cli.keeping import servers
from cellwright.harness.cli.main import main
from cellwright.harness.cli.running import sandbox_options as sandbox
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.text import terminal_text
from cellwright.harness.text.terminal_text import ProgressLine
from cellwright.harness.tools.catalogue import Offer
from cellwright.harness.tools.tool import Tool
from tests.conftest import OPTIONAL, ROOT, policy_named

OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]
TRAIL = '{"seq": 1}\n'
BOUND_SECONDS = 60  # for a server to start, or to end


class Screen:
    """A terminal of 60 columns."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(self._ours, (24, 60))
        self.stream: TextIO = open(theirs, "w", buffering=1)  # noqa: SIM115 - closed below
        self.seen = ""

    def read_until(self, text: str, seconds: float = 5) -> None:
        while text not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], seconds)
            assert ready, f"{text!r} not in {self.seen!r}"
            self.seen += os.read(self._ours, 65536).decode()

    def read_rest(self) -> None:
        while select.select([self._ours], [], [], 0)[0]:
            self.seen += os.read(self._ours, 65536).decode()

    def shown(self) -> str:
        """Return the last line as a person sees it."""
        return self.seen.rpartition("\x1b[K")[2]

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """A terminal that is told at once."""
    made = Screen()
    for module in (
        terminal_text,
        sandbox,
    ):  # pytest replaces sys.stderr itself when the test begins
        monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=sys.stdout, stderr=made.stream))
    monkeypatch.setattr(terminal_text, "_PATIENCE_SECONDS", 0)
    monkeypatch.setenv("TERM", "xterm")
    yield made
    made.close()


def test_work_is_named_while_it_lasts_and_erased_after(screen: Screen) -> None:
    with ProgressLine("building 3 packages") as shown:
        screen.read_until("building 3 packages (0 s)")
        shown.say("checking \x1b[31mthem")
        screen.read_until("checking \\x1b[31mthem")
    screen.read_rest()
    assert screen.shown() == ""


def test_a_line_is_never_wider_than_the_terminal(screen: Screen) -> None:
    with ProgressLine("x" * 200):
        screen.read_until("x" * 40)
    assert all(len(line) < 60 for line in screen.seen.split("\r\x1b[K"))


def test_what_is_printed_in_between_stands_in_a_line_of_its_own(screen: Screen) -> None:
    with ProgressLine("working") as shown:
        screen.read_until("working")
        with shown.hidden():
            screen.stream.write("step 1\n")
        screen.read_until("\r\x1b[Kstep 1\r\n")
        screen.read_until("step 1\r\n\r\x1b[K")  # it goes on


def test_it_is_erased_after_a_failure_too(screen: Screen) -> None:
    def work() -> None:
        with ProgressLine("working"):
            screen.read_until("working")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    screen.read_rest()
    assert screen.shown() == ""


def test_a_terminal_that_cannot_erase_gets_one_line(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with ProgressLine("working"):
        screen.read_until("\n")
    screen.read_rest()
    assert screen.seen == "cellwright: working ...\r\n"


def test_work_of_less_than_a_second_is_not_mentioned(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_text, "_PATIENCE_SECONDS", 60)
    with ProgressLine("working"):
        pass
    screen.read_rest()
    assert screen.seen == ""


def test_a_pipe_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_text, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with ProgressLine("working") as shown, shown.hidden():
        shown.say("more")
    assert stream.getvalue() == ""


COMMANDS = {
    "doctor": (["doctor", *OPTIONS], "testing "),
    "run": (["run", *OPTIONS, "-c", "1"], "starting cells"),
    "explain": (["explain", *OPTIONS], "starting a launcher"),
    "learn": (["learn", *OPTIONS, "{place}/program.py"], "running the program"),
    "env lock": (["env", "lock", "--directory", "{place}/sets", "--no-index", "--find-links", "{place}", "nothing-of-this-name"], "resolving packages"),
    "env build": (["env", "build", "--directory", "{place}/sets", "--no-index", "--find-links", "{place}", "nothing-of-this-name"], "resolving packages"),
    "audit verify": (["audit", "verify", "{place}/trail"], "verifying the trail"),
    "privacy scan": (["privacy", "scan", "{place}/program.py"], "searching the files"),
    "tools create": (["tools", "create", "--registry", "{place}/tools.db", "{place}/tool.py"], "making and testing the tool"),
    "tools import": (["tools", "import", "--registry", "{place}/tools.db", "{place}/none"], "making and testing the tool"),
    "tools call": (["tools", "call", "--registry", "{place}/kept.db", "kept", '{"n": 1}'], "calling the tool"),
    "tools test": (["tools", "test", "--registry", "{place}/kept.db", "kept", '{"n": 1}'], "calling the tool"),
    "servers call": (["servers", "call", "--servers", "{place}/servers.json", "none.name"], "calling the tool"),
    "servers pin": (["servers", "pin", "--servers", "{place}/servers.json", "none"], "asking the servers"),
    "servers diff": (["servers", "diff", "--servers", "{place}/servers.json"], "asking the servers"),
    "runs resume": (["runs", "resume", "{place}/runs.db", "{run}", *OPTIONS], "resuming the run"),
    "agent run": (["agent", "run", "--demo", *OPTIONS], "working on the task"),
    "jupyter install": (["jupyter", "install", "--prefix", "{place}", *OPTIONS], "installing the kernel"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_may_take_long_say_what_they_do(
    command: str, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they begin with; how it is drawn is tested above, and may be too late for work that is short."""
    begun: list[str] = []

    class Recording(ProgressLine):
        def __init__(self, what: str) -> None:
            begun.append(what)
            super().__init__(what)

    for module in (
        terminal_text,
        *(each for name, each in sys.modules.items() if ".harness.cli." in name),
    ):
        if hasattr(module, "ProgressLine"):
            monkeypatch.setattr(module, "ProgressLine", Recording)
    (tmp_path / "program.py").write_text("print(1)")
    (tmp_path / "tool.py").write_text(
        'def twice(n: int) -> int:\n    """Twice n."""\n    return 2 * n\n'
    )
    (tmp_path / "trail").write_text(TRAIL)
    (tmp_path / "servers.json").write_text('{"mcpServers": {}}')
    with ToolRegistry(tmp_path / "kept.db") as registry, ToolFactory(registry=registry) as factory:
        factory.create_tool("kept", "d", "def kept(n: int) -> int:\n    return n", tests=[])
    arguments, said = COMMANDS[command]
    places = {"{place}": str(tmp_path), "{run}": a_run(tmp_path) if "{run}" in arguments else ""}
    for name, value in places.items():
        arguments = [each.replace(name, value) for each in arguments]
    main(arguments)
    assert any(each.startswith(said) for each in begun)
    screen.read_rest()
    assert screen.shown() == ""


def a_run(place: Path) -> str:
    """Return the id of a run that ended."""
    with Runs(place / "runs.db") as runs, Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        return runs.start(sandbox, "1").run


def test_a_question_at_the_terminal_stands_in_a_line_of_its_own(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is erased before a person is asked about a call, and not drawn before the answer."""
    asked: list[str] = []

    def ask(_: object) -> bool:
        screen.read_until("calling the tool")
        screen.read_rest()
        asked.append(screen.shown())
        return False

    class Servers:
        """One risky tool, in the place of a server."""

        def __enter__(self) -> Offer:
            return Offer(
                [Tool(ToolSpec(name="pay", owner=ToolOwner.SERVER, risky=True), lambda: "paid")]
            )

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(servers, "approver", lambda: ask)
    monkeypatch.setattr(servers, "opened", lambda _: Servers())
    assert main(["servers", "call", "--servers", str(tmp_path / "servers.json"), "pay"]) == 1
    assert asked == [""]


SERVERS = {
    "serve": (["serve", "--socket", "{place}/socket"], "starting cells", "serving strict at"),
    "web": (["web", "--http", "127.0.0.1:0"], "starting the server", "serving at http"),
    "mcp": (["mcp", "--http", "127.0.0.1:0"], "starting the server", "serving MCP at http"),
    "mcp over stdio": (["mcp"], "starting the server", "starting the server"),
}
IMPATIENT = """
import sys
from cellwright.harness.cli.main import main
from cellwright.harness.text import terminal_text
terminal_text._PATIENCE_SECONDS = 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.needs("userns")
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_says_that_it_starts_at_a_terminal_only(server: str, tmp_path: Path) -> None:
    words, begun, serving = SERVERS[server]
    words = [each.replace("{place}", str(tmp_path)) for each in words]
    command = [sys.executable, "-c", IMPATIENT, *words, *OPTIONS]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    screen = Screen()
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=screen.stream,
    ) as process:  # fmt: skip
        screen.read_until(begun, BOUND_SECONDS)
        screen.read_until(serving, BOUND_SECONDS)
        ended(process)
    screen.close()
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr
        said = b"" if server == "mcp over stdio" else process.stderr.readline()
        assert begun.encode() not in said + ended(process)


def ended(process: "subprocess.Popen[bytes]") -> bytes:
    """End a server, by the end of its input or by a signal; return what it said at the end."""
    if "--http" in process.args or "serve" in process.args:  # type: ignore[operator]
        process.terminate()
    _, said = process.communicate(timeout=BOUND_SECONDS)
    assert process.returncode == 0, said
    return said or b""


def test_a_pipe_gets_no_progress_of_a_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_text, "_PATIENCE_SECONDS", 0)
    main(["explain", *OPTIONS])
    assert capfd.readouterr().err == ""
