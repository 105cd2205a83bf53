"""Pure expressions that Monty answers: the same answers as those of cells, and no more than the policy
allows."""

import builtins
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cellwright import HostSettings, Sandbox
from cellwright.harness.sandbox.calls.monty_evaluator import MontyEvaluator
from cellwright.policies.advice.explanation import explain
from cellwright.policies.errors import PolicyError
from cellwright.policies.narrowing import exceeds, narrow
from cellwright.policies.policy import Evaluator, Isolation, Limits, Policy, check_policy
from cellwright.policies.profiles.loading import load_policy, policy_of_data, profile_names
from cellwright.policies.source.pure import is_plain_value, is_pure
from cellwright.runner.requests.request import Request
from cellwright.runner.requests.result import SandboxResult
from tests.conftest import policy_named, with_limits
from tests.harness.packages.wheels import good_wheel, store_at

pytestmark = pytest.mark.needs("monty")
MONTY = Evaluator(monty=True)


@pytest.fixture(scope="module")
def monty() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict", evaluator=MONTY), pool=2) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def cells() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=4) as sandbox:
        yield sandbox


def said(result: SandboxResult) -> tuple[Any, ...]:
    """Return what a caller sees of a program; `repr` tells 1 from True and 1.0, and 0.0 from -0.0."""
    return (
        result.status, result.reason, repr(result.value), result.error, result.stdout, result.stderr,
        result.exit_code, result.files, result.artifacts,
    )  # fmt: skip


TAKEN = [
    "1 + 1", "2 ** 10", "7 // -2", "-7 % 3", "10 ** 15", "0.1 + 0.2", "1e300 * 1e5 > 1", "5e-324", "-0.0", "1e22", "1e16",
    "3 / 7", "int(-1.9)", "round(2.5)", "abs(-3)", "divmod(-7, 2)[0]", "1 << 20", "~5", "True + 1", "not 0", "1 < 2 < 3",
    "'a' + 'b'", "'ab' * 3", "'abc'[::-1]", "'a' in 'abc'", "'a,b'.split(',')", "' a '.strip()", "','.join(['a', 'b'])",
    "'abc'.upper()", "'abc'.replace('b', 'x')", "'abc'.find('c')", "str(1.5)", "str([1, 'a', None])", "len('abc')",
    "[x * 2 for x in range(5) if x % 2]", "{str(x): x for x in range(3)}", "sorted([3, 1, 2], reverse=True)",
    "list(zip([1], [2]))[0][1]", "list(reversed([1, 2]))", "any([0, 1])", "all([])", "min(3, 1)", "max([1, 5])", "sum(range(10))",
    "{'b': 1, 'a': 2}", "dict([['a', 1]]).get('b')", "1 if [] else 2", "None", "'x' if True else 3", "[1, [2, {'a': None}]]",
    "sum(x for x in [1, 2])", "int('12')", "float('1.5')", "bool([])", "tuple([1])[0]",
]  # fmt: skip


@pytest.mark.parametrize("code", TAKEN)
def test_an_expression_is_answered_without_a_cell_and_as_in_one(
    code: str, monty: Sandbox, cells: Sandbox
) -> None:
    result = monty.execute(code)
    assert (result.evaluator, result.layers, result.pool_hit) == ("monty", (), False)
    assert said(result) == said(cells.execute(code))


def test_inputs_are_answered_as_in_a_cell(monty: Sandbox, cells: Sandbox) -> None:
    inputs = {"n": 3, "text": "a b", "many": [1, 2.5, None], "record": {"key": [True]}}
    for code in (
        "n * 2",
        "text.split()",
        "[x for x in many if x]",
        "record['key'][0]",
        "sorted(record)",
    ):
        result = monty.execute(code, inputs=inputs)
        assert result.evaluator == "monty"
        assert said(result) == said(cells.execute(code, inputs=inputs))


FELL = [
    "1 / 0", "[][1]", "{}['a']", "'a' + 1", "unknown", "int('x')", "max([])", "import os", "open('/etc/passwd')", "print(1)",
    "x = 1", "(lambda: 1)()", "[].append(1)", "().__class__", "'a'.__class__", "eval('1')", "exec('1')", "getattr(1, 'real')",
    "{1, 2}", "hash('a')", "1 is 1", "'é'", "'\\u00e9'", "chr(233)", "f'{1:.2f}'", "'%d' % 1", "'{}'.format(1)", "round(2.675, 2)",
    "sum([0.1] * 10)", "0.1 ** 3", "5.5 % 2", "(1, 2)", "1j", "b'a'", "10 ** 100", "float('nan')", "1e308 * 10", "range(3)",
    "{1: 2}", "await x", "[y for x in [1] for y in [x] if (z := y)]", "'a' 'b'; 1", "id(1)", "type(1)", "globals()", "input()",
    "'\\x1c a'.split()", "sorted([1], key=abs)", "min([1], default=2)", "print", "len", "...", "[*[1]]", "{**{}}", "dict(**{})",
    "1 if True else open('/etc/passwd')", "[range(3)]", "zip([1], [2])", "(x for x in [1])", "[range(3)][0]", "1 in range(3)",
    "max(range(3), range(4))", "[v for v in [1]][0] + v", "not reversed([1])", "str(range(3))", "d.keys()", "\"\".join", "1 +", "(" * 500, "[x async for x in y]", "yield 1",
]  # fmt: skip


@pytest.mark.parametrize("code", FELL)
def test_whatever_else_there_is_falls_to_a_cell(code: str, monty: Sandbox, cells: Sandbox) -> None:
    """Errors too, so that they are those of the Python of cells."""
    result = monty.execute(code)
    assert result.evaluator == ""
    assert set(result.layers) == set(cells.execute("pass").layers)
    assert (
        result.error is not None or result.value is not None or result.status.value == "completed"
    )


def test_a_call_with_files_or_in_another_language_gets_a_cell(monty: Sandbox) -> None:
    assert monty.execute("1 + 1", files={"a": "b"}).evaluator == ""
    assert monty.execute("1 + 1", collect=["*"]).evaluator == ""
    with monty.session() as session:
        assert session.execute("1 + 1").evaluator == ""


def test_a_call_with_packages_gets_a_cell(tmp_path: Path) -> None:
    good_wheel(tmp_path, {"thing.py": b""})
    policy = policy_named("strict", evaluator=MONTY)
    store = store_at(tmp_path / "store", tmp_path)
    patient = Limits(wall_seconds=300.0)  # a set is built within the time of the call
    with Sandbox(
        policy=replace(policy, limits=patient), pool=0, host=HostSettings(package_store=store)
    ) as sandbox:
        assert sandbox.execute("1 + 1").evaluator == "monty"
        assert sandbox.execute("1 + 1", packages=["thing"]).evaluator == ""


@pytest.mark.parametrize(
    "code",
    [
        "len([x for x in range(10 ** 7)])", "len('a' * (10 ** 8))", "sum(range(10 ** 8))", "len([0] * 10 ** 7)",
    ],
)  # fmt: skip
def test_what_takes_long_or_much_is_ended_and_falls_to_a_cell(code: str) -> None:
    policy = with_limits(
        policy_named("strict", evaluator=MONTY), memory_bytes=64 << 20, wall_seconds=1.0
    )
    with Sandbox(policy=policy, pool=0) as sandbox:
        result = sandbox.execute(code)
        assert (result.evaluator, result.layers != ()) == ("", True)
        assert sandbox.execute("1 + 1").evaluator == "monty"


def test_a_worker_does_not_write_to_the_standard_error_of_the_host(
    capfd: pytest.CaptureFixture[str],
) -> None:
    policy = policy_named("strict", evaluator=MONTY)
    with contextlib.closing(MontyEvaluator(policy)) as evaluator:
        assert evaluator.evaluate(Request(code="1 + 1"))
        for _ in range(3):
            assert evaluator.evaluate(Request(code="'a'.join(['b' * 10 ** 6] * 1000)")) is None
    assert capfd.readouterr() == ("", "")


def test_workers_are_few_and_each_expression_has_limits() -> None:
    """Time, memory, depth and the answer of a worker: as the evaluator tells them to Monty."""
    policy = with_limits(policy_named("strict", evaluator=MONTY), memory_bytes=16 << 20)
    evaluator = MontyEvaluator(policy)
    told: list[dict[str, Any]] = []
    made = evaluator._made

    class Recording:
        def __init__(self, **given: Any) -> None:
            told.append(given)
            self._pool = made(**given)

        def __enter__(self) -> "Recording":
            self._pool.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._pool.__exit__(*error)

        def checkout(self, **given: Any) -> Any:
            told.append(given)
            return self._pool.checkout(**given)

    evaluator._made = Recording  # type: ignore[assignment]
    answered = evaluator.evaluate(Request(code="1 + 1"))
    assert answered is not None
    assert (answered.value, answered.evaluator) == (2, "monty")
    evaluator.close()
    assert evaluator.evaluate(Request(code="1 + 1")) is None  # and no worker is started again
    pool, limits = told
    assert pool.pop("binary_path").startswith("/proc/")
    assert pool == {
        "min_processes": 1, "max_processes": 4, "checkout_timeout": 0.01, "request_timeout": 1.0,
        "max_checkouts_per_worker": 1000,
    }  # fmt: skip
    assert limits["limits"] == {
        "max_feed_duration_secs": 0.05, "max_memory": 16 << 20, "max_recursion_depth": 100,
        "max_suspensions": 1,
    }  # fmt: skip


@pytest.mark.parametrize("limit", ["wall_seconds", "cpu_seconds"])
def test_a_policy_that_allows_little_time_gets_cells(limit: str) -> None:
    policy = with_limits(policy_named("strict", evaluator=MONTY), **{limit: 0.1})
    evaluator = MontyEvaluator(policy)
    assert evaluator.evaluate(Request(code="1 + 1")) is None
    evaluator.close()


def test_other_policies_languages_and_workspaces_get_cells(cells: Sandbox, tmp_path: Path) -> None:
    assert cells.execute("1 + 1").evaluator == ""
    policy = policy_named("strict", evaluator=MONTY)
    with Sandbox(policy=policy, pool=0, workspaces=tmp_path / "kept") as sandbox:
        assert sandbox.execute("1 + 1", workspace="mine").evaluator == ""
        assert sandbox.execute("1", "sh").evaluator == ""


def test_a_value_beyond_the_cap_falls_to_a_cell() -> None:
    policy = with_limits(policy_named("strict", evaluator=MONTY), value_bytes=100)
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute("'a' * 98").evaluator == "monty"
        assert sandbox.execute("'a' * 99").evaluator == ""


# Generated expressions

NAMES = ("a", "b", "s", "t", "xs", "d")
NUMBERS = (
    st.integers(-1000, 1000)
    | st.floats(-1e6, 1e6, allow_nan=False)
    | st.sampled_from([0.1, 1e16, 1e-7, 2**53, -0.0])
)
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
INPUTS = st.fixed_dictionaries({
    "a": NUMBERS, "b": st.integers(-5, 5), "s": TEXT, "t": TEXT, "xs": st.lists(NUMBERS | st.booleans(), max_size=4),
    "d": st.dictionaries(TEXT, NUMBERS, max_size=3),
})  # fmt: skip


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(
        [
            "+",
            "-",
            "*",
            "/",
            "//",
            "%",
            "&",
            "|",
            "^",
            "<",
            "<=",
            ">",
            ">=",
            "==",
            "!=",
            "in",
            "and",
            "or",
        ]
    )
    shift = st.sampled_from(["({} << 3)", "({} >> 1)", "({} ** 2)", "({} ** 3)"])
    unary = st.sampled_from([
        "-({})", "+({})", "~({})", "not ({})", "abs({})", "len({})", "str({})", "int({})", "float({})", "bool({})", "round({})",
        "sorted({})", "list({})", "tuple({})", "sum({})", "min({})", "max({})", "any({})", "all({})", "list(reversed({}))",
        "({}).upper()", "({}).strip()", "({}).split()", "({}).get('a')", "({})[0]", "({})[-1]", "({})[1:]", "({})[::-1]",
        "[v for v in ({})]", "[(v, v) for v in ({}) if v]", "{{str(v): v for v in ({})}}", "list(enumerate({}))", "[{}]",
        "dict(k={})", "list(range({}))", "divmod({}, 3)", "({}).join(['x', 'y'])", "str(({}) == 1)", "({}).replace('a', 'b')",
    ])  # fmt: skip
    return (
        st.builds("({} {} {})".format, inner, binary, inner)
        | st.builds(str.format, unary, inner)
        | st.builds(str.format, shift, inner)
        | st.builds("({} if {} else {})".format, inner, inner, inner)
        | st.builds("[{}, {}]".format, inner, inner)
        | st.builds("{{'k': {}, {}: 1}}".format, inner, inner)
        | st.builds("list(zip({}, {}))".format, inner, inner)
        | st.builds(
            "({}).{}({})".format,
            inner,
            st.sampled_from(["split", "find", "count", "startswith"]),
            inner,
        )
    )


LEAVES = (
    st.sampled_from(NAMES)
    | NUMBERS.map(repr)
    | TEXT.map(repr)
    | st.sampled_from(["True", "False", "None", "[]", "{}"])
)
EXPRESSIONS = st.recursive(LEAVES, nested, max_leaves=8)
answered: list[int] = []


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(EXPRESSIONS, INPUTS)
def test_every_answer_is_that_of_a_cell(
    monty: Sandbox, cells: Sandbox, code: str, inputs: dict[str, Any]
) -> None:
    result = monty.execute(code, inputs=inputs)
    if result.evaluator:
        answered.append(1)
        assert said(result) == said(cells.execute(code, inputs=inputs)), code


def test_enough_of_them_were_answered_by_monty() -> None:
    """Else the comparison above would prove nothing."""
    assert len(answered) > 50


# The policy


def test_it_is_off_in_every_profile_and_a_caller_can_only_narrow() -> None:
    assert not any(load_policy(name).evaluator.monty for name in profile_names())
    on, off = Policy(evaluator=MONTY), Policy()
    assert [narrow(one, two).evaluator.monty for one in (on, off) for two in (on, off)] == [
        True,
        False,
        False,
        False,
    ]
    assert "evaluator.monty: answering expressions outside a cell" in exceeds(on, off)
    assert not any("evaluator" in each for each in exceeds(off, on))
    own = Policy(isolation=Isolation(kernel="own"))
    assert not narrow(on, msgspec.structs.replace(own, evaluator=MONTY)).evaluator.monty
    assert check_policy(narrow(on, own)).evaluator.monty is False
    with pytest.raises(
        PolicyError, match='evaluator.monty: cannot be combined with isolation.kernel = "own"'
    ):
        check_policy(msgspec.structs.replace(own, evaluator=MONTY))
    with pytest.raises(PolicyError, match=r"did you mean monty\?"):
        policy_of_data({"evaluator": {"mony": True}})


def test_explain_and_the_trail_say_who_answers(monty: Sandbox) -> None:
    assert "answer pure expressions by Monty, in a process outside every layer" in explain(
        monty.plan, monty.policy
    )
    result = monty.execute("1 + 1")
    assert monty.audit is not None
    ended = monty.audit.get_entries(category="execution")[-1]
    assert ended.details["execution_id"] == result.execution_id
    assert ended.details["evaluator"] == "monty"


def test_without_the_package_the_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(
        PolicyError, match=r"Monty is not installed\nhint: .* install .*'\.\[monty\]'"
    ):
        Sandbox(policy=policy_named("strict", evaluator=MONTY), pool=0)


# Its workers


def workers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if each.name() == "monty"]


def test_a_worker_has_no_environment_and_ends_with_its_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_SECRET", "of-the-caller")
    before = {each.pid for each in workers()}
    with Sandbox(policy=policy_named("strict", evaluator=MONTY), pool=0) as sandbox:
        assert sandbox.execute("1 + 1").evaluator == "monty"
        (worker,) = [each for each in workers() if each.pid not in before]
        assert worker.environ() == {}
    assert not worker.is_running()


def test_a_worker_that_dies_costs_nobody_an_answer(monty: Sandbox) -> None:
    for _ in range(3):
        assert monty.execute("1 + 1").value == 2
        for each in workers():
            os.kill(each.pid, signal.SIGKILL)
    assert monty.execute("1 + 1").value == 2


def test_many_threads_get_their_own_answers(monty: Sandbox) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(
            number
            for _ in range(10)
            if monty.execute("n * 2", inputs={"n": number}).value != number * 2
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


# The source check


@pytest.mark.parametrize(
    "hostile", ["(" * 1000, "-" * 1999 + "1", "[" * 80 + "]" * 80, "1" * 2001, "a." * 600 + "b"]
)
def test_a_hostile_source_is_no_expression_of_it(hostile: str) -> None:
    assert not is_pure(hostile, {})


# What the check takes, a second time: an entry that is added there fails a test here.
TAKEN_BUILTINS = {
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "len", "list", "max", "min", "range", "reversed",
    "round", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
TAKEN_METHODS = {
    "count", "endswith", "find", "get", "join", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip", "upper",
}  # fmt: skip
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(30), 1)
DEEP_DICT: Any = functools.reduce(lambda inner, _: {"a": inner}, range(30), 1)
NOT_PURE: list[tuple[str, dict[str, Any]]] = [
    # text: too long, indented, beyond ASCII
    ("[" + "1, " * 700 + "1]", {}), (" 1", {}), ("\n1", {}), ("1 # \u00e9", {}), ("'\x00'", {}),
    # names and functions that are not called
    ("unknown", {}), ("len", {}), ("len([str(len)])", {}), ("str('a'.upper)", {}), ("'a'.__class__", {}),
    ("[1 for a.count in [1]]", {}), ("a(1)", {"a": 1}), ("len(1)(1)", {}),
    # values
    ("9007199254740993", {}), ("1e999", {}), ("1j", {}), ("b'a'", {}), ("...", {}), ("a", {"a": 2**60}), ("a", {"a": "\u00e9"}),
    ("a", {"a": [2**60]}), ("a", {"a": {"k": 2**60}}), ("a", {"a": {"\u00e9": 1}}), ("a", {"a": DEEP}), ("a", {"a": DEEP_DICT}),
    # floats, wherever they come from
    ("'abc'.find('', 4)", {}), ("'abc'.count('', 4)", {}), ("'a'.startswith('', 2)", {}), ("'a'.endswith('', 2)", {}),
    ("10 ** -1", {}), ("sum([10 ** -1] * 10)", {}), ("2 ** a", {"a": 2}), ("1 << a", {"a": 2}), ("10 ** 10 ** 7", {}), ("1 << 30000", {}),
    ("(2 ** 200) ** 200", {}), ("(1 << 200) << 200", {}), ("0.5 ** 2", {}), ("0.5 % 2", {}), ("0.5 // 2", {}), ("(1 / 3) ** 3", {}), ("float('0.1') ** 3", {}), ("a ** 3", {"a": 0.1}),
    ("sum([0.1])", {}), ("divmod(0.5, 2)", {}), ("sum([1 / 3])", {}),
    # text as a format
    ("'%d' % 1", {}), ("str(1) % 2", {}), ("a % 2", {"a": "%d"}),
    # arguments
    ("max(*[1, 2])", {}), ("max(range(3), range(4))", {}), ("round(2.5, 1)", {}), ("round(2.5, ndigits=1)", {}),
    ("max([1], reverse=True)", {}), ("sorted([1], key=None)", {}), ("'a'.split(sep='b')", {}), ("[1].count(1)", {}),
    ("dict(**{})", {}), ("{**{}}", {}),
    # iterators that are handed out
    ("enumerate([1])", {}), ("range(3)", {}), ("reversed([1])", {}), ("zip([1])", {}), ("(x for x in [1])", {}),
    # other syntax
    ("(lambda: 1)", {}), ("(a := 1)", {}), ("await a", {"a": 1}), ("(yield 1)", {}), ("f'a'", {}), ("f'{1}'", {}), ("{1, 2}", {}),
    ("{x for x in [1]}", {}), ("1 is 1", {}), ("1 is not 1", {}), ("[1] @ [1]", {}), ("[*[1]]", {}), ("[x async for x in [1]]", {}),
    ("[1 for x[0] in [[1]]]", {"x": [1]}), ("x = 1", {}), ("import os", {}), ("1; 2", {}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "inputs"), NOT_PURE)
def test_the_check_refuses_it_before_monty_sees_it(code: str, inputs: dict[str, Any]) -> None:
    """Monty would refuse many of these itself; the check does not rely on that."""
    assert not is_pure(code, inputs)


def test_the_check_takes_no_other_builtin_and_no_other_method() -> None:
    names = [each for each in dir(builtins) if each not in ("None", "True", "False", "__debug__")]
    assert [each for each in names if is_pure(f"list({each}([1]))", {})] == sorted(TAKEN_BUILTINS)
    kinds = (str, bytes, int, float, list, dict, set, tuple)
    methods = {each for kind in kinds for each in dir(kind)}
    assert {each for each in methods if is_pure(f"a.{each}('a')", {"a": 1})} == TAKEN_METHODS


def test_a_name_of_a_builtin_cannot_be_taken() -> None:
    assert is_pure("max(a)", {"a": [1]})
    assert not is_pure("max(a)", {"a": [1], "max": 5})
    assert not is_pure("[len for len in [1]]", {})
    assert not is_pure("[a for a in [1]]", {"a": 5})


NOT_PLAIN: list[Any] = [
    (1,), {1: 2}, float("inf"), float("nan"), 2**60, "é", {1}, b"", 1j, signal.SIGTERM, [2**60], {"a": 2**60}, {"é": 1}, DEEP,
    DEEP_DICT, type("Text", (str,), {})("a"), type("Real", (float,), {})(1.0),
]  # fmt: skip


def test_values_are_compared_by_their_exact_types() -> None:
    assert is_plain_value({"a": [1, 1.5, "x", None, True]})
    for value in NOT_PLAIN:
        assert not is_plain_value(value)
