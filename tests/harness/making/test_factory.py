"""Tools made of source code: checked, tested in cells, called in cells, and confined there."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import (
    AuditLog,
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    Policy,
    PolicyError,
    ProcessPermission,
    Sandbox,
    ToolFactory,
    ToolRegistry,
    Validation,
)
from cellwright.errors import (
    RegistryError,
    ToolArgumentsInvalid,
    ToolDenied,
    ToolExists,
    ToolFailed,
    ToolInvalid,
    ToolNotFound,
    ToolResultInvalid,
    ToolTestFailed,
)
from cellwright.harness.making import tool_executor as cells
from cellwright.harness.schemas.spec import Provenance
from cellwright.policies.policy import Filesystem
from cellwright.tools import ToolState
from tests.conftest import OPTIONAL, policy_named

DOUBLE = "def double(n: int) -> int:\n    return n * 2"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """What no tool of these tests may exceed; nothing runs in it."""
    with Sandbox(policy=policy_named("strict"), pool=0, audit=AuditLog()) as box:
        yield box


@pytest.fixture(scope="module")
def shared(sandbox: Sandbox) -> Iterator[ToolFactory]:
    with ToolFactory(sandbox) as factory:
        yield factory


@pytest.fixture
def factory(shared: ToolFactory) -> Iterator[ToolFactory]:
    """A factory without tools, whose cells are warm."""
    yield shared
    for spec in shared.registry.list_tools(retired=True):
        shared.registry.remove(spec.name)


# making and calling


def test_a_function_becomes_a_tool_and_is_called_in_a_cell(factory: ToolFactory) -> None:
    spec = factory.create_tool("double", "Double a number", DOUBLE)
    assert (spec.name, spec.state) == ("double", ToolState.DRAFT)
    assert spec.parameters["properties"] == {"n": {"type": "integer"}}
    assert spec.output_schema == {"type": "integer"}
    assert factory.call("double", {"n": 21}) == 42
    assert factory.test_tool("double", {"n": 21}) == 42
    assert factory.get_tool_source("double") == DOUBLE
    assert factory.get_tool("double") == spec
    assert factory.list_tools() == [spec]
    assert factory.registry.usage("double") == (1, 0, 0)


def test_every_call_has_a_cell_of_its_own(factory: ToolFactory) -> None:
    factory.create_tool(
        "count",
        "Count calls",
        "seen = []\ndef count() -> int:\n    seen.append(1)\n    return len(seen)",
    )
    assert [factory.call("count") for _ in range(3)] == [1, 1, 1]


def test_own_tests_run_before_it_is_kept(factory: ToolFactory) -> None:
    tests = [({"n": 2}, 4), {"input": {"n": 0}, "expected": 0}, "assert double(3) == 6"]
    assert (
        factory.create_tool("double", "Double a number", DOUBLE, tests=tests).state
        is ToolState.TESTED
    )


@pytest.mark.parametrize(
    "test",
    [
        ({"n": 2}, 5),
        ({"n": 2}, True),
        ({"n": "x"}, 4),
        ({}, 4),
        "assert double(2) == 5",
        "raise SystemExit(0)",
        "import sys; sys.exit()",
        "while True: pass",
        "import os",
        "double(",
    ],
    ids=str,
)
def test_a_tool_that_fails_its_own_test_is_not_kept(factory: ToolFactory, test: Any) -> None:
    with pytest.raises(ToolTestFailed, match="test 2"):
        factory.create_tool("double", "Double", DOUBLE, tests=[({"n": 1}, 2), test], timeout=2)
    assert factory.list_tools() == []


def test_what_happened_in_a_test_is_told(factory: ToolFactory) -> None:
    with pytest.raises(ToolTestFailed) as caught:
        factory.create_tool(
            "double", "Double", DOUBLE, tests=["print('seen')\nassert double(1) == 3"]
        )
    assert caught.value.result.stdout == "seen\n"
    assert caught.value.result.reason == "exception"


def test_a_new_version_has_the_tests_of_the_version_before(factory: ToolFactory) -> None:
    first = "def half(n: int) -> float:\n    return n / 2"
    spec = factory.create_tool("half", "Halve", first, tests=[({"n": 4}, 2.0)])
    with pytest.raises(ToolTestFailed, match=r"(?s)expected 2\.0, not 1\.0.*the version before"):
        factory.create_tool("half", "Halve", "def half(n: int) -> float:\n    return n / 4")
    assert factory.get_tool("half") == spec
    better = factory.create_tool("half", "Halve", "def half(n: int) -> float:\n    return n * 0.5")
    assert (better.version, better.tests, better.state) == (2, spec.tests, ToolState.TESTED)
    assert factory.create_tool("half", "Halve", better.source_code) == better
    bare = factory.create_tool("half", "Halve", first, tests=[])
    assert (bare.version, bare.tests) == (3, ())
    assert bare.state is not ToolState.TESTED


def test_a_tool_that_leaves_early_does_not_pass_for_tested(factory: ToolFactory) -> None:
    with pytest.raises(ToolTestFailed):
        factory.create_tool(
            "f", "Leave", "def f(): ...\nraise SystemExit(0)", tests=["assert False"]
        )


def test_types_that_are_more_than_json_are_made_and_unmade_in_the_cell(
    factory: ToolFactory,
) -> None:
    source = """
import enum
from dataclasses import dataclass
from typing import NamedTuple, Optional

class Color(enum.Enum):
    RED = "red"

class Pair(NamedTuple):
    left: int
    right: "Node"

@dataclass(slots=True)
class Node:
    value: int
    color: Optional[Color] = None
    children: "list[Node]" = ()

def walk(node: Node, tags: set[str], pairs: dict[str, Pair], at: tuple[int, ...] = ()) -> list[Node]:
    assert isinstance(tags, set) and isinstance(at, tuple)
    assert pairs["a"].right.value == 9
    assert node.children[0].color is Color.RED
    return [node, *node.children]
"""
    factory.create_tool("walk", "Walk a tree", source)
    node = {"value": 1, "children": [{"value": 2, "color": "red"}]}
    given = {"node": node, "tags": ["x"], "pairs": {"a": [1, {"value": 9}]}, "at": [1]}
    assert factory.call("walk", given) == [
        {"value": 1, "color": None, "children": [{"value": 2, "color": "red", "children": []}]},
        {"value": 2, "color": "red", "children": []},
    ]
    with pytest.raises(ToolArgumentsInvalid):
        factory.call("walk", given | {"node": {"value": "1"}})


def test_large_integers_stay_whole(factory: ToolFactory) -> None:
    factory.create_tool("power", "Raise two", "def power(n: int) -> int: return 2 ** n")
    assert factory.call("power", {"n": 100}) == 2**100
    source = "def power(n: int): return 2 ** n"
    factory.create_tool("power", "Raise", source, tests=[({"n": 99}, 2**99)])
    assert factory.registry.get("power").tests[0].expected == 2**99


def test_an_async_function_is_awaited(factory: ToolFactory) -> None:
    source = "import asyncio\nasync def later(n: int) -> int:\n    await asyncio.sleep(0)\n    return n + 1"
    factory.create_tool("later", "Add one later", source)
    assert factory.call("later", {"n": 1}) == 2


@pytest.mark.parametrize(
    "given", [{}, {"n": "1"}, {"n": 1, "m": 2}, {"n": None}, {"n": object()}, [], "n", 1]
)
def test_arguments_that_do_not_fit_never_reach_a_cell(factory: ToolFactory, given: Any) -> None:
    factory.create_tool("double", "Double a number", DOUBLE)
    for call in (factory.call, factory.test_tool):
        with pytest.raises(ToolArgumentsInvalid):
            call("double", given)
    assert factory.registry.usage("double") == (0, 0, 0)


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("raise ValueError('out of order')", ToolFailed, "ValueError: out of order"),
        ("raise SystemExit(3)", ToolFailed, "exit code 3"),
        ("while True: pass", ToolFailed, "longer than 1 s"),
        ("return [0] * 10 ** 9", ToolFailed, "134217728 bytes"),
        ("return object()", ToolResultInvalid, "not JSON: .*an object of type object"),
        (
            "return [{'a': print}]",
            ToolResultInvalid,
            r"not JSON: \$\[0\].a: an object of type builtin_f",
        ),
        (
            "return 'x' * (20 << 20)",
            ToolResultInvalid,
            "20971522 bytes, more than limits.value_bytes",
        ),
        ("return float('nan')", ToolResultInvalid, "nan is not a number of JSON"),
        ("return '\\ud800'", ToolResultInvalid, "a lone surrogate"),
        ("return {(1, 2): 3}", ToolResultInvalid, "a key of type tuple"),
        ("return {1: 1, '1': 2}", ToolResultInvalid, "two keys are '1'"),
        ("a = []; a.append(a); return a", ToolResultInvalid, "or it holds itself"),
        (
            "async def g(): ...\n    return g()",
            ToolResultInvalid,
            "a coroutine that was not awaited",
        ),
        ("return (1 / each for each in [1, 0])", ToolFailed, "ZeroDivisionError"),
        ("return 'text'", ToolResultInvalid, "not of type"),
        ("return None", ToolResultInvalid, "not of type"),
    ],
)
def test_what_a_tool_does_wrong_is_a_typed_error_and_a_failure(
    factory: ToolFactory, body: str, error: type[Exception], said: str
) -> None:
    factory.create_tool("bad", "Do it", f"def bad() -> int:\n    {body}", timeout=1.0)
    with pytest.raises(error, match=said) as caught:
        factory.call("bad")
    assert factory.registry.usage("bad").failures == 1
    if isinstance(caught.value, ToolFailed):
        assert not caught.value.result.ok


BOTH_WAYS = """
import datetime, decimal, enum, uuid
from collections.abc import AsyncIterator, Iterator

class Colour(enum.Enum):
    RED = "red"

def same(
    when: datetime.datetime, day: datetime.date, at: datetime.time, long: datetime.timedelta,
    price: decimal.Decimal, data: bytes, names: set[str], id: uuid.UUID, colour: Colour,
    days: list[datetime.date],
) -> dict:
    given = dict(
        when=when, day=day, at=at, long=long, price=price, data=data, names=names, id=id,
        colour=colour, days=days,
    )
    kinds = [type(each).__name__ for each in (*given.values(), days[0])]
    return given | {"kinds": kinds}
"""


def test_dates_decimals_sets_and_bytes_go_in_and_come_out_as_their_schema_says(
    factory: ToolFactory,
) -> None:
    given = {
        "when": "2026-11-22T10:00:00+00:00", "day": "2026-11-22", "at": "10:30:00",
        "long": "P1DT90.5S", "price": "1.10", "data": "aGVsbG8=", "names": ["a", "b"],
        "id": "00000000-0000-0000-0000-000000000001", "colour": "red", "days": ["2026-11-22"],
    }  # fmt: skip
    spec = factory.create_tool("same", "Return what it is given", BOTH_WAYS)
    result = factory.call("same", given)
    assert result.pop("kinds") == [
        "datetime", "date", "time", "timedelta", "Decimal", "bytes", "set", "UUID", "Colour", "list", "date",
    ]  # fmt: skip
    assert result == given
    assert spec.parameters["properties"]["when"] == {"type": "string", "format": "date-time"}
    assert spec.parameters["properties"]["data"] == {"type": "string", "contentEncoding": "base64"}
    with pytest.raises(ToolFailed, match="not-a-day"):
        factory.call("same", given | {"day": "not-a-day"})


@pytest.mark.parametrize(
    "form",
    ["def count(n: int) -> Iterator[int]:", "async def count(n: int) -> AsyncIterator[int]:"],
)
def test_a_generator_gives_a_list(factory: ToolFactory, form: str) -> None:
    source = f"from collections.abc import AsyncIterator, Iterator\n{form}\n    for each in range(n): yield each * 2"
    factory.create_tool("count", "Count", source)
    assert factory.call("count", {"n": 3}) == [0, 2, 4]


def test_another_makers_failing_calls_do_not_retire_a_tool(sandbox: Sandbox) -> None:
    with ToolRegistry() as registry, ToolFactory(sandbox, registry, maker="alice") as alice:
        alice.create_tool("div", "Divide", "def div(a: int, b: int) -> float:\n    return a / b")
        with ToolFactory(sandbox, registry, maker="mallory") as mallory:
            for _ in range(11):
                with pytest.raises(ToolFailed, match="ZeroDivisionError"):
                    mallory.call("div", {"a": 1, "b": 0})
        assert alice.call("div", {"a": 4, "b": 2}) == 2


def test_a_tool_can_only_be_made_to_call_what_there_is(factory: ToolFactory) -> None:
    factory.create_tool("double", "Double", DOUBLE)
    source = "import tools\ndef four(n: int) -> int:\n    return tools.double(n=tools.double(n=n))"
    with pytest.raises(
        ToolInvalid, match="calls: there is no tool 'dubble'\nhint: .*there are double"
    ):
        factory.create_tool("four", "Multiply by four", source, calls=["dubble"])
    factory.create_tool("four", "Multiply by four", source, calls=["double"])
    assert factory.call("four", {"n": 2}) == 8


READ_IT = """from pathlib import Path
def read_it(path: str) -> list:
    with open(path) as file:
        return [file.read(), Path(path).name]
"""


def test_what_its_permissions_allow_the_source_of_a_tool_may_import(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    tmp_path.chmod(0o755)
    granted = PermissionSet([FilePermission(allowed_paths=[str(tmp_path / "note.txt")])])
    with ToolFactory(pool=0, optional_layers=OPTIONAL) as factory:
        with pytest.raises(ToolInvalid, match="Blocked import: pathlib\nhint: .*FilePermission"):
            factory.create_tool("read_it", "Read a file", READ_IT)
        with pytest.raises(ToolInvalid, match="Blocked import: socket\nhint: .*NetworkPermission"):
            factory.create_tool("dial", "Dial", "import socket\ndef dial(): ...")
        factory.create_tool("read_it", "Read a file", READ_IT, permissions=granted)
        path = str(tmp_path / "note.txt")
        assert factory.call("read_it", {"path": path}) == ["hello", "note.txt"]
        with pytest.raises(ToolFailed, match="FileNotFoundError"):
            factory.call("read_it", {"path": "/etc/hostname"})
        with pytest.raises(ToolInvalid, match="import: subprocess\nhint: .*ProcessPermission"):
            factory.create_tool("go", "Go", "import subprocess\ndef go(): ...", permissions=granted)
        hosts = PermissionSet([NetworkPermission(allowed_hosts=["api.example.org"])])
        factory.create_tool("dial", "Dial", "import socket\ndef dial(): ...", permissions=hosts)


def test_an_operators_own_list_holds_for_a_tool_whatever_its_permissions(tmp_path: Path) -> None:
    granted = PermissionSet([FilePermission(allowed_paths=[str(tmp_path)])])
    own = Validation(blocked_imports=("pathlib",), blocked_builtins=())
    shown = Filesystem(read=(str(tmp_path),))
    policy = policy_named("strict", filesystem=shown, validation=own)
    with (
        Sandbox(policy=policy, pool=0) as ceiling,
        ToolFactory(ceiling, pool=0) as factory,
    ):
        with pytest.raises(ToolInvalid, match="Blocked import: pathlib"):
            factory.create_tool("read_it", "Read a file", READ_IT, permissions=granted)
        factory.create_tool(
            "names", "List", "import os\ndef names() -> list: return os.listdir('/')"
        )


def test_a_tool_that_calls_itself_too_deeply_says_so_once(factory: ToolFactory) -> None:
    source = (
        "import tools\ndef fact(n: int) -> int:\n    return 1 if n < 2 else n * tools.fact(n=n - 1)"
    )
    factory.create_tool("fact", "Factorial", source, calls=["fact"])
    assert factory.call("fact", {"n": 3}) == 6
    with pytest.raises(ToolFailed) as caught:
        factory.call("fact", {"n": 9})
    assert str(caught.value).startswith("fact > fact > fact > fact > fact: 4 tools have called")
    assert str(caught.value).count("tools.depth") == 1


def test_a_tool_that_keeps_failing_is_retired_and_its_older_version_is_not(
    factory: ToolFactory,
) -> None:
    factory.create_tool("f", "Do it", "def f(): return 1")
    factory.create_tool("f", "Do it", "def f(): raise ValueError")
    for _ in range(10):
        with pytest.raises(ToolFailed):
            factory.call("f")
    with pytest.raises(ToolDenied, match="retired"):
        factory.call("f")
    with pytest.raises(ToolFailed):
        factory.test_tool("f")
    assert factory.call("f@1") == 1
    factory.create_tool("f", "Do it", "def f(): return 3")
    assert factory.call("f") == 3


def test_the_same_tool_again_is_the_tool_that_there_is(factory: ToolFactory) -> None:
    first = factory.create_tool("double", "Double a number", DOUBLE)
    assert factory.create_tool("Double", "Double a number", DOUBLE) == first
    again = factory.create_tool("double", "Double a number", DOUBLE + "\n")
    assert again.version == first.version + 1


def test_another_tool_that_does_the_same_is_offered_first(factory: ToolFactory) -> None:
    factory.create_tool("double", "Double a number", DOUBLE)
    twice = DOUBLE.replace("double", "twice")
    with pytest.raises(ToolExists, match="does the same") as caught:
        factory.create_tool("twice", "Doubles the number", twice)
    assert caught.value.existing == "double"
    assert (
        factory.create_tool("twice", "Doubles the number", twice, allow_similar=True).name
        == "twice"
    )


def test_a_given_schema_takes_the_place_of_the_inferred_one(factory: ToolFactory) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
    }
    factory.create_tool("double", "Double", DOUBLE, input_schema=schema)
    assert factory.call("double", {"n": 9}) == 18
    with pytest.raises(ToolArgumentsInvalid, match="maximum"):
        factory.call("double", {"n": 10})


def test_versions_are_called_by_number_and_removed_together(factory: ToolFactory) -> None:
    for factor in (1, 2, 3):
        factory.create_tool("times", "Multiply", f"def times(n: int) -> int: return n * {factor}")
    assert [factory.call(name, {"n": 5}) for name in ("times@1", "times@2", "times")] == [5, 10, 15]
    factory.remove_tool("times")
    for name in ("times", "times@1"):
        with pytest.raises(ToolNotFound):
            factory.call(name, {"n": 5})


def test_a_maker_clears_only_its_own_tools(sandbox: Sandbox) -> None:
    with ToolRegistry() as registry:
        ann, bob = (ToolFactory(sandbox, registry, maker=maker) for maker in ("ann", "bob"))
        with ann, bob:
            ann.create_tool("one", "One", "def one(): return 1")
            bob.create_tool("two", "Two", "def two(): return 2")
            assert bob.call("one") == 1
            with pytest.raises(ToolDenied, match="another agent"):
                bob.remove_tool("one")
            with pytest.raises(ToolExists, match="another agent"):
                bob.create_tool("one", "Another", "def one(): return 3")
            assert bob.clear_all() == 1
            assert [spec.name for spec in ann.list_tools()] == ["one"]


def test_calls_from_many_threads_each_get_their_own_answer(factory: ToolFactory) -> None:
    factory.create_tool("double", "Double a number", DOUBLE)
    found: dict[int, int] = {}

    def work(start: int) -> None:
        for n in range(start, start + 10):
            found[n] = factory.call("double", {"n": n})

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 80, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: n * 2 for n in range(80)}
    assert factory.registry.usage("double").uses == 80


# permissions of tools


def test_a_source_that_says_what_it_must_not_is_refused_before_it_runs(
    factory: ToolFactory,
) -> None:
    for source, said in {
        "import socket\ndef f(): socket.socket()": "Blocked import: socket",
        "def f(): open('/etc/passwd')": "Blocked builtin: open",
        "def f(x=().__class__.__bases__): ...": "Blocked dunder: __bases__",
        "def f(): ...\n" + "#" * 300_000: "Blocked size",
        f"def f():\n    '''{'x' * 10_000_000}'''": "Blocked size",
    }.items():
        with pytest.raises(ToolInvalid, match=said):
            factory.create_tool("f", "Do it", source)
    assert factory.list_tools() == []


SNEAKY = """
import codecs, string
def f() -> str:
    reach = string.Formatter().get_field("0.builtins.open", (codecs,), {})[0]
    return reach("/etc/hostname").read()
"""
SNEAKY_SOCKET = """
import asyncio, string
def f() -> str:
    reach = string.Formatter().get_field("0.events.socket.socket", (asyncio,), {})[0]
    reach(2, 1).connect(("127.0.0.1", 1))
"""


def test_what_hides_from_the_checks_meets_the_kernel(
    factory: ToolFactory, sandbox: Sandbox
) -> None:
    """The checks see nothing in it; with the file shown it reads it, so it is the kernel that refuses."""
    assert sandbox.validate_source(SNEAKY) == (True, None)
    factory.create_tool("f", "Read a file", SNEAKY)
    with pytest.raises(ToolFailed, match="FileNotFoundError") as caught:
        factory.call("f")
    assert any("/etc/hostname" in str(each.arguments) for each in caught.value.result.violations)


def test_a_socket_that_hides_from_the_checks_is_a_violation_in_the_trail(
    factory: ToolFactory, sandbox: Sandbox
) -> None:
    assert sandbox.validate_source(SNEAKY_SOCKET) == (True, None)
    factory.create_tool("f", "Connect", SNEAKY_SOCKET)
    with pytest.raises(ToolFailed, match="PermissionError"):
        factory.call("f")
    assert sandbox.audit is not None
    denied = [entry.action for entry in sandbox.audit.get_denied_actions()]
    assert "socket" in denied


def read_tool(factory: ToolFactory, permissions: PermissionSet | None) -> Callable[[str], Any]:
    source = SNEAKY.replace("def f()", "def read(path: str)").replace('"/etc/hostname"', "path")
    factory.create_tool("read", "Read a file", source, permissions=permissions)
    return lambda path: factory.call("read", {"path": path})


def test_a_permission_is_what_the_kernel_lets_through(tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text("seen")
    (tmp_path / "other").write_text("not seen")
    policy = Policy(filesystem=Filesystem(read=(str(tmp_path),)), optional_layers=OPTIONAL)
    allowed = PermissionSet([FilePermission(allowed_paths=[f"{tmp_path}/allowed"])])
    with Sandbox(policy=policy, pool=0) as sandbox, ToolFactory(sandbox) as factory:
        read = read_tool(factory, None)
        with pytest.raises(ToolFailed, match="FileNotFoundError"):
            read(f"{tmp_path}/allowed")
        read = read_tool(factory, allowed)
        assert read(f"{tmp_path}/allowed") == "seen"
        with pytest.raises(ToolFailed, match="FileNotFoundError"):
            read(f"{tmp_path}/other")


@pytest.mark.parametrize(
    "permission",
    [
        FilePermission(allowed_paths=[str(Path(__file__).parent)]),
        FilePermission(level=PermissionLevel.WRITE, allowed_paths=[str(Path(__file__).parent)]),
        ProcessPermission(allow_subprocess=True, allowed_commands=["true"]),
        NetworkPermission(allowed_hosts=["api.example.org"]),
    ],
)
def test_no_tool_may_do_what_its_sandbox_may_not(factory: ToolFactory, permission: Any) -> None:
    with pytest.raises(PolicyError, match="more than the sandbox allows"):
        factory.create_tool("double", "Double", DOUBLE, permissions=PermissionSet([permission]))
    assert factory.list_tools() == []


def test_a_few_sandboxes_are_kept_and_none_is_closed_under_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "ALIVE", 2)
    policy = Policy(filesystem=Filesystem(read=(str(tmp_path),)), optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as sandbox, ToolFactory(sandbox) as factory:
        for number in range(4):
            (tmp_path / str(number)).touch()
            granted = PermissionSet([FilePermission(allowed_paths=[f"{tmp_path}/{number}"])])
            factory.create_tool(f"t{number}", f"Number {number}", f"def t{number}() -> int: return {number}",
                                permissions=granted)  # fmt: skip
        found: list[int] = []

        def work(number: int) -> None:
            found.extend(factory.call(f"t{number}") for _ in range(3))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted([0, 1, 2, 3] * 3)
        assert len(factory._sandboxes._sandboxes) == 2


def test_a_sandboxs_own_lists_hold_for_its_tools() -> None:
    own = Validation(blocked_imports=("json",), blocked_builtins=())
    with (
        Sandbox(policy=policy_named("strict", validation=own), pool=0) as sandbox,
        ToolFactory(sandbox) as factory,
    ):
        with pytest.raises(ToolInvalid, match="Blocked import: json"):
            factory.create_tool("f", "Do it", "import json\ndef f(): ...")
        factory.create_tool("f", "Do it", "import os\ndef f() -> str: return os.getcwd()")
        assert factory.call("f") == "/workspace"


# tools that call tools


def test_a_tool_calls_what_its_spec_lists_and_nothing_else(factory: ToolFactory) -> None:
    factory.create_tool("double", "Double a number", DOUBLE)
    factory.create_tool("triple", "Triple it", "def triple(n: int) -> int: return n * 3")
    source = (
        "from tools import call_tool\ndef both(name: str) -> int: return call_tool(name, {'n': 7})"
    )
    factory.create_tool("both", "Call another", source, calls=["double"])
    assert factory.call("both", {"name": "double"}) == 14
    with pytest.raises(ToolFailed, match="may not call"):
        factory.call("both", {"name": "triple"})
    with pytest.raises(ToolTestFailed, match="may not call"):
        factory.create_tool(
            "other", "Call again", source, calls=["double"], tests=["both('triple')"],
            allow_similar=True,
        )  # fmt: skip


def test_a_tool_that_calls_itself_ends(factory: ToolFactory) -> None:
    source = "from tools import call_tool\ndef again(n: int) -> int: return call_tool('again', {'n': n + 1})"
    factory.create_tool("again", "Call itself", source, calls=["again"])
    with pytest.raises(ToolFailed, match="called each other already"):
        factory.call("again", {"n": 0})


def test_programs_in_cells_call_made_tools(factory: ToolFactory) -> None:
    factory.create_tool("double", "Double a number", DOUBLE)
    with Sandbox(policy=policy_named("strict"), pool=0, tools=factory.broker) as sandbox:
        result = sandbox.execute("from tools import double\n[double(n) for n in range(3)]")
    assert result.value == [0, 2, 4], result.error


def test_a_risky_tool_asks(sandbox: Sandbox) -> None:
    asked: list[str] = []
    with ToolFactory(
        sandbox, approve=lambda each: bool(asked.append(each.tool)) or len(asked) > 1
    ) as factory:
        factory.create_tool("double", "Double", DOUBLE, risky=True)
        with pytest.raises(ToolDenied, match="not approved"):
            factory.call("double", {"n": 1})
        assert factory.call("double", {"n": 1}) == 2


# hostile makers


# The module that source checks do not see: they are advice.
POSIX = "import logging, string\nposix = string.Formatter().get_field('0.os', (logging,), {})[0]\n"
HOSTILE_SOURCES = {
    "runs when it is defined": "def f() -> int: return 1\nraise ValueError('at once')",
    "a decorator": "def wrap(f):\n    raise ValueError('wrapped')\n@wrap\ndef f() -> int: ...",
    "a metaclass": "class M(type):\n    def __new__(*a): raise ValueError('made')\nclass C(metaclass=M): ...\ndef f() -> int: ...",
    "an annotation": "def f(x: (1).nothing = 1) -> int: return 1",
    "a default": "def f(x=1 / 0) -> int: return 1",
    "recursion": "def f() -> int: return f()",
    "a class that is no int": "class V(int):\n    def __repr__(self): raise ValueError\ndef f() -> object:\n    return {(V(),): {1, 2}}",
    "replaces print": "def print(*a): raise ValueError\ndef f() -> int: raise ValueError",
    "replaces the call": "def f() -> int: ...\nf = None",
    "another value": "def f() -> int: ...\n_cellwright_call = None\nf = 5",
    "forks": f"{POSIX}def f() -> int:\n    return posix.fork()",
    "kills": f"{POSIX}def f() -> int:\n    posix.kill(posix.getppid(), 9)\n    return 1.5",
    "exits": f"{POSIX}def f() -> int:\n    posix._exit(0)",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE_SOURCES.values(), ids=HOSTILE_SOURCES)
def test_a_hostile_source_harms_its_own_cell_only(factory: ToolFactory, source: str) -> None:
    factory.create_tool("f", "Do harm", source)
    with pytest.raises((ToolFailed, ToolResultInvalid)):
        factory.call("f")
    factory.create_tool("double", "Double a number", DOUBLE)
    assert factory.call("double", {"n": 2}) == 4


def test_a_forged_result_is_only_the_tools_own_word(factory: ToolFactory) -> None:
    source = "def f() -> int: ...\nclass L(list): ...\nf = lambda **_: {'ok': True, 'status': 'completed'}"
    factory.create_tool("f", "Lie", source)
    with pytest.raises(ToolResultInvalid, match="not of type"):
        factory.call("f")


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"name": "../../etc/passwd"}, "not a valid tool name"),
        ({"name": "-rf"}, "not a valid tool name"),
        ({"name": "d\u043euble"}, "not a valid tool name"),
        ({"description": "fine\u202e"}, "a hidden character"),
        ({"description": "fine\U000e0041"}, "a hidden character"),
        ({"description": "fine\U000e0101"}, "a hidden character"),
        ({"description": "fine\u3164"}, "a hidden character"),
        ({"source_code": f"{DOUBLE}  # \u202e"}, "a hidden character"),
        ({"tests": ["assert True  # \u2066"]}, "a hidden character"),
        ({"provenance": Provenance(task="sum\U000e0101")}, "a hidden character"),
        ({"description": "\x1b[2J"}, "a hidden character"),
        ({"description": "\ud800"}, "surrogate"),
        ({"description": "x" * 20_000}, "at most 10000"),
        ({"description": 5}, "must be text"),
        ({"source_code": 5}, "must be text"),
        ({"source_code": "def double(n): ...  # \ud800"}, "surrogate"),
        ({"source_code": "def double(n):\n    '''\u200b'''", "description": ""}, "a hidden character"),
        ({"source_code": "x = 1 \\"}, "source"),
        ({"source_code": "def double(n: int): ...\nx = '''"}, "source"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"permissions": {"allow": "all"}}, "permissions"),
        ({"calls": "double"}, "calls"),
        ({"calls": ["../x"]}, "not a valid tool name"),
        ({"tags": ["\x00"]}, "a hidden character"),
        ({"tests": [5]}, "tests"),
        ({"tests": [{"input": {"n": 1}, "expected": 2, "admin": True}]}, "tests"),
        ({"tests": [({"n": object()}, 1)]}, "tests"),
        ({"tests": ["assert True"] * 101}, "at most 100"),
        ({"input_schema": []}, "schema"),
        ({"input_schema": {"$ref": "http://127.0.0.1:1/"}}, "outside"),
        ({"input_schema": {"properties": {"n": {"pattern": "(a"}}}}, "patterns must be valid"),
        ({"input_schema": {"properties": {"n": {"pattern": r"^(\w+\s?)*$"}, "other": {}}}}, "does not match the parameters"),
        ({"input_schema": {"properties": {}}}, "does not match the parameters"),
        ({"input_schema": {"properties": {"n": {"description": "\u2066"}}}}, "a hidden character"),
        ({"input_schema": {"type": "array", "properties": {"n": {}}}}, "does not match the parameters"),
    ],
)  # fmt: skip
def test_invalid_arguments_and_hidden_text_are_refused(
    factory: ToolFactory, about: dict[str, Any], said: str
) -> None:
    usual: dict[str, Any] = {"name": "double", "description": "Double", "source_code": DOUBLE}
    with pytest.raises((ToolInvalid, PolicyError), match=said):
        factory.create_tool(**(usual | about))
    assert factory.list_tools() == []


def test_words_of_a_tool_do_not_reach_a_terminal_as_they_are(factory: ToolFactory) -> None:
    factory.create_tool("f", "Fail", "def f(): raise ValueError('\\x1b[2J\\u202e')")
    with pytest.raises(ToolFailed) as caught:
        factory.call("f")
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)


# owning and closing


def test_a_factory_closes_what_it_made_and_nothing_else(sandbox: Sandbox) -> None:
    with ToolRegistry() as registry:
        factory = ToolFactory(sandbox, registry)
        factory.create_tool("double", "Double", DOUBLE)
        factory.close()
        factory.close()
        with pytest.raises(Exception, match="closed"):
            factory.call("double", {"n": 1})
        assert registry.get("double").version == 1
    assert sandbox.execute("1").value == 1
    own = ToolFactory(sandbox)
    own.close()
    with pytest.raises(RegistryError, match="closed"):
        own.list_tools()


def test_tools_are_there_in_the_next_process(tmp_path: Path, sandbox: Sandbox) -> None:
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path) as registry, ToolFactory(sandbox, registry) as factory:
        factory.create_tool("double", "Double", DOUBLE, tests=[({"n": 1}, 2)])
    with ToolRegistry(path) as registry, ToolFactory(sandbox, registry) as factory:
        assert factory.call("double", {"n": 4}) == 8
        assert factory.get_tool("double").state is ToolState.TESTED
