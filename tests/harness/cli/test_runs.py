"""`cellwright runs` and `cellwright tools explain`."""

import json
from pathlib import Path
from typing import Any

import pytest

from cellwright import Broker, Runs, Sandbox, ToolFactory
from cellwright.harness.cli import main as cli
from cellwright.harness.cli.keeping.marked_files import register_marked
from cellwright.harness.runs.run_store import NewCall
from cellwright.harness.sandbox.parameters import CallArguments
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.approval import ApprovalRequest
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Tool
from tests.conftest import policy_named

SEND = ToolSpec(name="send", owner=ToolOwner.DEVELOPER, risky=True, parameters={"type": "object"})


def test_a_person_decides_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "runs.db")

    def told(*arguments: str) -> Any:
        status = cli.main(["runs", *arguments])
        return status, capsys.readouterr().out

    with Runs(path) as runs:
        broker = Broker(Offer([Tool(SEND, lambda *_: "sent")]), approve=runs.ask)
        with Sandbox(policy=policy_named("strict"), pool=0, tools=broker) as sandbox:
            code = "import tools\n[tools.send(to=name) for name in ('ann', '\\x1b[2Jbob')]"
            attempt = runs.start(sandbox, code)
            status, listed = told("pending", path)
            assert status == 0
            assert '1 arguments: to\n  to: "ann"' in listed
            (waiting,) = json.loads(told("pending", path, "--json")[1])
            assert told("approve", path, waiting["approval"])[0] == 0
            assert told("approve", path, waiting["approval"])[0] == 1
            runs.resume(sandbox, attempt.run)
            status, listed = told("pending", path)
            assert "\x1b" not in listed
            (waiting,) = json.loads(told("pending", path, "--json")[1])
            assert told("reject", path, waiting["approval"], "not him")[0] == 0
            assert "not him" in str(runs.resume(sandbox, attempt.run).result.error)
    assert told("expire", path) == (0, "rejected 0 calls\n")


TOOLS = """
from cellwright import tool

@tool(risky=True)
def send(to: str) -> str:
    return f"sent to {to}"
"""


def test_a_run_is_shown_approved_resumed_and_forgotten_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tools = str(tmp_path / "runs.db"), tmp_path / "tools.py"
    tools.write_text(TOOLS)

    def told(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["runs", *arguments])
        return status, *capsys.readouterr()

    with Runs(path) as runs, ToolFactory(approve=runs.ask) as factory:
        register_marked(factory.registry, str(tools))
        with Sandbox(policy=policy_named("strict"), pool=0, tools=factory.broker) as sandbox:
            code = "import tools\nprint('hello')\ntools.send('ann')\ntools.send('bob')"
            run = runs.start(sandbox, code).run
    assert told("show", path)[:2] == (0, f"{run}  paused\n")
    status, shown, _ = told("show", path, run)
    assert status == 0
    assert "waiting  send: 1 arguments: to" in shown
    assert shown.splitlines()[-1] == "possible actions: approve, reject, resume, forget"
    (waiting,) = json.loads(told("pending", path, "--json")[1])
    status, said, _ = told("approve", path, waiting["approval"])
    assert (status, said.splitlines()[:2]) == (
        0, ["approved send, once: 1 arguments: to", '  to: "ann"'],
    )  # fmt: skip
    before = told("show", path, run, "--json")
    status, said, line = told("resume", path, run, "--policy", "strict")
    assert (status, said) == (2, "")
    assert f"run {run} cannot be resumed: it called send, which the sandbox does not offer" in line
    assert "--tools FILE" in line
    assert told("show", path, run, "--json") == before
    again = ("resume", path, run, "--tools", str(tools), "--policy", "strict")
    status, said, _ = told(*again)
    assert status == 1
    assert '"bob"' in said
    (waiting,) = json.loads(told("show", path, run, "--json")[1])["approvals"]
    assert "no other call waits" in told("approve", path, waiting["approval"])[1]
    status, said, line = told(*again)
    assert (status, said) == (0, "hello\n")
    assert "sent to bob" in line
    assert told("forget", path, run)[:2] == (0, "deleted 1 runs\n")
    status, _, said = told("resume", path, run)
    assert status != 0
    assert "no run" in said


def test_a_call_with_an_unknown_outcome_is_marked_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "runs.db")
    with Runs(path) as runs:
        run = runs._store.begin(CallArguments(code=""))
        new = NewCall(run, 1, "c", "<cell>:1", "d", "send", {"to": "ann"}, 0, repeatable=False)
        number = str(runs._store.begin_call(new, 0, ""))
    assert cli.main(["runs", "show", path, run]) == 0
    assert f"{number}  unknown  send" in capsys.readouterr().out
    assert cli.main(["runs", "mark", path, run, number, "made", "{bad"]) != 0
    assert cli.main(["runs", "mark", path, run, number, "made", '"sent"']) == 0
    assert cli.main(["runs", "show", path, run]) == 0
    assert f"{number}  done  send" in capsys.readouterr().out


def test_a_call_that_cannot_be_shown_whole_is_not_approved_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, long = str(tmp_path / "runs.db"), "".join(f"{n} " for n in range(3000))
    with Runs(path) as runs:
        run = runs._store.begin(CallArguments(code=""))
        runs._store.use(
            ApprovalRequest("send", "", {"body": long, "to": "ann"}, "", "", run), 2**40
        )
        (waiting,) = runs.pending()
    assert cli.main(["runs", "pending", path]) == 0
    assert "characters⟩" in capsys.readouterr().out
    assert cli.main(["runs", "approve", path, waiting.approval]) != 0
    assert "cannot be shown whole" in capsys.readouterr().err
    with Runs(path) as runs:
        assert len(runs.pending()) == 1


@pytest.mark.parametrize("what", ["pending", "show", "expire", "forget"])
def test_a_mistyped_file_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = tmp_path / "typo.db"
    assert cli.main(["runs", what, str(path)]) not in (0, None)
    assert "No such file" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    "what",
    [
        ["list"],
        ["search", "x"],
        ["show", "x"],
        ["call", "x"],
        ["remove", "x"],
        ["export", "x", "."],
    ],
    ids=lambda what: what[0],
)
def test_a_mistyped_registry_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: list[str]
) -> None:
    path = tmp_path / "typo.db"
    assert cli.main(["tools", *what, "--registry", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    assert not path.exists()


def test_what_rules_make_of_a_call_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, policy = tmp_path / "double.py", tmp_path / "policy.toml"
    source.write_text("def double(n: int) -> int:\n    return n * 2\n")
    rules = "[[tools.rules]]\ntool = 'double'\neffect = 'deny'\narguments = { n = '[0-9]' }\n"
    policy.write_text(f"extends = 'strict'\n{rules}[[tools.rules]]\ntool = '*'\neffect = 'allow'\n")
    where = ["--registry", str(tmp_path / "tools.db")]
    assert cli.main(["tools", "create", str(source), *where]) == 0
    capsys.readouterr()
    assert (
        cli.main(["tools", "explain", "double", '{"n": 7}', *where, "--policy", str(policy)]) == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "rule 1: deny double n=[0-9]: matches",
        "double: deny",
    ]
    assert (
        cli.main(["tools", "explain", "double", '{"n": 70}', *where, "--policy", str(policy)]) == 0
    )
    assert capsys.readouterr().out.splitlines()[-1] == "double: allow"
