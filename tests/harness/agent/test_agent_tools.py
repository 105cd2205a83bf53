"""Tools that an agent brings: files and tables of a workspace, summaries, requests, and packages of
tools that it makes."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import (
    Broker,
    Caller,
    NetworkRule,
    Offer,
    Tool,
    ToolFactory,
    ToolRule,
    Tools,
    ToolSpec,
    Vault,
    Workspaces,
    tool_of,
)
from cellwright.agent import Agent, AgentLimits
from cellwright.harness.agent import task_loop
from cellwright.harness.agent.prompts import Message, ModelReply, summarise
from cellwright.harness.tools.http.http_exchange import HttpAnswer
from cellwright.harness.tools.http.targets import Target, target_of
from cellwright.policies.errors import ModelUnavailable, PolicyError, ToolArgumentsInvalid
from cellwright.policies.policy import Http, Packages
from cellwright.tools import HttpClient, HttpCredential, RedactSecrets, ToolOwner
from tests.conftest import policy_named
from tests.harness.agent.scripted import Script, ScriptedModel, answer, program
from tests.harness.packages.wheels import good_wheel, store_at

Make = Callable[..., Agent]
WITH_PACKAGE = (
    "```python\nimport thing\ndef answer() -> int:\n    return thing.answer\n```\n"
    "```tests\nassert answer() == 42\n```\n```requirements\n{}  # for the answer\n```"
)
WITHOUT = (
    "```python\ndef answer() -> int:\n    return 42\n```\n```tests\nassert answer() == 42\n```"
)
BUILD = program("build_tool('answer', 'returns the answer')['name']")
USE = answer("execute_tool('answer', {})")


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[Agent] = []

    def agent(script: Script, drafts: Script = (), **about: Any) -> Agent:
        given = {"policy": policy_named("strict")} | about
        opened.append(Agent(ScriptedModel(script, drafts), **given))
        return opened[-1]

    yield agent
    for each in opened:
        each.close()


@pytest.fixture
def packaged(tmp_path: Path) -> dict[str, Any]:
    """Arguments of an agent whose tools may have one package, from a folder of wheels."""
    (tmp_path / "wheels").mkdir()
    good_wheel(tmp_path / "wheels")
    good_wheel(tmp_path / "wheels", name="other")
    policy = replace(policy_named("strict"), packages=Packages(allow=("thing",)))
    store = store_at(tmp_path / "store", tmp_path / "wheels")
    return {"policy": policy, "package_store": store}


def test_files_and_tables_of_a_workspace_outlive_the_run(make: Make, tmp_path: Path) -> None:
    write = "execute_tool('file_write', {'filepath': 't.csv', 'content': 'a,b\\n1,2\\n3,4\\n'})"
    read = (
        "rows = execute_tool('csv_process', {'filepath': 't.csv', 'where': {'a': '3'}})['rows']\n"
        "final_answer([rows, execute_tool('file_read', {'filepath': 't.csv'})['content'][:3]])"
    )
    files = Workspaces(tmp_path / "workspaces")
    agent = make([program(write), program(read)], workspace="notes", workspaces=files)
    assert agent.run("t").answer == [[{"a": "3", "b": "4"}], "a,b"]
    assert files.read("notes", "t.csv").startswith(b"a,b")


def test_without_a_workspace_there_are_no_files(make: Make) -> None:
    code = "try:\n    execute_tool('file_read', {'filepath': 'x'})\nexcept Exception as e:\n    final_answer(e.kind)"
    assert make([program(code)]).run("t").answer == "not_found"


def test_a_summary_is_of_the_runs_model_and_counts_for_it() -> None:
    class Summariser(ScriptedModel):
        def ask(self, messages: Any, *given: Any, **more: Any) -> ModelReply:
            if "Summarise" in messages[0].text:
                return ModelReply(text="a tale of a whale", input_tokens=1000, output_tokens=7)
            return super().ask(messages, *given, **more)

    script = [answer("execute_tool('text_summarize', {'text': 'Call me Ishmael', 'length': 6})")]
    with Agent(Summariser(script), policy=policy_named("strict")) as agent:
        result = agent.run("t")
    assert result.answer == {"summary": "a tal…"}
    assert result.usage.input_tokens == 1100


class _Echo:
    """Summarises by the first words of the text; notes what it is asked."""

    name, context_tokens = "echo", 1000

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, messages: "tuple[Message, Message]", *_: Any, **__: Any) -> ModelReply:
        self.asked.append(messages[1].text)
        return ModelReply(text=messages[1].text[:5])


def test_a_text_that_is_longer_than_the_context_is_summarised_piece_by_piece() -> None:
    model = _Echo()
    text = "".join(f"{number:03} äöü€ 🐋\n" for number in range(300))
    assert summarise(model, text, 100) == "000 ä"
    assert len(model.asked) > 2
    assert max(len(each.encode()) for each in model.asked) <= 1200
    assert "".join(model.asked[:-1]) == text.strip()


def test_a_text_of_too_many_pieces_is_refused_before_the_model_is_asked() -> None:
    model = _Echo()
    with pytest.raises(ToolArgumentsInvalid, match="32 pieces"):
        summarise(model, "x" * 100_000, 100)
    assert model.asked == []
    assert summarise(model, "", 10) == ""


def test_requests_are_made_as_far_as_the_rules_allow(make: Make) -> None:
    client = HttpClient([NetworkRule(host="api.example.org", methods=["GET"])])
    code = (
        "try:\n    execute_tool('api_query', {'url': 'https://evil.example.org/'})\n"
        "except Exception as error:\n    final_answer(str(error))"
    )
    assert "evil.example.org" in str(make([program(code)], http=client).run("t").answer)


def test_the_policy_allows_requests_too(make: Make) -> None:
    """`cellwright agent run --policy FILE` has no other way to say it."""
    rules = Http(allow=(NetworkRule(host="api.example.org"),))
    code = (
        "try:\n    execute_tool('api_query', {'url': 'https://evil.example.org/'})\n"
        "except Exception as error:\n    final_answer(str(error))"
    )
    policy = replace(policy_named("strict"), http=rules)
    assert "no rule allows" in str(make([program(code)], policy=policy).run("t").answer)
    assert "there is no tool" in str(make([program(code)]).run("t").answer)


def test_a_drafted_tool_names_its_packages(make: Make, packaged: dict[str, Any]) -> None:
    agent = make([BUILD, USE], [WITH_PACKAGE.format("thing>=1")], **packaged)
    assert agent.run("t").answer == 42
    made = agent.factory.get_tool("answer")
    assert (made.requirements, made.provenance.packages) == (("thing>=1",), ("thing==1.0",))
    (drafting,) = (m for m, _ in agent.model.asked if "You write one tool" in m[0].text)  # type: ignore[attr-defined]
    assert "library and, where they help, thing," in drafting[0].text


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("other", "use thing, or the standard library"),
        ("thing==9", "thing==9"),
        ("-r x", "must be"),
    ],
)
def test_a_package_that_cannot_be_had_is_told_to_the_model(
    make: Make, packaged: dict[str, Any], wanted: str, why: str
) -> None:
    agent = make([BUILD, USE], [WITH_PACKAGE.format(wanted), WITHOUT], **packaged)
    assert agent.run("t").answer == 42
    told = [m[-1].text for m, _ in agent.model.asked if "This failed" in m[-1].text]  # type: ignore[attr-defined]
    assert len(told) == 1
    assert why in told[0]


def test_without_a_list_of_packages_the_model_is_told_of_none(make: Make) -> None:
    agent = make([BUILD, USE], [WITH_PACKAGE.format("thing"), WITHOUT])
    assert agent.run("t").answer == 42
    asked = [m for m, _ in agent.model.asked if "You write one tool" in m[0].text]  # type: ignore[attr-defined]
    assert "requirements" not in asked[0][0].text
    assert "packages.allow of the policy" in asked[1][-1].text


def test_a_program_may_wait_longer_for_the_model_than_the_policy_lets_it_run() -> None:
    """A local model takes minutes for the drafts of a tool: the program must not end meanwhile."""
    policy = policy_named("strict")
    policy = replace(policy, limits=replace(policy.limits, wall_seconds=0.2))
    passed = threading.Event()

    class Slow(ScriptedModel):
        def ask(self, messages: Any, *given: Any, **more: Any) -> ModelReply:
            if "You write one tool" in messages[0].text:
                passed.wait(0.5)  # nothing sets it: longer than the policy's time
            return super().ask(messages, *given, **more)

    with Agent(Slow([BUILD, USE], [WITHOUT]), policy=policy) as agent:
        assert agent.run("t").answer == 42


def test_a_program_that_hangs_ends_with_the_seconds_of_a_step(make: Make) -> None:
    code = program("kept = 1\nimport time\ntime.sleep(60)")
    agent = make([code, answer("kept")], limits=AgentLimits(step_seconds=0.3))
    result = agent.run("t")
    assert result.answer == 1
    assert "wall_time" in (agent.show(result.run_id)[1][0].observation or "")


def test_a_broker_with_an_approver_or_a_second_vault_is_refused(make: Make) -> None:
    with pytest.raises(PolicyError, match="approve: the broker has an approver"):
        make([], tools=Broker([], approve=lambda asked: True))
    with pytest.raises(PolicyError, match="vault: the broker has one"):
        make([], tools=Broker([], vault=Vault({"A": KEY})), vault=Vault({"B": KEY}))


def test_the_rules_and_filters_of_a_broker_or_a_factory_hold_for_the_agent(make: Make) -> None:
    key = "AKIAIOSFODNN7EXAMPLE"
    with ToolFactory(filters=[RedactSecrets()], pool=0) as factory:
        factory.create_tool("told", "d", f"def told() -> str:\n    return '{key}'", tests=[])
        assert key not in str(factory.broker.call("told", {}))
        script = [program("from tools import told\nfinal_answer(told())")]
        assert make(script, registry=factory.registry).run("t").answer == key
        assert key not in str(make(script, tools=factory).run("t").answer)

    def send() -> str:
        return "sent"

    for rules, allowed in (
        (Tools(), True),
        (Tools(rules=(ToolRule("send", "allow"),)), True),
        (Tools(rules=(ToolRule("send", "deny"), ToolRule("*", "allow"))), False),
    ):
        agent = make([program("from tools import send\nfinal_answer(send())"), answer("'no'")],
                     tools=Broker([send], rules=rules))  # fmt: skip
        assert agent.run("t").answer == ("sent" if allowed else "no")


KEY = "a key of a service"


@pytest.mark.parametrize("how", ["vault", "broker", "factory"])
def test_a_tool_of_the_agent_gets_its_credential_and_the_cell_never_does(
    make: Make, how: str
) -> None:
    used: list[str] = []

    def perform(given: dict[str, Any], caller: Caller) -> str:
        used.append(given["key"])
        return f"used {given['key']}"

    spec = ToolSpec(
        name="service", owner=ToolOwner.DEVELOPER, credentials={"key": "SERVICE"},
        parameters={"type": "object", "properties": {}, "additionalProperties": False},
    )  # fmt: skip
    tool, vault = Tool(spec, perform), Vault({"SERVICE": KEY})
    code = "execute_tool('service', {})"
    with make([program(code), answer("1")], tools=[tool]) as without:
        without.run("t")
        assert "not in the vault" in str(without.show(without.runs()[0].run)[1][0].observation)
    given: dict[str, Any] = {"tools": [tool], "vault": vault}
    if how == "broker":
        given = {"tools": Broker([tool], vault=vault)}
    elif how == "factory":
        factory = ToolFactory(vault=vault, pool=0)
        factory.registry.register(tool)
        given = {"tools": factory}
    agent = make([program(code), answer(code)], **given)
    result = agent.run("t")
    assert result.ok
    assert used == [KEY, KEY]
    steps = agent.show(result.run_id)[1]
    recorded = str([result.answer, steps, agent.calls.calls(f"{result.run_id}-1")])
    assert "used" in recorded
    assert KEY not in recorded


def test_api_query_sends_a_credential_that_no_program_sees(make: Make) -> None:
    sent: list[Mapping[str, str]] = []

    class Client(HttpClient):
        def request(
            self, method: str, url: str, headers: Mapping[str, str], body: bytes | None,
            secrets: Mapping[str, str], record: Any, caller: str = "",
        ) -> tuple[Target, HttpAnswer]:  # fmt: skip
            sent.append(secrets)
            echo = json.dumps({"you sent": secrets["TOKEN"]}).encode()
            return target_of(url), HttpAnswer(200, {"content-type": "application/json"}, echo, 0)

    http = Client([], credentials=[HttpCredential(key="TOKEN", host="api.example.org")])
    code = "execute_tool('api_query', {'url': 'https://api.example.org/'})['response_json']"
    result = make([answer(code)], http=http, vault=Vault({"TOKEN": KEY})).run("t")
    assert sent == [{"TOKEN": KEY}]
    assert result.answer == {"you sent": "[credential]"}


FILES = """
from tools import file_write
file_write('d/a.csv', 'n\\n1\\n')
print(open('d/a.csv').read())
file_write('/workspace/e.txt', 'absolute')
print(open('/workspace/e.txt').read())
execute_tool('file_write', {'filepath': 'b.txt', 'content': 'é\\r\\n'})
print(ascii(open('b.txt', newline='', encoding='utf-8').read()))
with open('d/a.csv', 'a') as file: file.write('2\\n')
open('c.txt', 'w').write('by open')
import asyncio
from tools import file_read
async def later(): return await file_read('c.txt')
kept = [execute_tool('csv_process', {'filepath': 'd/a.csv'})['rows'], asyncio.run(later())]
"""


def test_files_of_the_tools_can_be_opened_and_files_of_programs_are_read_by_tools(
    make: Make, tmp_path: Path
) -> None:
    files = Workspaces(tmp_path / "ws")
    script: Script = [program(FILES), ModelUnavailable("gone")]
    agent = make(script, workspace="w", workspaces=files)
    with pytest.raises(ModelUnavailable):
        agent.run("t")
    run = agent.runs()[0].run
    shown = str(agent.show(run)[1][0].observation)
    assert "n\n1" in shown
    assert r"'\xe9\r\n'" in shown
    assert files.read("w", "e.txt") == b"absolute"
    assert files.read("w", "d/a.csv") == b"n\n1\n2\n"
    made = len(agent.calls.calls(f"{run}-1"))
    agent.model.script = [program(FILES), program("open('d/a.csv').read()"), answer("kept")]  # type: ignore[attr-defined]
    result = agent.resume(run)  # the files are there again, from the record
    assert result.answer == [[{"n": "1"}, {"n": "2"}], {"content": "by open"}]
    assert len(agent.calls.calls(f"{run}-1")) == made
    assert "n\n1\n2" in str(agent.show(run)[1][1].observation)


def test_the_wall_time_of_a_run_ends_its_program(make: Make) -> None:
    long = program("kept = 1\nimport time\ntime.sleep(60)")
    agent = make([long, answer("kept")], limits=AgentLimits(wall_seconds=2.0))
    result = agent.run("t")
    assert (result.status, result.usage.steps) == ("failed", 1)
    assert "2 wall seconds is used up" in result.reason
    assert "wall_time" in (agent.show(result.run_id)[1][0].observation or "")
    agent.limits = AgentLimits()
    assert agent.resume(result.run_id).ok


class SlowModel(ScriptedModel):
    """Takes ten seconds of a clock for each reply."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def ask(self, *given: Any, **about: Any) -> ModelReply:
        self.now += 10.0
        return super().ask(*given, **about)


def test_a_reply_that_took_the_time_of_the_run_is_carried_out_when_there_is_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make([answer("1")], limits=AgentLimits(wall_seconds=5))
    agent.model = model = SlowModel([answer("1")])
    monkeypatch.setattr(task_loop, "time", model)
    result = agent.run("t")
    assert (result.status, result.usage.steps) == ("failed", 1)
    assert "wall seconds is used up" in result.reason
    agent.limits = AgentLimits()
    assert agent.resume(result.run_id).answer == 1
    assert len(model.asked) == 1


def test_further_tools_are_functions_or_a_catalogue(make: Make) -> None:
    def seven() -> int:
        return 7

    for tools in ([seven], (tool_of(seven),), Offer([tool_of(seven)])):
        assert (
            make([program("from tools import seven\nfinal_answer(seven())")], tools=tools)
            .run("t")
            .answer
            == 7
        )
    for wrong in (None, seven, "seven", 7):
        with pytest.raises(PolicyError, match="tools: must be a list"):
            make([], tools=wrong)
