"""Every call of a tool leaves a record in the trail of the sandbox whose program makes it, and a call
of the host in the broker's, however the tools are offered."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from cellwright import AuditLog, Broker, PolicyError, Sandbox, ToolFactory, ToolRegistry, tool
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import tool_of
from tests.conftest import ROOT
from tests.documents import BLOCKS, Block

pytestmark = pytest.mark.needs("cgroup")
CALL = "import tools\ntools.double(n=4)"


@tool
def double(n: int) -> int:
    """Double a number."""
    return n * 2


def calls_in(trail: AuditLog | None) -> Counter[tuple[str, str]]:
    assert trail is not None
    entries = trail.get_entries()
    return Counter((each.action, each.target) for each in entries if each.category == "tool")


def factory_of(stack: ExitStack) -> ToolFactory:
    factory = stack.enter_context(ToolFactory(pool=0))
    factory.registry.register(double)
    return factory


OFFERED: dict[str, Callable[[ExitStack], Any]] = {
    "a list of functions": lambda _: [double],
    "a list of tools": lambda _: [tool_of(double)],
    "a broker": lambda _: Broker(Offer([tool_of(double)])),
    "a broker of functions": lambda _: Broker([double]),
    "a broker with a trail of its own": lambda _: Broker([double], audit=AuditLog()),
    "a broker that was told to have none": lambda _: Broker([double], audit=None),
    "a factory": factory_of,
    "a factory's broker": lambda stack: factory_of(stack).broker,
    "a broker of a factory": lambda stack: Broker(factory_of(stack)),
}


@pytest.mark.parametrize("offered", OFFERED)
def test_a_call_of_a_program_is_in_the_trail_of_its_sandbox(offered: str) -> None:
    trail = AuditLog()
    with ExitStack() as stack:
        tools = OFFERED[offered](stack)
        box = stack.enter_context(Sandbox(tools=tools, audit=trail, pool=0))
        assert box.execute(CALL).value == 8
        assert box.execute("import tools\ntools.double(n='four')").error
    assert calls_in(trail) == {
        ("call", "double"): 1, ("returned", "double"): 1, ("refused", "double"): 1,
    }  # fmt: skip


def test_a_broker_that_shares_the_sandboxs_trail_writes_each_record_once() -> None:
    trail = AuditLog()
    with Sandbox(tools=Broker([double], audit=trail), audit=trail, pool=0) as box:
        assert box.execute(CALL).value == 8
    assert calls_in(trail) == {("call", "double"): 1, ("returned", "double"): 1}


def test_a_call_that_a_made_tool_makes_is_in_the_trail_of_the_program_that_began() -> None:
    trail = AuditLog()
    with ExitStack() as stack:
        factory = factory_of(stack)
        source = "import tools\ndef quadruple(n: int) -> int:\n    return tools.double(n=n) * 2"
        factory.create_tool("quadruple", "Multiply by four", source, calls=["double"])
        box = stack.enter_context(Sandbox(tools=factory, audit=trail, pool=0))
        assert box.execute("import tools\ntools.quadruple(n=2)").value == 8
    assert calls_in(trail)["call", "double"] == calls_in(trail)["call", "quadruple"] == 1


def test_without_a_trail_of_the_sandbox_the_brokers_own_has_the_call() -> None:
    broker = Broker([double])
    with Sandbox(tools=broker, audit=False, pool=0) as box:
        assert box.execute(CALL).value == 8
    assert broker.call("double", {"n": 1}) == 2
    assert calls_in(broker.audit)["call", "double"] == 2
    assert Broker([double], audit=None).audit is None


def test_a_trial_of_a_tool_is_recorded_as_its_call_is() -> None:
    with ExitStack() as stack:
        factory = factory_of(stack)
        factory.create_tool("triple", "Triple a number", "def triple(n: int): return n * 3")
        assert factory.test_tool("double", {"n": 1}) + factory.test_tool("triple", {"n": 1}) == 5
        assert calls_in(factory.broker.audit) == {
            (action, name): 1 for action in ("call", "returned") for name in ("double", "triple")
        }


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (double, "one tool"),
        ("double", "got str"),
        (5, "got int"),
        ([5], "not a tool: 5"),
        (ToolRegistry, "ToolFactory"),
    ],
)
def test_what_has_no_tools_is_refused_in_words_that_say_what_to_give(tools: Any, said: str) -> None:
    given = tools() if tools is ToolRegistry else tools
    with pytest.raises(PolicyError, match=said):
        Broker(given)
    with pytest.raises(PolicyError, match=said):
        Sandbox(tools=given, pool=0)


LOOK = """
import collections
from cellwright.harness.sandbox import local
from cellwright.harness.tools import broker

PERFORMED, TRAILS = collections.Counter(), []

def count(perform):
    def counted(self, call, *rest):
        PERFORMED[call.tool.spec.name] += 1
        return perform(self, call, *rest)
    return counted

def keep(make):
    def made(self, *given, **about):
        make(self, *given, **about)
        TRAILS.append(self.audit)
    return made

broker.Broker._perform = count(broker.Broker._perform)
broker.Broker.__init__ = keep(broker.Broker.__init__)
local.LocalCells.__init__ = keep(local.LocalCells.__init__)
"""
FOUND = """
RECORDED = collections.Counter()
for trail in {id(trail): trail for trail in TRAILS if trail}.values():
    RECORDED.update({(entry.span_id, entry.target)
                     for entry in trail.get_entries() if (entry.category, entry.action) == ("tool", "call")})
CALLS = collections.Counter(name for _, name in RECORDED)
assert PERFORMED and CALLS == PERFORMED, (PERFORMED, CALLS)
"""
EXAMPLES = [
    pytest.param(block, id=block.name)
    for block in BLOCKS
    if block.kind == "python" and re.search(r"\b(tools=|ToolFactory\(|Broker\()", block.text)
    and "harness/adapters/" not in block.name  # tests/harness/adapters runs them, with their frameworks
    and "harness/paths/" not in block.name  # tests/test_document_blocks.py types them, with their files
]  # fmt: skip


@pytest.mark.parametrize("block", EXAMPLES)
def test_every_call_that_an_example_of_the_documents_makes_is_recorded(block: Block) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK + block.text + FOUND], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_there_are_examples_that_call_tools() -> None:
    assert len(EXAMPLES) >= 5
