"""Every limit of a policy, wherever it can be reached: in one call, over the calls of a session, by what
a session's threads do between two calls, and in a daemon.

The table names every field of `Limits`, and every cap of `Tools`; one that is missing fails here.  Each
program is also run without its limit, where it does what the limit keeps it from.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from cellwright import Broker, Sandbox, SandboxResult, Session, SessionLost
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Caller, Tool, tool, tool_of
from cellwright.policies.policy import MIB, Limits, Policy
from cellwright.policies.tool_rules import _CAPS
from cellwright.runner.channel import has_news
from tests.conftest import policy_named, soon, with_limits
from tests.harness.servers.daemon.daemons import Daemon, serving

pytestmark = pytest.mark.needs("cgroup")

Holds = Callable[[SandboxResult], bool]
_KIB = 1024


class Case(NamedTuple):
    """A limit, a program that exceeds it, and how a result shows that it did not get through.

    `step` exceeds it when it is run `times` times in one session, where the limit is of the whole
    session; without a step it is of each call.  `between` is a program, run by a thread after its
    call has ended, whose end the next call meets; `look` is that call; `ends`: the session is lost
    without a call.  `nothing_between` says why a limit has no meaning there.
    """

    limit: float
    program: str
    holds: Holds
    step: str = ""
    times: int = 1
    between: str = ""
    look: str = "seen"
    ends: bool = False
    nothing_between: str = ""
    given: dict[str, Any] = {}  # noqa: RUF012 - a constant


def ended(*reasons: str) -> Holds:
    return lambda result: result.reason in reasons


def refused_with(*numbers: int) -> Holds:
    return lambda result: isinstance(result.value, int) and result.value in numbers


def _errno_of(*lines: str) -> str:
    """Return a program whose value is the errno with which `lines` fail, else 0."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"import os, pathlib, time\nseen = 0\ntry:\n{body}except OSError as error:\n    seen = error.errno\nseen"


_KEPT = "kept = globals().setdefault('kept', [])"
_BURN = """
import os, time
def burn(seconds):  # by children: RLIMIT_CPU is of each process
    for _ in range(round(seconds / 0.05)):
        if os.fork() == 0:
            while time.process_time() < 0.05: pass
            os._exit(0)
        os.wait()
"""
_SHARE = """
import time
began = time.monotonic(), time.process_time()
while time.process_time() - began[1] < 0.1: pass
seen = (time.monotonic() - began[0]) / (time.process_time() - began[1])
seen
"""
_RECURSE = """
import sys
sys.setrecursionlimit(100_000)
def deeper(left): return left and [*map(deeper, [left - 1])]
deeper(2000) and None
seen = 0
"""
_REFUSED = "import socket\nfor _ in range({}):\n    try: socket.socket(socket.AF_PACKET)\n    except OSError: pass\n"

TABLE = {
    "wall_seconds": Case(
        0.2, "import time\ntime.sleep(0.5)", ended("wall_time"),
        nothing_between="a call has it; how long a session may be idle is a SessionSettings field",
    ),
    "cpu_seconds": Case(
        0.4, f"{_BURN}\nburn(0.8)", ended("cpu_time"), step=f"{_BURN}\nburn(0.2)", times=4,
        between=f"{_BURN}\nburn(30)", ends=True,
    ),
    "cpus": Case(
        0.2, _SHARE, lambda result: isinstance(result.value, float) and result.value > 2.0,
        between=_SHARE,
    ),
    "memory_bytes": Case(
        48 * MIB, f"len(bytearray({80 * MIB}))", ended("memory"),
        step=f"{_KEPT}\nkept.append(bytearray({16 * MIB}))", times=5,
        between=f"len(bytearray({80 * MIB}))", ends=True,
    ),
    "processes": Case(
        12, _errno_of("for _ in range(20):", "    if os.fork() == 0: time.sleep(60)"),
        refused_with(errno.EAGAIN),
        step=_errno_of("for _ in range(4):", "    if os.fork() == 0: time.sleep(60)"), times=4,
        between=_errno_of("for _ in range(20):", "    if os.fork() == 0: time.sleep(60)"),
    ),
    "output_bytes": Case(
        1000, "print('x' * 4999)", lambda result: result.truncated.get("stdout", 0) >= 4000,
        between="print('x' * 4999)",
    ),
    "output_total_bytes": Case(
        200_000, "for _ in range(500): print('x' * 999, flush=True)", ended("output"),
        between="for _ in range(500): print('x' * 999, flush=True)",
        look="thread.join()",
    ),
    "value_bytes": Case(
        1000, "'x' * 5000", lambda result: len(result.value) <= 1000,
        nothing_between="a call has a value; nothing is said between two",
    ),
    "artifact_bytes": Case(
        1000, "open('big', 'w').write('x' * 5000)\nNone", lambda result: not result.artifacts,
        between="open('big', 'w').write('x' * 5000)", look="None", given={"collect": ["big"]},
    ),
    "workspace_bytes": Case(
        64 * _KIB, _errno_of("for name in 'ab': pathlib.Path(name).write_bytes(bytes(40_000))"),
        refused_with(errno.ENOSPC),
        step=_errno_of("pathlib.Path(f'f{time.monotonic_ns()}').write_bytes(bytes(20_000))"), times=4,
        between=_errno_of("for n in range(5): pathlib.Path(f'f{n}').write_bytes(bytes(20_000))"),
    ),
    "workspace_inodes": Case(
        40, _errno_of("for n in range(60): os.symlink('x', f'l{n}')"), refused_with(errno.ENOSPC),
        step=_errno_of("for n in range(15): os.symlink('x', f'l{time.monotonic_ns()}')"), times=4,
        between=_errno_of("for n in range(60): os.symlink('x', f'l{n}')"),
    ),
    "open_files": Case(
        40, _errno_of("for _ in range(60): os.dup(0)"), refused_with(errno.EMFILE),
        step=_errno_of("for _ in range(15): os.dup(0)"), times=4,
        between=_errno_of("for _ in range(60): os.dup(0)"),
    ),
    "stack_bytes": Case(
        256 * _KIB, _RECURSE, ended("signal"),
        nothing_between="the main thread's stack has it; those of other threads are memory",
    ),
    "violations": Case(
        20, _REFUSED.format(40), ended("violation"),
        between=_REFUSED.format(40), ends=True,
    ),
}  # fmt: skip


# The caps of [tools], and what each makes of a program.  Between two calls of a session nobody can call
# a tool (tests/harness/tools/test_calls_from_cells.py), and a daemon offers none.
_CALL = """
from tools import numbers, nested, ToolError
def kind(work):
    try:
        return work()
    except ToolError as error:
        return error.kind
"""
TOOLS: dict[str, tuple[float, str, object, object]] = {  # limit, expression, its value with and without
    "calls": (2, "[kind(lambda: len(numbers(1))) for _ in range(3)]", [1, 1, "budget"], [1, 1, 1]),
    "calls_per_second": (
        0.001, "[kind(lambda: len(numbers(1))) for _ in range(2)]", [1, "budget"], [1, 1],
    ),
    "depth": (1, "kind(lambda: nested(1))", "denied", [0]),
    "argument_bytes": (50, "kind(lambda: len(numbers(1, 'x' * 99)))", "invalid_arguments", 1),
    "result_bytes": (100, "kind(lambda: numbers(99)) == [0] * 99", False, True),
    "result_rows": (10, "kind(lambda: numbers(99)) == [0] * 99", False, True),
}  # fmt: skip


def test_a_cap_on_tools_is_of_one_call_and_of_each_of_a_session() -> None:
    @tool
    def numbers(n: int, text: str = "") -> list[int]:
        """Return a list of `n` zeros."""
        return [0] * n

    def nest(arguments: dict[str, Any], caller: Caller) -> Any:
        return broker.call("numbers", arguments, caller)

    nested = replace(tool_of(numbers).spec, name="nested")
    broker = Broker(Offer([tool_of(numbers), Tool(nested, nest)]))
    wide = policy_named("strict")
    with Sandbox(policy=wide, tools=broker, pool=0) as sandbox:
        for field, (_, code, _, unbounded) in TOOLS.items():
            assert sandbox.execute(f"{_CALL}{code}").value == unbounded, field
    for field, (limit, code, bounded, _) in TOOLS.items():
        policy = replace(wide, tools=replace(wide.tools, **{field: limit}))
        with Sandbox(policy=policy, tools=broker, pool=0) as sandbox:
            assert sandbox.execute(f"{_CALL}{code}").value == bounded, field
            with sandbox.session() as session:
                for _ in range(2):
                    assert session.execute(f"{_CALL}{code}").value == bounded, field


def policy_of(field: str) -> Policy:
    wide = policy_named("standard")
    wide = replace(wide, name=field)
    return with_limits(wide, **{field: TABLE[field].limit}) if field in TABLE else wide


def test_the_tables_name_every_limit() -> None:
    assert set(TABLE) == {field.name for field in msgspec.structs.fields(Limits)}
    # `shown_bytes` is of what a model is shown of a result; a program gets the whole of it.
    assert set(TOOLS) | {"shown_bytes"} == set(_CAPS)
    for field, case in TABLE.items():
        assert bool(case.between) != bool(case.nothing_between), field


@pytest.fixture(scope="module")
def wide() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_of("wide"), pool=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module", params=TABLE)
def limited(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Sandbox]]:
    with Sandbox(policy=policy_of(request.param), pool=0) as sandbox:
        yield TABLE[request.param], sandbox


def test_in_one_call(limited: tuple[Case, Sandbox], wide: Sandbox) -> None:
    case, sandbox = limited
    result = sandbox.execute(case.program, **case.given)
    assert case.holds(result), result
    unbounded = wide.execute(case.program, **case.given)
    assert unbounded.ok
    # A busy host may give a program no more than the cap on its share would.
    assert sandbox.policy.name == "cpus" or not case.holds(unbounded)


def test_over_the_calls_of_a_session(limited: tuple[Case, Sandbox]) -> None:
    case, sandbox = limited
    with sandbox.session() as session:
        assert session.execute("1").value == 1
        _exceed_in(session, case)


def _exceed_in(session: Session, case: Case) -> None:
    if not case.step:
        assert case.holds(session.execute(case.program, **case.given))
        return
    results = []
    for _ in range(case.times):
        results.append(session.execute(case.step))
        if session.lost:
            break
    assert results[0].ok
    assert not case.holds(results[0])
    assert case.holds(results[-1]), results[-1]


LATER = """
import threading, os
begin, seen = threading.Event(), None
def work():
    global seen
    begin.wait()
    here = {{}}
    try:
        exec({program!r}, here)
    finally:
        seen = here.get("seen")
        os.write(1, b".")
thread = threading.Thread(target=work, daemon=True)
thread.start()
threading.Timer(0.05, begin.set).start()
"""


def test_between_two_calls_of_a_session(limited: tuple[Case, Sandbox]) -> None:
    case, sandbox = limited
    if case.nothing_between:
        return
    with sandbox.session() as session:
        assert session.execute(LATER.format(program=case.between)).ok
        cell = session.cell._held.cell  # type: ignore[attr-defined]
        if case.ends:
            assert soon(lambda: bool(session.lost) or has_news(cell.status.fileno()))
            with pytest.raises(SessionLost):
                session.execute("1")
            return
        assert soon(lambda: has_news(cell.stdout))  # the thread has come to its end
        result = session.execute(case.look, **case.given)
        assert case.holds(result), result


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    path = Path(tmp_path_factory.mktemp("daemon"), "s")
    policies = f"list(map(policy_of, {[*TABLE]!r}))"
    with serving(path, policies=policies, imports=f"from {__name__} import policy_of") as daemon:
        yield daemon


@pytest.mark.parametrize("field", TABLE)
def test_in_a_daemon(daemon: Daemon, field: str) -> None:
    case = TABLE[field]
    with daemon.sandbox(field) as sandbox:
        result = sandbox.execute(case.program, **case.given)
        assert case.holds(result), result
        with sandbox.session() as session:
            _exceed_in(session, case)
