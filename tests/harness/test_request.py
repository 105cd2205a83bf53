"""Bad input: a clear error of ours or a REJECTED result, and the sandbox goes on."""

import math

import pytest

from cellwright import HostSettings, LaunchError, PolicyError, Sandbox, SandboxConfig, SandboxStatus
from cellwright.harness.sandbox.calls.call_request import Rejected, check_language, make_request
from cellwright.harness.sandbox.parameters import CallArguments
from cellwright.policies.policy import Limits
from tests.conftest import policy_named

LIMITS = Limits()
MEGABYTE = 1_000_000

REJECTED = {
    "empty": ("", "the source is empty"),
    "blank": (" \n\t\n", "the source is empty"),
    "empty bytes": (b"", "the source is empty"),
    "NUL": ("a\0b", "NUL"),
    "only NUL": ("\0", "NUL"),
    "NUL in bytes": (b"a\0b", "NUL"),
    "lone high surrogate": ("'\ud800'", "lone surrogate at character 1"),
    "lone low surrogate": ("x\udfff", "lone surrogate at character 1"),
    "invalid UTF-8": (b"x = '\xff'", "not UTF-8: byte 5"),
    "overlong UTF-8": (b"\xc0\x80", "not UTF-8: byte 0"),
    "surrogate in UTF-8": (b"\xed\xa0\x80", "not UTF-8: byte 0"),
    "UTF-16": ("1 + 1".encode("utf-16"), "not UTF-8: byte 0"),
}


@pytest.mark.parametrize(("code", "why"), REJECTED.values(), ids=REJECTED)
def test_a_source_that_cannot_be_one_is_rejected_and_the_sandbox_goes_on(
    strict: Sandbox, code: str | bytes, why: str
) -> None:
    result = strict.execute(code, trace_id="t")
    assert (result.status, result.reason) == (SandboxStatus.REJECTED, "validation")
    assert why in (result.error or "")
    assert result.execution_id
    assert result.trace_id == "t"
    assert strict.execute("1 + 1").value == 2


@pytest.mark.parametrize(
    "language", ["cobol", "", "Python", "python\0", "../python", "\ud800", "py" * 9999]
)
def test_an_unknown_language_is_rejected(strict: Sandbox, language: str) -> None:
    result = strict.execute("1 + 1", language)
    assert result.status is SandboxStatus.REJECTED
    assert "unknown language" in (result.error or "")
    assert strict.execute("1 + 1", "python3").value == 2


# Sources that are fine to send and whatever Python makes of them is the result

ODD = {
    "(((": ("(" * 100_000, "exception"),
    "---1": ("-" * 100_000 + "1", "exception"),
    "[[[": ("[" * 10_000 + "]" * 10_000, "exception"),
    "a.a.a": ("a" + ".a" * 100_000, "exception"),
    "nested blocks": ("".join(" " * n + "if 1:\n" for n in range(200)) + " " * 200 + "1", "exception"),
    "syntax error": ("x = = 1", "exception"),
    "unfinished": ("print('", "exception"),
    "tabs and spaces": ("if 1:\n\tx = 1\n        y = 2", "exception"),
    "a coding line that lies": ("# -*- coding: utf-16 -*-\n1 + 1", "exit"),
    "an unknown coding": ("# -*- coding: nowhere -*-\n1 + 1", "exit"),
    "byte order mark": (b"\xef\xbb\xbf1 + 1", "exit"),
    "carriage returns": ("x = 1\r\ny = 2\r\nx + y", "exit"),
    "form feed": ("x = 1\n\f\nx", "exit"),
    "only a comment": ("# nothing", "exit"),
    "no newline at the end": ("1 + 1 # end", "exit"),
    "an int of 5,000 digits": ("9" * 5000, "exception"),
    "return at the top": ("return 1", "exception"),
    "await at the top": ("await x", "exception"),
    "from __future__": ("from __future__ import annotations\nx: nowhere = 1\nx", "exit"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "reason"), ODD.values(), ids=ODD)
def test_an_odd_source_fails_or_runs_as_python_has_it_and_the_sandbox_goes_on(
    strict: Sandbox, code: str | bytes, reason: str
) -> None:
    result = strict.execute(code)
    assert result.reason == reason, result.stderr[-500:]
    assert strict.execute("1 + 1").value == 2


def test_a_future_import_holds_for_the_last_expression_too(strict: Sandbox) -> None:
    """The expression is compiled apart from what stands before it."""
    code = "from __future__ import annotations\n(lambda: [f.__annotations__ for f in [g]])() if False else 1"
    assert strict.execute(code).value == 1


def test_ten_megabytes_of_source_run(strict: Sandbox) -> None:
    result = strict.execute("# " + "x" * 10 * MEGABYTE + "\nlen('done')")
    assert result.value == 4
    assert strict.execute("1 + 1").value == 2


def test_ten_megabytes_of_statements_end_in_a_result(strict: Sandbox) -> None:
    """Compiling them takes more memory than a cell has; that is the program's affair."""
    result = strict.execute("x = 1\n" * (10 * MEGABYTE // 6))
    assert result.reason in ("exit", "memory", "exception", "wall_time", "cpu_time", "signal")
    assert strict.execute("1 + 1").value == 2


def test_a_source_past_the_limit_is_rejected() -> None:
    with pytest.raises(Rejected, match="longer than"):
        make_request(CallArguments(code="#" * (64 * 1024 * 1024 + 1)), LIMITS)


# Arguments

BAD_ARGUMENTS = {
    "timeout negative": {"timeout": -1},
    "timeout zero": {"timeout": 0},
    "timeout NaN": {"timeout": math.nan},
    "timeout infinite": {"timeout": math.inf},
    "timeout huge": {"timeout": 10**400},
    "timeout bool": {"timeout": True},
    "timeout text": {"timeout": "3"},
    "env with =": {"env": {"A=B": "c"}},
    "env with newline": {"env": {"A\nB": "c"}},
    "env with NUL": {"env": {"A\0": "c"}},
    "env empty name": {"env": {"": "c"}},
    "env value with newline": {"env": {"A": "b\nc"}},
    "env value with NUL": {"env": {"A": "b\0c"}},
    "env value a number": {"env": {"A": 1}},
    "env value a surrogate": {"env": {"A": "\ud800"}},
    "inputs not an identifier": {"inputs": {"a b": 1}},
    "inputs not JSON": {"inputs": {"a": object()}},
    "inputs NaN": {"inputs": {"a": math.nan}},
    "inputs bytes": {"inputs": {"a": b"x"}},
    "files absolute": {"files": {"/etc/passwd": b"x"}},
    "files parent": {"files": {"../x": b"x"}},
    "files parent inside": {"files": {"a/../../x": b"x"}},
    "files dot": {"files": {"./x": b"x"}},
    "files empty": {"files": {"": b"x"}},
    "files empty part": {"files": {"a//b": b"x"}},
    "files trailing slash": {"files": {"a/": b"x"}},
    "files NUL": {"files": {"a\0b": b"x"}},
    "files surrogate": {"files": {"\ud800": b"x"}},
    "files too long": {"files": {"x" * 256: b"x"}},
    "files too deep": {"files": {"x/" * 33 + "x": b"x"}},
    "files not bytes": {"files": {"a": 1}},
    "files too large": {"files": {"a": bytes(65 * 1024 * 1024)}},
    "files too many": {"files": {str(n): b"" for n in range(20_001)}},
}


@pytest.mark.parametrize("given", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_an_argument_that_makes_no_sense_is_a_policy_error_and_the_sandbox_goes_on(
    strict: Sandbox, given: dict[str, object]
) -> None:
    with pytest.raises(PolicyError, match="timeout|env|inputs|files"):
        strict.execute("1 + 1", **given)
    assert strict.execute("1 + 1").value == 2


UNTYPED_ARGUMENTS = {
    "stdin a number": {"stdin": 5},
    "stdin a lone surrogate": {"stdin": "\ud800"},
    "files text with a surrogate": {"files": {"a": "\ud800"}},
    "files name a number": {"files": {5: b"x"}},
    "inputs self-referring": {"inputs": {"a": (ring := [])}},
    "inputs a surrogate name": {"inputs": {"\ud800": 1}},
    "inputs a list": {"inputs": [1]},
    "env a list": {"env": ["A"]},
    "files a list": {"files": ["A"]},
    "trace_id a number": {"trace_id": 5},
    "unknown argument": {"colour": "red"},
}  # fmt: skip
ring.append(ring)


@pytest.mark.parametrize("given", UNTYPED_ARGUMENTS.values(), ids=UNTYPED_ARGUMENTS)
def test_an_argument_of_the_wrong_type_is_refused_clearly_and_the_sandbox_goes_on(
    strict: Sandbox, given: dict[str, object]
) -> None:
    with pytest.raises((PolicyError, TypeError)):
        strict.execute("1 + 1", **given)
    assert strict.execute("1 + 1").value == 2


@pytest.mark.parametrize("code", [None, 5, ["1"], object()])
def test_a_source_that_is_no_text_is_refused_clearly(strict: Sandbox, code: object) -> None:
    with pytest.raises((PolicyError, TypeError)):
        strict.execute(code)  # type: ignore[arg-type]
    assert strict.execute("1 + 1").value == 2


def test_inputs_too_deep_for_the_guests_json_fail_in_the_guest_and_not_in_us(
    strict: Sandbox,
) -> None:
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    assert strict.execute("len(deep)", inputs={"deep": deep}).value == 1


def test_a_guests_own_names_as_inputs_are_fine(strict: Sandbox) -> None:
    result = strict.execute("[__name__, print]", inputs={"__name__": "x", "print": 5})
    assert result.value == ["x", 5]


@pytest.mark.parametrize(
    "files",
    [{"a": b"1", "a/b": b"2"}, {"a/b": b"1", "a": b"2"}],
    ids=["file then directory", "directory then file"],
)
def test_files_that_contradict_each_other_are_refused_and_the_sandbox_goes_on(
    strict: Sandbox, files: dict[str, bytes]
) -> None:
    """A name that is both a file and a directory: the caller's mistake, never the program's result."""
    with pytest.raises(PolicyError, match="files"):
        strict.execute("1 + 1", files=files)
    assert strict.execute("1 + 1").value == 2


def test_files_that_fill_the_workspace_do_not_look_like_a_silent_success(strict: Sandbox) -> None:
    """Rounded up to pages, many small files take more room than their bytes."""
    size = strict.policy.limits.workspace_bytes
    result = strict.execute("1 + 1", files={"a": bytes(size)})
    assert result.value == 2 or result.error
    assert strict.execute("1 + 1").value == 2


# Sandboxes that cannot be made

NUMBERS = (-1, 0, math.nan, math.inf, -math.inf, 10**400, 2**70, True, "5", None)
FIELDS = ("timeout_seconds", "max_memory_mb", "max_processes", "max_cpus", "workspace_mb")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: repr(n)[:12])
@pytest.mark.parametrize("field", FIELDS)
def test_a_limit_that_makes_no_sense_is_a_policy_error(field: str, number: object) -> None:
    with pytest.raises(PolicyError, match=f"{field}|limits"):
        Sandbox(SandboxConfig(**{field: number}))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, math.nan, math.inf, True, "5"], ids=repr)
def test_an_output_limit_that_makes_no_sense_is_a_policy_error(number: object) -> None:
    with pytest.raises(PolicyError, match="max_output_bytes"):
        Sandbox(SandboxConfig(max_output_bytes=number))  # type: ignore[arg-type]


def test_an_output_limit_of_zero_keeps_nothing() -> None:
    import msgspec

    policy = policy_named("strict")
    limits = msgspec.structs.replace(policy.limits, output_bytes=0)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits)) as sandbox:
        result = sandbox.execute("print('x' * 100)\n5")
    assert result.value == 5
    assert result.truncated == {"stdout": 101}


def test_a_python_missing_on_disk_is_named() -> None:
    with pytest.raises(LaunchError, match="/nowhere/python3.*No such file"):
        Sandbox(policy=policy_named("strict"), host=HostSettings(python="/nowhere/python3"))


@pytest.mark.parametrize("python", ["/etc/passwd", "/bin/false", "/usr"])
def test_an_invalid_python_is_a_launch_error(python: str) -> None:
    with pytest.raises(LaunchError):
        Sandbox(policy=policy_named("strict"), host=HostSettings(python=python))


def test_a_request_carries_what_was_given() -> None:
    given = CallArguments(
        code="x", stdin="\u00fc", inputs={"a": 1}, files={"f": "\u00fc"}, env={"A": "b"}, timeout=1
    )
    request = make_request(given, LIMITS)
    assert request.stdin == "\u00fc".encode()
    assert request.inputs == b'{"a": 1}'
    assert request.files[0].data == "\u00fc".encode()
    assert request.environment == {"A": "b"}
    assert request.limits.wall_seconds == 1.0


def test_python_is_known_by_two_names() -> None:
    check_language("python")
    check_language("python3")
    with pytest.raises(Rejected, match="cobol"):
        check_language("cobol")
