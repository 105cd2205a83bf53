"""Tools that come with us: files of a workspace, tables, summaries, and a question on a terminal."""

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cellwright import Broker, Sandbox, ToolError, Vault, Workspaces
from cellwright.errors import ToolArgumentsInvalid, ToolDenied, ToolFailed
from cellwright.harness.making.builtin import api_query, file_tools, text_summarize
from cellwright.harness.tools.approval import ApprovalRequest, ask_terminal
from cellwright.harness.tools.broker import Offer
from cellwright.harness.user_data import from_keyring
from tests.conftest import policy_named

CSV = "city,country,people\nParis,FR,2100000\nLyon,FR,520000\nBonn,DE,330000\n"


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    files = file_tools(Workspaces(tmp_path), "agent-7")
    return Broker(Offer([*files, text_summarize(lambda text, length: text[:length]), api_query()]))


def test_a_program_reads_and_writes_files_that_outlive_it(broker: Broker, tmp_path: Path) -> None:
    code = (
        "from tools import file_write, file_read, csv_process\n"
        f"file_write('data/cities.csv', {CSV!r})\n"
        "[file_read('data/cities.csv')['content'][:4],"
        " csv_process('data/cities.csv', columns=['city'], where={'country': 'FR'})]"
    )
    with Sandbox(policy=policy_named("strict"), pool=0, tools=broker) as sandbox:
        assert sandbox.execute(code).value == [
            "city",
            {"rows": [{"city": "Paris"}, {"city": "Lyon"}], "more": False},
        ]
    assert Workspaces(tmp_path).read("agent-7", "data/cities.csv") == CSV.encode()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", "x" * 5000])
def test_a_path_that_leads_elsewhere_leads_nowhere(
    broker: Broker, tmp_path: Path, path: str
) -> None:
    with pytest.raises(ToolError):
        broker.call("file_write", {"filepath": path, "content": "x"})
    with pytest.raises(ToolError):
        broker.call("file_read", {"filepath": path})
    assert not list(tmp_path.parent.glob("x*"))


def test_a_file_that_is_not_text_and_an_unknown_column_are_errors(
    broker: Broker, tmp_path: Path
) -> None:
    Workspaces(tmp_path).write("agent-7", "blob", b"\xff\xfe")
    Workspaces(tmp_path).write("agent-7", "cities.csv", CSV.encode())
    with pytest.raises(ToolFailed, match="not valid UTF-8"):
        broker.call("file_read", {"filepath": "blob"})
    with pytest.raises(ToolArgumentsInvalid, match="unknown column: mayor; known are city"):
        broker.call("csv_process", {"filepath": "cities.csv", "columns": ["mayor"]})
    told = broker.call("csv_process", {"filepath": "cities.csv", "limit": 1})
    assert (len(told["rows"]), told["more"]) == (1, True)


def test_a_summary_is_the_models_and_a_network_is_refused(broker: Broker) -> None:
    assert broker.call("text_summarize", {"text": "long story", "length": 4}) == {"summary": "long"}
    with pytest.raises(ToolDenied, match="no rule allows it"):
        broker.call("api_query", {"url": "http://example.org"})


@pytest.mark.parametrize(("answer", "granted"), [("yes\n", True), ("y\n", False), ("", False)])
def test_only_yes_is_a_yes(
    answer: str, granted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert ask_terminal(ApprovalRequest("send", "", {"to": "\x1b[2J"}, "agent", "risky")) is granted
    said = capsys.readouterr().err
    assert "agent wants to call send: risky" in said
    assert "\x1b" not in said


def test_a_credential_comes_from_the_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = types.ModuleType("keyring")
    kept.get_password = lambda service, user: (
        "hush-hush" if (service, user) == ("api", "me") else None
    )
    monkeypatch.setitem(sys.modules, "keyring", kept)
    vault = Vault({"known": from_keyring("api", "me"), "unknown": from_keyring("api", "you")})
    assert vault.get("known") == "hush-hush"
    with pytest.raises(ToolFailed, match="cannot be read"):
        vault.get("unknown")
