"""A client of the server gets tokens on every way, and each client its own."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from cellwright import Privacy, Skills, tool
from cellwright.harness.skills.skill import make_skill
from cellwright.tools import SkillManifest
from tests.harness.servers.mcp.servers import PAID, at, call, drive, failing, inside, yes

pytestmark = pytest.mark.needs("userns")

MAIL = "ann@example.org"
GLUED = "'ann' + '@example.org'"


@tool
def look() -> dict:  # type: ignore[type-arg]
    """Look somebody up; questions to help@example.org."""
    return {"mail": MAIL, "card": 4111111111111111}


@tool
def complain(to: str) -> str:
    """Fail."""
    raise RuntimeError(f"no {to}: {MAIL}")


def everything(answer: Any) -> str:
    return str(answer.model_dump_json())


def test_every_answer_has_tokens(era: str) -> None:
    async def body(client: Client) -> None:
        session = (await call(client, "run_code", code="1", session="new"))["session"]
        files = (
            f"open('t.txt', 'w').write({GLUED})\nopen('z.txt', 'w').write('\\u200b' + {GLUED})\n"
            f"open('u.bin', 'wb').write(({GLUED}).encode('utf-16'))\nopen({GLUED}, 'w').write('x')"
        )
        answers = [
            await client.call_tool("search_tools", {"query": "look"}),
            await client.call_tool("describe_tools", {"names": ["look"]}),
            await client.call_tool("call_tool", {"name": "look", "arguments": {}}),
            await client.call_tool("call_tool", {"name": "complain", "arguments": {"to": MAIL}}),
            await client.call_tool("run_code", {"code": f"import tools\nprint(tools.look())\n{GLUED}"}),
            await client.call_tool("run_code", {"code": f"raise ValueError({GLUED})"}),
            await client.call_tool("run_code", {"code": files, "collect": ["*"]}),
            await client.call_tool("run_code", {"code": files, "session": session}),
            await client.call_tool("list_files", {"session": session}),
            *[
                await client.call_tool("download_file", {"session": session, "path": path})
                for path in ("t.txt", "z.txt", "u.bin")
            ],
            await client.call_tool("download_file", {"session": session, "path": f"no {MAIL}"}),
            await client.call_tool("create_tool", {
                "name": "made", "description": "x", "source_code":
                f"def made() -> str:\n    raise ValueError({GLUED})",
                "tests": [{"input": {}, "expected": "x"}],
            }),
        ]  # fmt: skip
        for number, answer in enumerate(answers):
            text = everything(answer)
            assert MAIL not in text, number
            assert "41111111" not in text, number
            assert "YW5uQGV4YW1wbGU" not in text, number  # base64 of a file
        for block in answers[4].content[:1]:
            assert json.loads(block.text) == answers[4].structured_content

    with inside(privacy=Privacy(), tools=[look, complain]) as server:
        drive(at(server.server, era), body)


def test_resources_and_texts_of_skills_have_tokens(era: str, tmp_path: Path) -> None:
    skills = Skills([], store=tmp_path)
    manifest = SkillManifest(name="ask", description=f"Asks {MAIL}.", body=f"Ask {MAIL}.")
    files = {"assets/a.txt": MAIL.encode(), "assets/a.bin": f"\xff {MAIL}".encode("latin-1")}
    kept = skills.store.add(make_skill(manifest, {**files}))
    skills.store.trust.trust(kept.skill.reference)

    async def body(client: Client) -> None:
        answers = [
            await client.list_resources(),
            await client.call_tool("load_skill", {"name": "ask"}),
            *[
                await client.read_resource(f"skill://ask/{path}")
                for path in ("SKILL.md", "assets/a.txt", "assets/a.bin")
            ],
        ]
        for number, answer in enumerate(answers):
            blobs = [each.blob for each in getattr(answer, "contents", ()) if hasattr(each, "blob")]
            text = everything(answer) + "".join(str(base64.b64decode(each)) for each in blobs)
            assert MAIL not in text, number
            assert "pii_email_" in text, number

    with inside("standard", privacy=Privacy(), skills=skills) as server:
        drive(at(server.server, era), body)


def test_the_person_sees_the_value_that_the_tool_will_get(era: str) -> None:
    PAID.clear()
    person = yes()

    async def body(client: Client) -> None:
        token = (await call(client, "call_tool", name="look", arguments={}))["result"]["mail"]
        answer = await call(client, "call_tool", name="pay", arguments={"to": token, "amount": 1})
        assert answer["result"] == f"paid 1 to {token}"
        code = f"import tools\ntools.pay({token!r}, 2)"
        assert (await call(client, "run_code", code=code))["value"] == f"paid 2 to {token}"
        assert "pii_email" in await failing(
            client, "call_tool", name="pay", arguments={"to": token, "amount": MAIL}
        )

    with inside(privacy=Privacy(restore=["pay:to"]), tools=[look]) as server:
        drive(at(server.server, era, person), body)
    assert PAID == [(MAIL, 1), (MAIL, 2)]
    assert all(f'to: "{MAIL}"' in asked for asked in person.asked)
    assert len(person.asked) == 2


def test_clients_have_tokens_of_their_own() -> None:
    with inside(privacy=Privacy()) as server:
        one, other = (server.services.of(name) for name in ("one", "other"))
        assert one.privacy is not None
        assert other.privacy is not None
        token = one.privacy.text(MAIL)
        assert other.privacy.reveal(token) == token
        told = one.sandbox.execute("mail", inputs={"mail": MAIL}).value
        assert one.privacy.reveal(told) == MAIL
        assert told != token  # a model wrote the input: it must not learn which value equals it
        assert other.privacy.reveal(told) == told
