"""Programs in cells call tools of the host: what they can say, and what they cannot."""

import itertools
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import AuditLog, Broker, Sandbox, SandboxStatus, Vault
from cellwright.harness.sandbox.calls import sandbox_tools
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.policies.tool_rules import ToolRule, Tools
from cellwright.runner import channel
from cellwright.runner.messages import Call
from cellwright.runner.watching import guest_channel
from tests.conftest import policy_named, soon
from tests.harness.tools.test_broker import Unusual

NUMBERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "by": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def spec(name: str, **about: Any) -> ToolSpec:
    return ToolSpec(name=name, owner=ToolOwner.DEVELOPER, **({"parameters": NUMBERS} | about))


def times(arguments: dict[str, Any], _: Caller) -> int:
    return int(arguments["n"]) * int(arguments.get("by", 2))


def fail(_: dict[str, Any], __: Caller) -> None:
    raise RuntimeError("out of order")


TOOLS = [
    Tool(spec("maths.times"), times),
    Tool(spec("maths.while"), times),
    Tool(spec("broken"), fail),
]


DENIED = Tools(rules=(ToolRule(tool="broken", effect="deny"), ToolRule(tool="*", effect="allow")))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), tools=TOOLS, pool=2) as box:
        yield box


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("from tools import brokn", "ModuleNotFoundError: there is no tool 'brokn'; did you mean broken?"),
        ("import tools.brokn", "ModuleNotFoundError: there is no tool 'brokn'; did you mean broken?"),
        ("from tools.maths import time", "ModuleNotFoundError: there is no tool 'maths.time'; did you mean maths.times?"),
        ("from tools import zebra", "ModuleNotFoundError: there is no tool 'zebra'"),
        (
            "async def main():\n    from tools import brokn\nimport asyncio\nasyncio.run(main())",
            "ModuleNotFoundError: there is no tool 'brokn'; did you mean broken?",
        ),
        ("import tools\ntools.maths.time", "AttributeError: maths has no 'time'; there are times, while_"),
        ("import tools\ntools.broken.now", "AttributeError: broken has no 'now'"),
    ],
)  # fmt: skip
def test_an_import_of_an_unknown_tool_names_the_one_that_was_meant(
    program: str, said: str, sandbox: Sandbox
) -> None:
    error = sandbox.execute(program).error
    assert error == said


def test_an_import_of_an_unknown_tool_does_not_name_one_that_the_program_may_not_call() -> None:
    policy = replace(policy_named("strict"), tools=DENIED)
    with Sandbox(policy=policy, tools=TOOLS, pool=0) as box:
        error = box.execute("from tools import brokn").error
    assert error == "ModuleNotFoundError: there is no tool 'brokn'"


def test_a_tool_is_an_ordinary_function(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        "from copy import copy\nfrom tools import maths, broken, ToolError\n"
        "said = []\n"
        "try:\n    broken(n=1)\n"
        "except ToolError as error:\n    said = [error.kind, str(error)]\n"
        "[maths.times(4), maths.times(4, 5), maths.times(by=3, n=2), maths.while_(1),"
        " call_tool('maths.times', {'n': 7}), said, repr(copy(maths.times))]"
    )
    assert result.value == [
        8, 20, 6, 2, 14, ["failed", "RuntimeError: out of order"], "<tool maths.times(n, by)>",
    ]  # fmt: skip
    assert result.violations == ()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("maths.times('x')", "invalid_arguments: $.n: 'x' is not of type \"integer\""),
        ("maths.times(1, 2, 3)", "takes n, by"),
        ("maths.times(1, n=2)", "two values for n"),
        ("maths(1)", "maths is not a tool; there are times, while_"),
        ("maths.plus(1)", "maths has no 'plus'; there are times, while_"),
        ("call_tool('maths.plus', {})", "not_found"),
        (
            "call_tool('math.times', {})",
            "not_found: there is no tool 'math.times'; did you mean maths.times?",
        ),
        (
            "maths.times(nn=1)",
            (
                "invalid_arguments: Additional properties are not allowed ('nn' was unexpected); "
                "did you mean 'n'?; \"n\" is a required property"
            ),
        ),
        ("call_tool('maths.times', [1])", "invalid_arguments"),
        ("maths.times(float('nan'))", "not JSON: $.n: nan is not a number"),
        ("maths.times(object())", "not JSON: $.n: an object of type object"),
    ],
)
def test_a_wrong_call_is_an_exception_inside(sandbox: Sandbox, call: str, words: str) -> None:
    result = sandbox.execute(
        "from tools import *\nfrom tools import maths, ToolError\n"
        f"try:\n    {call}\n    said = 'nothing'\n"
        "except ToolError as error:\n    said = f'{error.kind}: {error}'\n"
        "except Exception as error:\n    said = str(error)\nsaid"
    )
    assert words in result.value


def test_an_uncaught_failed_call_fails_the_program_and_is_no_violation(
    sandbox: Sandbox,
) -> None:
    result = sandbox.execute("import tools\ntools.broken(n=1)")
    assert result.status is SandboxStatus.FAILED
    assert result.error == "tools.ToolError: RuntimeError: out of order"
    assert result.violations == ()


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), Unusual()])
def test_whatever_a_tool_raises_its_program_does_not_wait(raised: BaseException) -> None:
    def give_up(*_: Any) -> None:
        raise raised

    tool = Tool(spec("give_up", parameters={}), give_up)
    with Sandbox(policy=policy_named("strict"), tools=[tool], pool=0) as sandbox:
        result = sandbox.execute(
            "import tools\ntry: tools.give_up()\nexcept tools.ToolError as error: word = error.kind\nword"
        )
    assert result.value == "failed"


def test_coroutines_call_at_the_same_time() -> None:
    meeting = threading.Barrier(5, timeout=30)

    def meet(arguments: dict[str, Any], _: Caller) -> int:
        meeting.wait()
        return int(arguments["n"])

    with Sandbox(
        policy=policy_named("strict"), tools=[Tool(spec("meet"), meet)], pool=0
    ) as sandbox:
        result = sandbox.execute(
            "import asyncio, tools\n"
            "async def main():\n"
            "    return await asyncio.gather(*(tools.meet(n) for n in range(5)))\n"
            "asyncio.run(main())"
        )
        assert result.value == [0, 1, 2, 3, 4]
        result = sandbox.execute(
            "import tools\nfrom concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(5) as pool:\n    values = list(pool.map(tools.meet, range(5)))\n"
            "values"
        )
        assert result.value == [0, 1, 2, 3, 4]


def test_more_coroutines_than_may_call_at_once_wait_their_turn(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        "import asyncio, tools\n"
        "async def main():\n"
        "    return sum(await asyncio.gather(*(tools.maths.times(n, 1) for n in range(300))))\n"
        "asyncio.run(main())"
    )
    assert result.value == sum(range(300))


def test_calls_that_are_given_up_are_no_breach() -> None:
    release = threading.Event()
    slow = Tool(spec("slow", parameters={}), lambda *_: release.wait(60))
    done = Tool(spec("done", parameters={}), lambda *_: release.set())
    code = """
import asyncio, tools
async def give_up(times):
    for _ in range(times):
        try:
            await asyncio.wait_for(tools.slow(), 0.001)
        except TimeoutError:
            pass
asyncio.run(give_up(31))
tools.done()
asyncio.run(give_up(70))
[tools.slow() for _ in range(70)][-1]
"""
    with Sandbox(policy=policy_named("strict"), tools=[slow, done], pool=0) as box:
        result = box.execute(code)
        release.set()
    assert (result.ok, result.value) == (True, True), result.error


def test_more_calls_given_up_than_may_be_open_wait_for_room() -> None:
    release = threading.Event()
    slow = Tool(spec("slow", parameters={}), lambda *_: release.wait(60))
    code = """
import asyncio, tools
async def main():
    given_up = 0
    for _ in range(70):
        try:
            await asyncio.wait_for(tools.slow(), 0.001)
        except TimeoutError:
            given_up += 1
    return given_up
asyncio.run(main())
"""
    with Sandbox(policy=policy_named("strict"), tools=[slow], pool=0) as box:
        result = box.execute(code)
        release.set()
    assert (result.ok, result.value) == (True, 70), result.error


def test_more_threads_than_may_call_at_once_wait_their_turn() -> None:
    full, made = threading.Barrier(32, timeout=60), []

    def meet(*_: Any) -> None:
        made.append(1)
        if len(made) <= 32:
            full.wait()

    code = """
import sys, threading, tools
sys.setswitchinterval(1e-6)  # threads get in each other's way wherever they can
together = threading.Barrier(100)
def call():
    together.wait()
    tools.meet()
threads = [threading.Thread(target=call) for _ in range(100)]
[each.start() for each in threads]
[each.join() for each in threads]
len(threads)
"""
    policy = policy_named("strict")
    policy = replace(policy, limits=replace(policy.limits, processes=150))
    tool = Tool(spec("meet", parameters={}), meet)
    with Sandbox(policy=policy, tools=[tool], pool=0) as box:
        result = box.execute(code)
    assert (result.ok, result.value, len(made)) == (True, 100, 100), result.error


@pytest.mark.parametrize(
    "call", ["f('a', 'b')", "f(from_='a', user_id='b')", "f('a', user_id='b')"]
)
def test_a_parameter_that_python_cannot_say_gets_its_argument(call: str) -> None:
    parameters = {"properties": {"from": {}, "user-id": {}}, "additionalProperties": False}
    echo = Tool(spec("echo", parameters=parameters), lambda arguments, _: arguments)
    with Sandbox(policy=policy_named("strict"), tools=[echo], pool=0) as box:
        result = box.execute(f"import tools\nf = tools.echo\n{call}")
    assert result.value == {"from": "a", "user-id": "b"}


def test_without_tools_there_is_no_such_module() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        result = sandbox.execute("import tools")
    assert result.error == "ModuleNotFoundError: No module named 'tools'"


def test_large_arguments_and_results_travel_in_pieces() -> None:
    def echo(arguments: dict[str, Any], _: Caller) -> Any:
        return arguments["text"]

    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    tool = Tool(spec("echo", parameters=schema), echo)
    policy = replace(policy_named("strict"), tools=Tools(result_bytes=2**20))
    broker = Broker(Offer([tool]), rules=Tools(result_bytes=2**20))
    with Sandbox(policy=policy, tools=broker, pool=0) as sandbox:
        result = sandbox.execute("import tools\ntext = 'ü' * 150_000\ntools.echo(text) == text")
    assert result.value is True


def test_a_tool_that_hangs_does_not_hold_up_the_deadline() -> None:
    release = threading.Event()

    def hang(_: dict[str, Any], __: Caller) -> None:
        release.wait(60)

    with Sandbox(
        policy=policy_named("strict"), tools=[Tool(spec("hang"), hang)], pool=0
    ) as sandbox:
        result = sandbox.execute("import tools\ntools.hang(1)", timeout=0.2)
        release.set()
    assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "wall_time")


# sessions

GIVE_UP = """
import signal, tools

class GivenUp(Exception): pass

def give_up(*_): raise GivenUp

for n in range(20): tools.maths.times(n)
signal.signal(signal.SIGALRM, give_up)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try: tools.hang(1)
except GivenUp: print("given up")
"""


def test_a_request_that_gives_up_a_hanging_tool_after_quick_calls_ends_at_once() -> None:
    release = threading.Event()

    def hang(_: dict[str, Any], __: Caller) -> None:
        release.wait(60)

    tools = [Tool(spec("hang"), hang), Tool(spec("maths.times"), lambda given, _: given["n"])]
    with (
        Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as sandbox,
        sandbox.session() as session,
    ):
        result = session.execute(GIVE_UP)
        assert not release.is_set()
        release.set()
    assert (result.ok, result.stdout) == (True, "given up\n"), result.error


def test_a_session_calls_tools_in_every_request_and_in_none_between(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.execute("import tools\ntools.maths.times(2)").value == 4
        assert session.execute("await_me = tools.maths.times(3)\nawait_me").value == 6
        assert (
            session.execute(
                "async def later(n): return await tools.maths.times(n)\nawait later(4)"
            ).value
            == 8
        )
        late = (
            "import threading, time\nheard = []\nstart = threading.Event()\n"
            "def call():\n"
            "    start.wait()\n"
            "    while not heard:\n"
            "        try: tools.maths.times(1)\n"
            "        except tools.ToolError as error: heard.append(error.kind)\n"
            "thread = threading.Thread(target=call)\nthread.start()\nstart.set()"
        )
        session.execute(late)
        assert soon(lambda: session.execute("heard").value == ["closed"])
        assert session.execute("thread.join()\ntools.maths.times(5)").value == 10
        assert not session.lost


def test_a_thread_that_waits_for_a_tool_when_its_request_ends_is_told_so() -> None:
    began, release = threading.Event(), threading.Event()

    def slow(_: dict[str, Any], __: Caller) -> None:
        began.set()
        release.wait(60)

    tools = [Tool(spec("slow"), slow), Tool(spec("maths.times"), times)]
    with (
        Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as sandbox,
        sandbox.session() as session,
    ):
        run = session.start(
            "import threading, tools\nheard = []\n"
            "def wait():\n"
            "    try: tools.slow(1)\n"
            "    except tools.ToolError as error: heard.append(str(error))\n"
            "thread = threading.Thread(target=wait)\nthread.start()\ninput()",
            stdin="go\n",
        )
        run.result()
        assert session.execute("thread.join()\nheard").value == ["the program has ended"]
        release.set()
        assert session.execute("tools.maths.times(21)").value == 42


# in JavaScript

JAVASCRIPT = """
const said = [];
for (const call of [() => tools.broken({n: 1}), () => callTool("maths.plus"), () => tools.maths.times({n: "x"})]) {
  try { call(); } catch (error) { said.push(error.kind); }
}
[tools.maths.times({n: 4}), tools.maths.times({n: 4, by: -300}), callTool("maths.times", {n: 2 ** 40}), said];
"""


@pytest.mark.needs("node")
def test_javascript_calls_tools(sandbox: Sandbox) -> None:
    expected = [8, -1200, 2**41, ["failed", "not_found", "invalid_arguments"]]
    result = sandbox.execute(JAVASCRIPT, "javascript")
    assert result.value == expected, result
    with sandbox.session(language="javascript") as session:
        assert session.execute("const twice = (n) => tools.maths.times({n}); twice(21)").value == 42
        assert session.execute(JAVASCRIPT.replace("const said", "var said")).value == expected
        assert (
            session.execute("tools.broken({n: 1})").error == "ToolError: RuntimeError: out of order"
        )
        assert session.execute("twice(4)").value == 8


@pytest.mark.needs("node")
def test_javascript_reads_long_answers() -> None:
    tool = Tool(spec("long", parameters={}), lambda *_: {"text": "\N{SNOWMAN}" * 30_000})
    policy = replace(policy_named("strict"), tools=Tools(result_bytes=2**20))
    broker = Broker(Offer([tool]), rules=Tools(result_bytes=2**20))
    with Sandbox(policy=policy, tools=broker, pool=0) as sandbox:
        result = sandbox.execute("callTool('long').text.length", "javascript")
    assert result.value == 30_000, result


# messages of a hostile program


PRELUDE = """
import json, socket, os
sock = socket.socket(fileno=os.dup(3))
def pack(*parts):
    out = b""
    for part in parts:
        if isinstance(part, int): out += b"\\xcf" + part.to_bytes(8, "big")
        elif isinstance(part, str): out += b"\\xdb" + len(part.encode()).to_bytes(4, "big") + part.encode()
        else: out += b"\\xc6" + len(part).to_bytes(4, "big") + part
    return b"\\0" + bytes([0x90 + len(parts)]) + out
"""


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (
            "sock.send(pack('Call', 1, 'slow', b'{}'))\nsock.send(pack('Call', 1, 'slow', b'{}'))",
            "number",
        ),
        ("for n in range(70): sock.send(pack('Call', n, 'slow', b'{}'))", "at once"),
        ("sock.send(pack('Answer', 1, b'1', '', ''))", "Answer"),
        ("sock.send(pack('Call', 'x', 'slow', b'{}'))", "int"),
        ("sock.send(pack('Call', 1))", "length"),
        ("sock.send(b'\\0\\x95\\xa4Call\\xff\\xa4slow\\xc4\\x02{}\\xa0')", "int"),  # -1: a door's
    ],
)
def test_a_frame_that_no_honest_guest_sends_ends_the_cell(attack: str, words: str) -> None:
    release = threading.Event()
    slow = Tool(spec("slow", parameters={}), lambda *_: release.wait(60))
    with Sandbox(policy=policy_named("strict"), tools=[slow], pool=0) as sandbox:
        result = sandbox.execute(f"{PRELUDE}\n{attack}\nwhile True: os.getpid()")
        release.set()
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "violation")
    assert words in str(result.error)


def test_a_program_that_reads_no_answers_has_few_of_them_kept() -> None:
    """Each burst is no more than may be open; the host has time to answer it before the next."""
    made = []

    def long(*_: Any) -> str:
        made.append(1)
        return "x" * 60_000

    attack = """
import select
for n in range(240):
    sock.send(pack('Call', n, 'long', b'{}'))
    if n % 60 == 59: select.select([], [], [], 0.3)
"""
    with Sandbox(
        policy=policy_named("strict"), tools=[Tool(spec("long", parameters={}), long)], pool=0
    ) as box:
        result = box.execute(f"{PRELUDE}\n{attack}")
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "violation")
    assert "at once" in str(result.error)
    assert len(made) < 120


def test_a_name_as_long_as_no_tool_has_is_not_repeated(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        f"{PRELUDE}\nsock.send(pack('Call', 1, 'x' * 60000, b'{{}}'))\nlen(sock.recv(70000)) < 200"
    )
    assert result.value is True


@pytest.mark.parametrize(
    "arguments", ["b'nonsense'", "b'[1]'", "b'{' * 5", "b'[' * 60000", "b'\\xff'"]
)
def test_invalid_arguments_are_refused_and_the_program_goes_on(
    sandbox: Sandbox, arguments: str
) -> None:
    result = sandbox.execute(
        f"{PRELUDE}\nsock.send(pack('Call', 1, 'maths.times', {arguments}))\n"
        "answer = sock.recv(70000)\nb'invalid_arguments' in answer"
    )
    assert result.value is True
    assert result.ok


BOUNDED = """
said = []
for text in ('x' * 100, 'x' * 200):
    try: said.append(len(call_tool('echo', {'text': text})))
    except tools.ToolError as error: said.append(str(error))
said
"""


@pytest.mark.parametrize(("of_policy", "of_broker"), [(150, 2**20), (2**20, 150)])
def test_arguments_longer_than_either_side_allows_are_refused(
    of_policy: int, of_broker: int
) -> None:
    echo = Tool(spec("echo", parameters={}), lambda given, _: given["text"])
    broker = Broker(Offer([echo]), rules=Tools(argument_bytes=of_broker))
    policy = replace(policy_named("strict"), tools=Tools(argument_bytes=of_policy))
    with Sandbox(policy=policy, tools=broker, pool=0) as box:
        result = box.execute(f"import tools\n{BOUNDED}")
    assert result.value == [100, "arguments: more than 150 bytes"]


def test_long_arguments_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def decode(data: bytes) -> Any:
        decoded.append(len(data))
        return {}

    monkeypatch.setattr(sandbox_tools, "decode_json", decode)
    echo = Tool(spec("echo", parameters={}), lambda *_: None)
    answers = sandbox_tools.SandboxTools(Broker(Offer([echo])), Tools(argument_bytes=10), None)
    for size in (10, 11):
        answers.answer(Caller(), Call(1, "echo", b"x" * size), lambda _: None)
    assert decoded == [10]


HAMMER = """
for n in range(1, 200):
    sock.send(pack('Call', n, {name}, {arguments}))
    sock.recv(70000)
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("'maths.times'", "b'nonsense'"),
        ("'x' * 300", "b'{}'"),
        ("'maths.times'", "b'{}'"),
        ("'none'", "b'{}'"),
    ],
)
def test_whatever_is_refused_counts_and_does_not_fill_the_trail(name: str, arguments: str) -> None:
    trail = AuditLog()
    policy = replace(policy_named("strict"), tools=Tools(calls=10))
    with Sandbox(policy=policy, tools=Broker(Offer(TOOLS), audit=trail), pool=0) as box:
        result = box.execute(PRELUDE + HAMMER.format(name=name, arguments=arguments))
    assert result.ok, result
    kinds = [entry.details["kind"] for entry in trail.get_entries(category="tool")]
    assert kinds[:10].count("budget") == 0
    assert kinds[10:] == ["budget"] * 8  # the 1st, 2nd, 4th ... 128th of 189


def test_a_result_that_no_text_can_hold_is_an_invalid_one() -> None:
    odd = Tool(spec("odd", parameters={}), lambda *_: {"x": ["\ud800"]})
    code = (
        "import tools\ntry: tools.odd()\nexcept tools.ToolError as error: kind = error.kind\nkind"
    )
    with Sandbox(policy=policy_named("strict"), tools=[odd], pool=0) as box:
        assert box.execute(code).value == "invalid_result"


def test_offered_tools_are_looked_up_again_only_after_a_change() -> None:
    class Counting(Offer):
        looked, changed = 0, 0

        def specs(self) -> Any:
            self.looked += 1
            return super().specs()

        def revision(self) -> int:
            return self.changed

    offer = Counting([TOOLS[0]])
    code = "import tools\ndir(tools.maths)"
    with Sandbox(policy=policy_named("strict"), tools=Broker(offer), pool=0) as box:
        assert [box.execute(code).value for _ in range(3)] == [["times"]] * 3
        assert offer.looked == 1
        offer._tools["maths.while"] = TOOLS[1]
        offer.changed += 1
        assert box.execute(code).value == ["times", "while_"]


def test_a_program_without_tools_that_calls_one_breaks_the_protocol() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        result = sandbox.execute(
            f"{PRELUDE}\nsock.send(pack('Call', 1, 'x', b'{{}}'))\nwhile True: os.getpid()"
        )
    assert result.reason == "violation"


def test_no_byte_of_a_credential_enters_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, trail, went_in = "hunter2-hunter2", AuditLog(), []

    def use(arguments: dict[str, Any], _: Caller) -> str:
        if arguments["n"] == 0:
            raise RuntimeError(f"{arguments['key']} is not right")
        return f"used {arguments['key']}"

    def send_packet(sock: socket.socket, packet: bytes, descriptors: tuple[int, ...] = ()) -> None:
        went_in.append(packet)
        _send_packet(sock, packet, descriptors)

    def encode_behind(mark: bytes, answer: Any) -> bytearray:
        encoded = _encode_behind(mark, answer)
        went_in.append(bytes(encoded))
        return encoded

    _send_packet, _encode_behind = channel.send_packet, guest_channel.encode_behind
    monkeypatch.setattr(channel, "send_packet", send_packet)
    monkeypatch.setattr(guest_channel, "encode_behind", encode_behind)  # encodes answers
    tool = Tool(spec("use", credentials={"key": "K"}), use)
    broker = Broker(Offer([tool]), vault=Vault({"K": secret}), audit=trail)
    with Sandbox(policy=policy_named("strict"), tools=broker, pool=0, audit=trail) as sandbox:
        result = sandbox.execute(
            "import tools\n"
            "said = [repr(tools.use), tools.use(1)]\n"
            "try: tools.use(0)\nexcept tools.ToolError as error: said.append(str(error))\nsaid"
        )
    assert result.value[1:] == ["used [credential]", "RuntimeError: [credential] is not right"]
    assert b"used [credential]" in b"".join(went_in)
    assert secret.encode() not in b"".join(went_in)
    assert secret not in f"{result} {trail.get_entries()}"


# the trail


def test_a_call_lies_in_the_trail_as_a_child_of_the_execution() -> None:
    trail = AuditLog()
    with Sandbox(policy=policy_named("strict"), tools=TOOLS, pool=0, audit=trail) as sandbox:
        result = sandbox.execute("import tools\ntools.maths.times(2)")
    start = next(
        entry for entry in trail.get_entries(category="execution") if entry.action == "start"
    )
    calls = trail.get_entries(category="tool")
    assert [entry.action for entry in calls] == ["call", "returned"]
    assert {(entry.trace_id, entry.parent_id) for entry in calls} == {
        (start.trace_id, start.span_id)
    }
    assert calls[0].details["caller"] == result.execution_id


def test_what_a_tool_executes_belongs_to_the_call() -> None:
    trail = AuditLog()
    with Sandbox(policy=policy_named("strict"), pool=0, audit=trail) as inner:

        def run(arguments: dict[str, Any], _: Caller) -> Any:
            return inner.execute("n + 1", inputs={"n": arguments["n"]}).value

        tools = [Tool(spec("run"), run)]
        with Sandbox(policy=policy_named("strict"), tools=tools, pool=0, audit=trail) as sandbox:
            assert sandbox.execute("import tools\ntools.run(1)").value == 2
    starts = [entry for entry in trail.get_entries(category="execution") if entry.action == "start"]
    call = trail.get_entries(category="tool")[0]
    assert call.parent_id == starts[0].span_id
    assert starts[1].parent_id == call.span_id
    assert len({entry.trace_id for entry in (*starts, call)}) == 1


def test_an_answer_after_its_request_is_not_mixed_with_the_next_request() -> None:
    """The control socket is full of answers when the request ends, one of them sent in part."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    many = Tool(spec("many", parameters=schema), lambda given, _: "x" * int(given["n"]))
    rules = Tools(result_bytes=1 << 20)
    policy, broker = policy_named("strict", tools=rules), Broker(Offer([many]), rules=rules)
    code = (
        "import asyncio, time, tools\n"
        "calls = [asyncio.ensure_future(tools.many(n=n)) for _ in range(12)]\n"
        "await asyncio.sleep(0)\ntime.sleep(pause)"
    )
    owed = []
    with Sandbox(policy=policy, tools=broker, pool=0) as sandbox, sandbox.session() as session:
        # Two, three and four packets, of whatever fits.  A busy host needs longer to answer so much.
        for size, pause in itertools.product((100_000, 150_000, 250_000), (0.3, 1, 3)):
            if pause > 0.3 and owed[-1]:
                continue
            assert session.execute(code, inputs={"n": size, "pause": pause}).ok
            owed.append(session.cell._held.cell.owed)
            assert session.execute("6 * 7").value == 42
            assert session.execute("len(await tools.many(n=n))").value == size
    assert any(owed)


OUTLIVED = """
import os, threading
from tools import wait, begun
for _ in range(31): threading.Thread(target=wait, args=(1,), daemon=True).start()
begun(most)
os._exit(0)
"""


def test_tools_that_outlive_their_programs_are_bounded() -> None:
    """Each holds a thread of the host, and nobody can end it from outside."""
    go_on, changed, performed = threading.Event(), threading.Condition(), 0

    def wait(_: dict[str, Any], __: Caller) -> int:
        nonlocal performed
        with changed:
            performed += 1
            changed.notify_all()
        go_on.wait(60)
        return 1

    def begun(arguments: dict[str, Any], _: Caller) -> bool:
        """Wait until so many calls have begun."""
        with changed:
            return changed.wait_for(lambda: performed >= int(arguments["n"]), 10)

    tools = [Tool(spec("wait"), wait), Tool(spec("begun"), begun)]
    asks = "import tools\ntry:\n    seen = tools.wait(1)\nexcept tools.ToolError as error:\n    seen = error.kind, str(error)\nseen"
    with (
        AuditLog() as trail,
        Sandbox(policy=policy_named("strict"), tools=tools, audit=trail, pool=0) as sandbox,
    ):
        for number in range(1, 6):
            sandbox.execute(OUTLIVED, inputs={"most": 31 * number})
        assert 64 <= performed <= 64 + 31
        said = sandbox.execute(asks).value
        assert said[0] == "budget"
        assert "programs which have ended" in said[1]
        assert any("programs which have ended" in str(event) for event in trail.get_entries())
        with Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as other:
            assert other.execute("import tools\ntools.begun(1)").value is True, "another's are not"
        go_on.set()
        assert soon(lambda: sandbox.execute(asks).value == 1)
