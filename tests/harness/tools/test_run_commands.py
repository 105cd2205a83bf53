"""`cellwright runs` and `cellwright tools explain`."""

import json
from pathlib import Path
from typing import Any

import pytest

from cellwright import Broker, Runs, Sandbox
from cellwright.harness.cli import main as cli
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.spec import Tool, ToolOwner, ToolSpec
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
            assert 'send {"to":"ann"}' in listed
            (waiting,) = json.loads(told("pending", path, "--json")[1])
            assert told("approve", path, waiting["approval"])[0] == 0
            assert told("approve", path, waiting["approval"])[0] == 1
            runs.resume(sandbox, attempt.run)
            status, listed = told("pending", path)
            assert "\x1b" not in listed
            (waiting,) = json.loads(told("pending", path, "--json")[1])
            assert told("reject", path, waiting["approval"], "not him")[0] == 0
            assert "not him" in str(runs.resume(sandbox, attempt.run).result.error)
    assert told("expire", path) == (0, "0\n")


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
