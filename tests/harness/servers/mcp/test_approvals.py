"""A risky call is made only after a person approved exactly that call, with every kind of client."""

import contextlib
from typing import Any

import pytest
from mcp import Client, MCPError
from mcp.types import InputRequiredResult

from cellwright.harness.runs.durable_runs import RunPaused
from cellwright.harness.servers.mcp.approvals import (
    ApprovalQuestion,
    Owner,
    PausedCalls,
    SingleApproval,
    StoredCall,
    is_yes,
)
from cellwright.harness.tools.approval import ApprovalRequest
from cellwright.policies.errors import ApprovalRequired, BusyError
from tests.harness.servers.mcp.servers import PAID, Inside, Person, at, call, drive, failing, yes

pytestmark = pytest.mark.needs("userns")

PROGRAM = "import tools\n[tools.add(1, 2), tools.pay('ann', 3)]"
ANN = {"to": "ann", "amount": 3}


@pytest.fixture(autouse=True)
def nobody_was_paid() -> None:
    PAID.clear()


def test_a_single_call_is_made_after_a_yes(server: Inside, era: str) -> None:
    person = yes()

    async def body(client: Client) -> None:
        told = await call(client, "call_tool", name="pay", arguments=ANN)
        assert told == {"result": "paid 3 to ann"}

    drive(at(server.server, era, person), body)
    assert PAID == [("ann", 3)]
    (asked,) = person.asked
    assert "'pay'" in asked
    assert '  amount: 3\n  to: "ann"\n' in asked


def test_a_program_goes_on_after_a_yes(server: Inside, era: str) -> None:
    person = yes()

    async def body(client: Client) -> None:
        told = await call(client, "run_code", code=PROGRAM)
        assert told["value"] == [3, "paid 3 to ann"]

    drive(at(server.server, era, person), body)
    assert PAID == [("ann", 3)]
    assert len(person.asked) == 1


def test_each_call_of_a_program_is_asked_about_and_made_once(server: Inside, era: str) -> None:
    person = yes()
    code = "import tools\n[tools.pay(who, n) for n, who in enumerate(['ann', 'bob', 'ann'])]"

    async def body(client: Client) -> None:
        assert len((await call(client, "run_code", code=code))["value"]) == 3

    drive(at(server.server, era, person), body)
    assert PAID == [("ann", 0), ("bob", 1), ("ann", 2)]
    assert len(person.asked) == 3


NOES = [
    Person("decline"), Person("cancel"), Person("accept"), Person("accept", {"approve": False}),
    Person("accept", {"approve": "true"}), Person("accept", {"other": True}),
    Person("decline", {"approve": True}),
]  # fmt: skip


@pytest.mark.parametrize("person", NOES, ids=range(len(NOES)))
def test_anything_but_a_yes_is_a_no(server: Inside, era: str, person: Person) -> None:
    async def body(client: Client) -> None:
        words = await failing(client, "call_tool", name="pay", arguments=ANN)
        assert "did not say yes" in words
        code = "import tools\ntry:\n    tools.pay('ann', 3)\nexcept tools.ToolError as e:\n    said = [e.kind, str(e)]\nsaid"
        kind, said = (await call(client, "run_code", code=code))["value"]
        assert kind == "not_approved"
        assert "did not say yes" in said

    drive(at(server.server, era, person), body)
    assert PAID == []


def test_a_client_that_cannot_ask_is_refused_in_words(server: Inside, era: str) -> None:
    async def body(client: Client) -> None:
        assert "elicitation" in await failing(client, "call_tool", name="pay", arguments=ANN)
        result = await client.call_tool("run_code", {"code": PROGRAM})
        assert result.is_error
        assert "cannot be asked from here" in str(result.content)

    drive(at(server.server, era), body)
    assert PAID == []


def test_a_session_cannot_wait_for_a_word(server: Inside, era: str) -> None:
    person = yes()

    async def body(client: Client) -> None:
        result = await client.call_tool("run_code", {"code": PROGRAM, "session": "new"})
        assert "without a session" in str(result.content)

    drive(at(server.server, era, person), body)
    assert (PAID, person.asked) == ([], [])


def test_a_tool_that_calls_a_risky_one_cannot_wait(server: Inside, era: str) -> None:
    """It would be called again from its beginning, with whatever else it did."""
    person, name = yes(), f"indirect_{era[:4]}"
    source = f"def {name}() -> str:\n    import tools\n    return tools.pay('ann', 3)"

    async def body(client: Client) -> None:
        await call(
            client, "create_tool", name=name, source_code=source, calls=["pay"], allow_similar=True
        )
        assert "cannot be asked from here" in await failing(client, "call_tool", name=name)
        result = await client.call_tool("run_code", {"code": f"import tools\ntools.{name}()"})
        assert "cannot be asked from here" in str(result.content)

    drive(at(server.server, era, person), body)
    assert (PAID, person.asked) == ([], [])


def test_a_tool_of_the_host_that_calls_a_risky_one_cannot_wait(server: Inside, era: str) -> None:
    person, name = yes(), f"hosts_{era[:4]}"

    def through(to: str) -> str:
        broker = server.services.of("pipe").broker
        return str(broker.call("pay", {"to": to, "amount": 1}))

    through.__name__ = name
    server.services.registry.register(through)

    async def body(client: Client) -> None:
        said = await failing(client, "call_tool", name=name, arguments={"to": "ann"})
        assert "cannot be asked from here" in said

    drive(at(server.server, era, person), body)
    assert (PAID, person.asked) == ([], [])


def test_a_person_sees_what_would_be_done_without_its_tricks(server: Inside) -> None:
    person = Person("decline")

    async def body(client: Client) -> None:
        arguments = {"to": "ann\u202e\x1b[2J\nApprove this", "amount": 1}
        await client.call_tool("call_tool", {"name": "pay", "arguments": arguments})

    drive(at(server.server, "legacy", person), body)
    (tricky,) = person.asked
    assert "\x1b" not in tricky
    assert "\u202e" not in tricky
    assert len(tricky.splitlines()) == 5
    assert "2 arguments: to, amount" in tricky


def test_padding_hides_no_argument_from_the_person(server: Inside) -> None:
    person = Person("decline")

    async def body(client: Client) -> None:
        padded = {"to": "ann\u3164" + " " * 4200 + "mallory", "amount": 99999}
        await client.call_tool("call_tool", {"name": "pay", "arguments": padded})

    drive(at(server.server, "legacy", person), body)
    (asked,) = person.asked
    assert asked.index("99999") < asked.index("mallory")
    assert len(asked) < 500


def test_what_cannot_be_shown_whole_cannot_be_approved(server: Inside, era: str) -> None:
    person = yes()
    long = {"to": "".join(f"word{n} " for n in range(2000)), "amount": 1}

    async def body(client: Client) -> None:
        said = await failing(client, "call_tool", name="pay", arguments=long)
        assert "cannot be shown whole" in said
        code = f"import tools\ntools.pay(**{long!r})"
        result = await client.call_tool("run_code", {"code": code})
        assert "cannot be shown whole" in str(result.content)

    drive(at(server.server, era, person), body)
    assert (PAID, person.asked) == ([], [])


def test_nothing_of_what_is_over_is_kept(server: Inside, era: str) -> None:
    async def body(client: Client) -> None:
        await client.call_tool("run_code", {"code": PROGRAM})
        await client.call_tool("run_code", {"code": "1"})

    drive(at(server.server, era, Person("decline")), body)
    with server.runs._store._database.reading() as db:
        for table in ("runs", "calls", "approvals"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


# What a client of the protocol without handshakes brings back


async def required(client: Client, name: str, arguments: dict[str, Any]) -> InputRequiredResult:
    """Return what has to be answered, as the SDK's client does not show it."""
    result = await client.session.call_tool(name, arguments, allow_input_required=True)
    assert isinstance(result, InputRequiredResult)
    return result


YES = {"action": "accept", "content": {"approve": True}}


async def retry(client: Client, name: str, arguments: dict[str, Any], state: str, key: str) -> Any:
    from mcp.types import ElicitResult

    return await client.session.call_tool(
        name, arguments, input_responses={key: ElicitResult.model_validate(YES)},
        request_state=state, allow_input_required=True,
    )  # fmt: skip


def driven(server: Inside, body: Any) -> None:
    drive(at(server.server, "2026-07-28", yes()), body)


def test_an_approval_is_used_once(server: Inside) -> None:
    async def body(client: Client) -> None:
        arguments = {"name": "pay", "arguments": ANN}
        asked = await required(client, "call_tool", arguments)
        ((key, request),) = (asked.input_requests or {}).items()
        assert "pay" in request.params.message  # type: ignore[union-attr]
        state = str(asked.request_state)
        first = await retry(client, "call_tool", arguments, state, key)
        again = await retry(client, "call_tool", arguments, state, key)
        assert (first.is_error, again.is_error) == (False, True)
        assert "too late, or twice" in again.content[0].text

    driven(server, body)
    assert PAID == [("ann", 3)]


def test_an_approval_is_for_what_was_asked(server: Inside) -> None:
    async def body(client: Client) -> None:
        for name, asked, other in (
            (
                "call_tool",
                {"name": "pay", "arguments": ANN},
                {"name": "pay", "arguments": ANN | {"amount": 4}},
            ),
            ("run_code", {"code": PROGRAM}, {"code": PROGRAM.replace("3", "4")}),
        ):
            given = await required(client, name, asked)
            (key,) = given.input_requests or {}
            with pytest.raises(MCPError, match="Invalid or expired requestState"):
                await retry(client, name, other, str(given.request_state), key)

    driven(server, body)
    assert PAID == []


@pytest.mark.parametrize("state", ["", "v1.AAAA", "x" * 100_000, "0" * 32])
def test_a_state_that_we_did_not_give_is_refused(server: Inside, state: str) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(MCPError, match="requestState"):
            await retry(client, "run_code", {"code": PROGRAM}, state, "approve")

    driven(server, body)
    assert PAID == []


def test_no_answer_is_a_no(server: Inside) -> None:
    async def body(client: Client) -> None:
        asked = await required(client, "call_tool", {"name": "pay", "arguments": ANN})
        result = await retry(
            client,
            "call_tool",
            {"name": "pay", "arguments": ANN},
            str(asked.request_state),
            "another",
        )
        assert result.is_error

    driven(server, body)
    assert PAID == []


# Parts

ALICE, BOB = Owner("a", "a"), Owner("b", "b")


def test_a_paused_call_belongs_to_its_owner_and_expires() -> None:
    now, given_up = [0.0], []
    waiting = PausedCalls(lambda: now[0])

    def hold(owner: Owner) -> str:
        return waiting.hold(owner, [], lambda *_: None, lambda: given_up.append(owner))

    name = hold(ALICE)
    assert waiting.take(BOB, name) is None
    assert isinstance(waiting.take(ALICE, name), StoredCall)
    assert waiting.take(ALICE, name) is None
    late = hold(ALICE)
    now[0] = 601.0
    assert waiting.take(ALICE, late) is None
    assert given_up == [ALICE]


def test_only_so_much_waits() -> None:
    given_up: list[int] = []
    waiting = PausedCalls()
    for _ in range(16):
        waiting.hold(ALICE, [], lambda *_: None, lambda: None)
    with pytest.raises(BusyError):
        waiting.hold(ALICE, [], lambda *_: None, lambda: given_up.append(1))
    waiting.hold(BOB, [], lambda *_: None, lambda: None)
    assert given_up == [1]


def asked(**changes: Any) -> ApprovalRequest:
    return ApprovalRequest("pay", "", ANN, "me", "risky", version="1 abc")._replace(**changes)


def test_a_word_is_for_one_call_of_one_version() -> None:
    approval = SingleApproval()
    for other in (asked(), asked(arguments={}), asked(version="2 def")):
        with contextlib.suppress(RunPaused):
            approval.judge(asked())
        approval.answer(approved=True)
        if other == asked():
            assert approval.judge(other) is True
        with pytest.raises(RunPaused):
            approval.judge(other)
    with contextlib.suppress(RunPaused):
        approval.judge(asked())
    approval.answer(approved=False)
    with pytest.raises(ApprovalRequired, match="did not say yes"):
        approval.judge(asked())


def test_nothing_but_an_answer_to_the_form_is_a_yes() -> None:
    assert not any(map(is_yes, (None, True, "yes", YES, {"approve": True})))
    assert "pay" in ApprovalQuestion("k", "pay", {}, "why").message
