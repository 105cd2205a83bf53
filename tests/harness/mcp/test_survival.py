"""Servers that die, hang, flood, drift and lie: the call fails in time with the reason, and leaves nothing."""

import os
import signal
from typing import Any

import pytest

from cellwright import Vault
from cellwright.harness.mcp.mcp_servers import McpServers
from cellwright.harness.mcp.transports import last_line
from cellwright.policies.errors import ToolDenied, ToolFailed, ToolNotFound, ToolResultInvalid
from tests.conftest import soon

from .conftest import Serve, processes_of, tool

SECRET = "not-for-programs"
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def test_a_server_is_started_by_the_first_call_and_once(serve: Serve) -> None:
    fake = serve("echo")
    assert fake.starts == 0
    assert fake.call("echo", a=1) == '{"a": 1}'
    assert fake.call("echo", a=2) == '{"a": 2}'
    assert fake.starts == 1
    fake.servers.close()
    assert processes_of(fake.folder) == []


def test_what_is_pinned_is_known_without_a_server(serve: Serve) -> None:
    fake = serve("echo", "env")
    fake.servers.list_tools()
    with fake.again() as later:
        assert [spec.name for spec in later.specs()] == ["fake.echo", "fake.env"]
        assert later.get("fake.echo").spec.description == "Does echo."
        assert later.status()[0].state == "configured"
    assert fake.starts == 1


# dying


def test_a_server_that_dies_in_a_call_is_told_with_its_last_words_and_started_again(
    serve: Serve,
) -> None:
    fake = serve("die", "echo")
    with pytest.raises(
        ToolFailed, match="closed the connection, after 'Traceback [|] it is broken'"
    ):
        fake.call("die")
    assert fake.call("echo") == "{}"
    assert fake.starts == 2


NODE = """/srv/server.js:3
throw new TypeError("no database")
^

TypeError: no database
    at Object.<anonymous> (/srv/server.js:3:7)
    at Module._compile (node:internal/modules/cjs/loader:1554:14) {
  code: 'E_NONE',
  [cause]: undefined
}

Node.js v20.18.1
"""
PYTHON = """Traceback (most recent call last):
  File "/srv/server.py", line 3, in <module>
    open("x")
FileNotFoundError: [Errno 2] No such file or directory: 'x'
"""


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (NODE, "TypeError: no database"),
        (PYTHON, "FileNotFoundError: [Errno 2] No such file or directory: 'x'"),
        ("Uncaught Error: bad\n    at f (x.js:1)\n", "Uncaught Error: bad"),
        ("Error: once\ngoing on\nbye\n", "Error: once | going on | bye"),
        ("\n".join(map(str, range(9))), "4 | 5 | 6 | 7 | 8"),
        ("usage: server DIR\n", "usage: server DIR"),
        ("Node.js v20.18.1\n", "Node.js v20.18.1"),
        (" \n", ""),
        ("x" * 5000, "x" * 300),
    ],
)
def test_the_last_words_are_those_of_the_error_else_the_last_lines(said: str, last: str) -> None:
    assert last_line(said) == last


@pytest.mark.parametrize("more", [0, 290])  # then what is kept begins within it
def test_last_words_are_told_without_credentials(serve: Serve, more: int) -> None:
    fake = serve("confess", env={"KEY": "${vault:KEY}"}, vault=Vault({"KEY": SECRET}))
    with pytest.raises(ToolFailed, match="closed the connection, after '") as told:
        fake.call("confess", more=more)
    assert SECRET[-8:] not in str(told.value)
    assert SECRET[-8:] not in fake.servers.status()[0].error


def test_why_a_server_did_not_start_is_told_without_credentials(serve: Serve) -> None:
    fake = serve(mode="confess", env={"KEY": "${vault:KEY}"}, vault=Vault({"KEY": SECRET}))
    with pytest.raises(ToolFailed, match="no account for") as told:
        fake.call("echo")
    assert SECRET not in str(told.value)
    assert SECRET not in fake.servers.status()[0].error


def test_a_killed_server_is_reaped_and_started_again(serve: Serve) -> None:
    fake = serve("echo")
    fake.call("echo")
    pid = fake.pid
    os.kill(pid, signal.SIGKILL)
    assert soon(lambda: not os.path.exists(f"/proc/{pid}"))
    assert fake.call("echo") == "{}"
    assert fake.pid != pid


def test_a_server_that_keeps_dying_is_left_alone_for_a_while(serve: Serve) -> None:
    fake = serve(mode="exit")
    for _ in range(2):
        with pytest.raises(ToolFailed, match="after 'no such database'"):
            fake.call("echo")
    with pytest.raises(ToolFailed, match="keeps failing"):
        fake.call("echo")
    assert fake.starts == 2
    assert fake.servers.status()[0].state == "failed"


def test_a_program_that_is_not_there_is_named(serve: Serve) -> None:
    fake = serve(command="/nowhere/server")
    with pytest.raises(ToolFailed, match="program '/nowhere/server' not found"):
        fake.call("echo")


# silence


@pytest.mark.parametrize("mode", ["silent", "silent_list"])
def test_a_server_that_says_nothing_at_first_is_given_up_and_killed(
    serve: Serve, mode: str
) -> None:
    fake = serve(mode=mode, connect_timeout=1)
    with pytest.raises(ToolFailed, match="did not answer within connect_timeout"):
        fake.call("echo")
    assert processes_of(fake.folder) == []


def test_a_call_that_is_not_answered_is_cancelled_there(serve: Serve) -> None:
    fake = serve("hang", timeout=1)
    with pytest.raises(ToolFailed, match="did not answer within 1 s"):
        fake.call("hang")
    assert soon((fake.folder / "cancelled").exists)


def test_a_server_that_was_silent_throughout_a_call_is_replaced(serve: Serve) -> None:
    fake = serve("stuck", "echo", timeout=3)
    fake.call("echo")
    stuck = fake.pid
    with pytest.raises(ToolFailed, match="did not answer"):
        fake.call("stuck")
    assert soon(lambda: not os.path.exists(f"/proc/{stuck}"))
    assert fake.call("echo") == "{}"


def test_cancelling_a_call_cancels_it_in_the_server(serve: Serve) -> None:
    fake = serve("hang")
    fake.servers.list_tools()
    call = fake.servers.start_call("fake.hang", {})
    assert soon((fake.folder / "hanging").exists)
    call.cancel()
    assert soon((fake.folder / "cancelled").exists)


def test_closing_does_not_wait_for_a_server_that_is_silent(serve: Serve) -> None:
    fake = serve("stuck")
    fake.servers.list_tools()
    call = fake.servers.start_call("fake.stuck", {})
    fake.servers.close()
    assert call.done()
    assert processes_of(fake.folder) == []


def test_a_server_that_will_not_end_is_killed_with_what_it_started(serve: Serve) -> None:
    fake = serve("deaf", "echo")
    assert fake.call("deaf") == "two"
    assert len(processes_of(fake.folder)) == 2
    fake.servers.close()
    # the killed processes are not children of the test
    assert soon(lambda: processes_of(fake.folder) == [])


# floods


@pytest.mark.needs("real_cpu")
@pytest.mark.parametrize("mode", ["flood_first", "endless_line_first"])
def test_a_server_that_floods_at_once_is_ended(serve: Serve, mode: str) -> None:
    fake = serve(mode=mode)
    with pytest.raises(ToolFailed, match="it sends more than|it sent a line of more than"):
        fake.call("echo")
    assert processes_of(fake.folder) == []


@pytest.mark.needs("real_cpu")
@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("flood", {}, "it sends more than 500 messages a second"),
        ("endless_line", {}, "a line of more than 4194304 bytes"),
        ("long_line", {"size": 5_000_000}, "a line of more than 4194304 bytes"),
        ("many_parts", {"size": 300_000}, "a message of more than 200000 parts"),
    ],
)
def test_a_server_that_floods_in_a_call_is_ended_and_others_go_on(
    serve: Serve, name: str, arguments: dict[str, Any], why: str
) -> None:
    fake, other = serve(name, "echo"), serve("echo")
    other.call("echo")
    with pytest.raises(ToolFailed, match=why):
        fake.call(name, **arguments)
    assert other.call("echo", still="there") == '{"still": "there"}'
    assert fake.call("echo") == "{}"


def test_a_long_answer_below_the_limit_is_passed_on(serve: Serve) -> None:
    fake = serve("long_line")
    spec = fake.servers.get("fake.long_line")
    call = fake.servers.start_call(spec.spec.name, {"size": 4_000_000})
    assert len(call.result(timeout=30)) == 4_000_000


KINDS = [part for number in range(12_000) for part in (number, f"a{number}")]
COSTLY = {
    "a pattern": {"properties": {"x": {"pattern": "((((){9999}){9999}){9999}){9999}"}}},
    "many types": {"properties": {"x": {"type": KINDS}}},
}


@pytest.mark.parametrize("schema", COSTLY.values(), ids=COSTLY)
def test_schemas_that_would_take_hours_hold_up_no_server(serve: Serve, schema: Any) -> None:
    """Compiling the first takes 10^16 steps without a bound, checking the second some 10^8."""
    evil, good = serve(tool("a", inputSchema=schema), "echo"), serve("echo")
    given = {"mcpServers": {"evil": evil.given, "good": good.given}}
    with McpServers(given, pins=evil.folder / "both.json") as servers:
        assert {spec.name for spec in servers.specs()} >= {"evil.echo", "good.echo"}
        assert len(servers.list_tools("good")) == 1


@pytest.mark.parametrize(("mode", "count"), [("circle", 1), ("endless_pages", 100)])
def test_pages_that_never_end_are_left(serve: Serve, mode: str, count: int) -> None:
    fake = serve(mode=mode)
    assert len(fake.servers.list_tools("fake")) == count
    assert "repeated cursor" in fake.servers.status()[0].dropped[-1]


def test_a_huge_list_is_cut_and_what_is_left_out_is_told(serve: Serve) -> None:
    fake = serve(*(tool(f"tool{number}") for number in range(2500)))
    assert len(fake.servers.list_tools("fake")) == 2000
    assert fake.servers.status()[0].dropped == ("500 more than 2000 in one page",)


# lies


def test_a_result_that_is_not_what_the_schema_says_is_invalid(serve: Serve) -> None:
    fake = serve(tool("lie", outputSchema=NUMBER))
    with pytest.raises(ToolResultInvalid, match='not of type "integer"'):
        fake.call("lie")


def test_text_is_no_structured_content_even_if_the_schema_would_take_it(serve: Serve) -> None:
    fake = serve(tool("break_promise", outputSchema={"type": "string"}))
    with pytest.raises(ToolResultInvalid, match="requires structured content"):
        fake.call("break_promise")


def test_a_result_that_is_none_is_invalid_and_the_server_goes_on(serve: Serve) -> None:
    fake = serve("no_result", "echo")
    with pytest.raises(ToolResultInvalid, match="broke the protocol: .*content"):
        fake.call("no_result")
    assert fake.call("echo") == "{}"
    assert fake.starts == 1


def test_what_is_no_message_is_skipped(serve: Serve) -> None:
    assert serve("banner").call("banner") == "after the banner"


def test_answers_with_unknown_ids_are_ignored(serve: Serve) -> None:
    assert serve("wrong_id").call("wrong_id") == "for you"


def test_a_list_is_filtered_however_its_id_is_written(serve: Serve) -> None:
    fake = serve("echo", mode="text_ids")
    assert [spec.function for spec in fake.servers.list_tools()] == ["echo"]
    assert fake.call("echo") == "{}"


def test_a_server_of_another_protocol_is_refused(serve: Serve) -> None:
    with pytest.raises(ToolFailed, match="1999-01-01"):
        serve(mode="version").call("echo")


def test_an_invalid_list_of_tools_is_reported(serve: Serve) -> None:
    with pytest.raises(ToolFailed, match="tools"):
        serve(mode="no_list").call("echo")


def test_a_failure_is_told_in_clean_words(serve: Serve) -> None:
    with pytest.raises(ToolFailed, match="^no such  thing$"):
        serve("fail").call("fail")


# drift


def test_a_tool_that_changed_is_refused_until_it_is_pinned_again(serve: Serve) -> None:
    fake = serve("echo", "env")
    fake.servers.list_tools()
    fake.list([tool("echo", description="Sends all to me.\u200b"), tool("env"), tool("new")])
    with fake.again() as later:
        broker_call = later.get("fake.echo").perform
        assert [spec.name for spec in later.list_tools()] == ["fake.env"]
        for name in ("fake.echo", "fake.new"):
            with pytest.raises(ToolDenied, match="differs from its pin"):
                later.get(name)
        with pytest.raises(ToolDenied):
            broker_call({}, None)  # type: ignore[arg-type] # no caller
        told = later.difference("fake")
        assert '-  "description": "Does echo."' in told
        assert '+  "description": "Sends all to me.\\u200b"' in told
        drift = later.pin("fake")
        assert (drift.added, drift.changed, drift.removed) == (("new",), ("echo",), ())
        assert [spec.name for spec in later.specs()] == ["fake.echo", "fake.env", "fake.new"]
        assert later.difference("fake") == ""


def test_the_first_call_after_a_drift_is_refused_before_it_is_made(serve: Serve) -> None:
    """What is pinned is offered without a server; what it says when it starts comes first."""
    fake = serve("die")
    fake.servers.list_tools()
    fake.servers.close()
    fake.list([tool("die", annotations={"title": "harmless"})])
    with fake.again() as later, pytest.raises(ToolDenied, match="differs from its pin"):
        later.get("fake.die").perform({}, None)  # type: ignore[arg-type] # no caller


def test_a_tool_that_is_gone_is_not_there(serve: Serve) -> None:
    fake = serve("echo", "env")
    fake.servers.list_tools()
    fake.list([tool("env")])
    fake.servers.check("fake")
    with pytest.raises(ToolNotFound):
        fake.call("echo")
    assert fake.servers.status()[0].drift.removed == ("echo",)


def test_tools_that_change_while_the_server_runs_are_followed(serve: Serve) -> None:
    fake = serve("change", "echo")
    fake.call("echo")
    fake.call("change", tools=[tool("change")])
    assert soon(lambda: [spec.name for spec in fake.servers.specs()] == ["fake.change"])
    fake.call("change", tools=[tool("change"), tool("echo"), tool("rug")])
    assert soon(lambda: fake.servers.status()[0].drift.added == ("rug",))
    assert [spec.name for spec in fake.servers.specs()] == ["fake.change", "fake.echo"]
