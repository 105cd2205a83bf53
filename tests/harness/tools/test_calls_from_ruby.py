"""Ruby calls tools of the host: by name, step by step, and what interrupts a call."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cellwright import Broker, Sandbox, SandboxStatus
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Tool
from cellwright.policies.tool_rules import Tools
from tests.conftest import policy_named, soon

pytestmark = pytest.mark.needs("ruby")
RULES = Tools(result_bytes=2**20)
NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tool(name: str, function: Any, **about: Any) -> Tool:
    return Tool(ToolSpec(name=name, owner=ToolOwner.DEVELOPER, **about), function)


def fail(*_: Any) -> None:
    raise RuntimeError("out of order")


class Slow:
    """A tool that lasts until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.tools = [*TOOLS, tool("slow", lambda *_: self.release.wait(60))]


TOOLS = [
    tool("maths.twice", lambda given, _: given["n"] * 2, parameters=NUMBERS),
    tool("maths", lambda given, _: [*given]),
    tool("send", lambda given, _: given),  # as a method that every object has
    tool("dashed-name", lambda *_: None),
    tool("broken", fail),
]
SAYS = """
said = [["broken", {}], ["nobody", {}], ["maths.twice", {n: "x"}]].map do |name, arguments|
  Tools.call(name, **arguments)
rescue ToolError => error
  error.kind
end
[Tools.call("maths.twice", n: 4), Tools.maths.twice(n: -300), Tools.call("maths.twice", {"n" => 2**40}),
 Tools.send(text: "é", list: [1, nil]), Tools.maths(a: 1), Tools.call("dashed-name"), said]
"""
SAID = [
    8, -600, 2**41, {"text": "é", "list": [1, None]}, ["a"], None,
    ["failed", "not_found", "invalid_arguments"],
]  # fmt: skip


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    broker = Broker(Offer(TOOLS), rules=RULES)
    with Sandbox(policy=policy_named("strict", tools=RULES), tools=broker, pool=0) as box:
        yield box


def test_a_tool_is_called_by_its_name_or_step_by_step(sandbox: Sandbox) -> None:
    result = sandbox.execute(SAYS, "ruby")
    assert (result.value, result.stderr, result.violations) == (SAID, "", ()), result
    with sandbox.session(language="ruby") as session:
        assert session.execute(SAYS).value == SAID
        assert session.execute("def four = Tools.maths.twice(n: 2)\nfour").value == 4
        assert session.execute("four").value == 4


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("Tools.broken", "ToolError: RuntimeError: out of order"),
        ("Tools.maths.thrice", "NoMethodError: there is no tool maths.thrice; there are broken, "),
        ("Tools.call('maths.twice', n: Float::NAN)", "JSON::GeneratorError: "),
        ("Tools.call('maths.twice', [1])", "NoMethodError: "),
    ],
)
def test_a_wrong_call_is_an_exception(sandbox: Sandbox, program: str, error: str) -> None:
    result = sandbox.execute(program, "ruby")
    assert str(result.error).startswith(error), result
    assert result.violations == ()


def test_long_values_travel_in_pieces(sandbox: Sandbox) -> None:
    program = "text = '\N{SNOWMAN}' * 100_000\nTools.call('send', text: text)['text'] == text"
    assert sandbox.execute(program, "ruby").value is True


def test_threads_call_one_after_the_other(sandbox: Sandbox) -> None:
    program = "(1..50).map { |n| Thread.new { Tools.maths.twice(n: n) } }.map(&:value)"
    assert sandbox.execute(program, "ruby").value == [2 * n for n in range(1, 51)]


def test_a_call_that_is_given_up_does_not_answer_another() -> None:
    slow = Slow()
    tools = [*slow.tools, tool("release", lambda *_: slow.release.set())]
    program = """
require "timeout"
given_up = 3.times.map do
  Timeout.timeout(0.1) { Tools.slow }
rescue Timeout::Error => error
  error.class.name
end
Tools.release
[given_up, (1..20).map { |n| Tools.maths.twice(n: n) }]
"""
    with Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as sandbox:
        result = sandbox.execute(program, "ruby")
    assert result.value == [["Timeout::Error"] * 3, [2 * n for n in range(1, 21)]], result


def test_a_call_is_interrupted_and_the_session_goes_on() -> None:
    slow = Slow()
    with (
        Sandbox(policy=policy_named("strict"), tools=slow.tools, pool=0) as sandbox,
        sandbox.session(language="ruby") as session,
    ):
        assert session.execute("Tools.slow", timeout=0.5).status is SandboxStatus.TIMEOUT
        caught = "begin\n  Tools.slow\nrescue Interrupt\n  'caught'\nend"
        # By then, on a busy machine too, what catches it is in place.
        assert session.execute(caught, timeout=1.5).value == "caught"
        session.execute("trap('INT') { throw :out, 'own handler' }")
        assert session.execute("catch(:out) { Tools.slow }", timeout=1.5).value == "own handler"
        slow.release.set()
        assert session.execute("Tools.maths.twice(n: 21)").value == 42
        assert not session.lost


def test_a_thread_that_waits_for_a_tool_when_its_request_ends_is_told_so() -> None:
    slow = Slow()
    began = threading.Event()
    tools = [
        *TOOLS,
        tool("slow", lambda *_: began.set() or slow.release.wait(60)),
        tool("has_begun", lambda *_: began.wait(60)),
    ]
    thread = """
$said = []
$thread = Thread.new do
  Tools.slow
rescue ToolError => error
  $said << error.kind << error.message
end
input = $stdin.read
"""
    with (
        Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as sandbox,
        sandbox.session(language="ruby") as session,
    ):
        run = session.start(f"{thread}\nsleep 0.01 until $thread.status == 'sleep'")
        run.result()
        assert session.execute("$thread.join\n$said").value == ["closed", "the program has ended"]
        slow.release.set()
        for n in range(5):
            assert session.execute(f"Tools.maths.twice(n: {n})").value == 2 * n


def test_no_process_can_call_between_two_requests(sandbox: Sandbox) -> None:
    late = """
$heard = []
$thread = Thread.new do
  while $heard.empty?
    begin
      Tools.maths.twice(n: 1)
    rescue ToolError => error
      $heard << error.kind
    end
  end
end
nil
"""
    with sandbox.session(language="ruby") as session:
        session.execute(late)
        assert soon(lambda: session.execute("$heard").value == ["closed"])
        assert session.execute("$thread.join\nTools.maths.twice(n: 5)").value == 10


def test_a_child_cannot_call() -> None:
    program = """
read, write = IO.pipe
pid = fork do
  write << begin
    Tools.maths.twice(n: 1)
  rescue ToolError => error
    error.kind
  end
end
Process.wait(pid)
write.close
read.read
"""
    with Sandbox(policy=policy_named("standard"), tools=TOOLS, pool=0) as sandbox:
        assert sandbox.execute(program, "ruby").value == "closed"


def test_without_tools_there_is_no_such_constant(strict: Sandbox) -> None:
    result = strict.execute("Tools", "ruby")
    assert result.error == "NameError: uninitialized constant Tools"
