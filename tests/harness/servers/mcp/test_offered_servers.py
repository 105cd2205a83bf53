"""Tools of other servers, offered by ours."""

import json
import sys
from pathlib import Path

import pytest
from mcp import Client

from tests.harness.mcp.conftest import FAKE, processes_of, tool
from tests.harness.servers.mcp.servers import Person, call, drive, failing, piped, yes

pytestmark = pytest.mark.needs("userns")
SECRET = "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zB9dF1hJ3lN5"


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """Name one fake server, with a tool that changes things and says so."""
    tools = [tool("echo"), tool("change", annotations={"destructiveHint": True})]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    fake = {
        "command": sys.executable, "args": ["-I", "-S", str(FAKE), str(tmp_path)],
        "sandboxed": False, "protocol": "legacy",
    }  # fmt: skip
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"fake": fake}}))
    return "--servers", f"{tmp_path}/servers.json", "--pins", f"{tmp_path}/pins.json"


def test_they_are_found_described_and_called_by_programs(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    async def body(client: Client) -> None:
        listed = {each.name: each for each in (await client.list_tools()).tools}
        hints = listed["run_code"].annotations
        assert hints is not None
        assert hints.open_world_hint
        found = await call(client, "search_tools", query="does echo")
        assert [each["name"] for each in found["tools"]] == ["fake.echo"]
        told = await call(client, "describe_tools", names=["fake.echo"])
        assert told["tools"][0]["description"] == "Does echo."
        ran = await call(client, "run_code", code="from tools import fake\nfake.echo(word='hi')")
        assert json.loads(ran["value"]) == {"word": "hi"}

    drive(piped(*options), body)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("person", "made"), [(yes(), True), (Person("decline"), False)])
def test_a_person_is_asked_before_one_changes_something(
    options: tuple[str, ...], person: Person, made: bool
) -> None:
    async def body(client: Client) -> None:
        given = {"name": "fake.change", "arguments": {"tools": [tool("echo")]}}
        if made:
            assert (await call(client, "call_tool", **given))["result"] == "changed"
        else:
            assert "did not say yes" in await failing(client, "call_tool", **given)
        assert len(person.asked) == 1
        assert "fake.change" in person.asked[0]

    drive(piped(*options, person=person), body)


@pytest.mark.parametrize("redacts", [False, True])
def test_secrets_are_taken_out_if_that_is_asked_for(
    options: tuple[str, ...], redacts: bool
) -> None:
    async def body(client: Client) -> None:
        told = await call(client, "call_tool", name="fake.echo", arguments={"said": SECRET})
        assert (SECRET in told["result"]) is not redacts

    drive(piped(*options, *["--redact"] * redacts), body)
