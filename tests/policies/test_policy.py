"""Policies as data: what makes sense, and what is refused by name."""

import math

import msgspec
import pytest

from cellwright.policies.argument_checks import check_variable
from cellwright.policies.errors import (
    BusyError,
    CellwrightError,
    ClosedError,
    InternalError,
    LaunchError,
    PolicyError,
    Unenforceable,
)
from cellwright.policies.policy import MIB, Limits, Policy, check_limit, check_policy
from cellwright.policies.profiles.loading import load_policy, profile_names
from tests.conftest import with_limits


def test_the_strict_profile_is_the_default_policy() -> None:
    assert load_policy("strict") == Policy(name="strict")


def test_every_shipped_profile_loads_under_its_own_name() -> None:
    assert {"strict", "standard"} <= set(profile_names())
    for name in profile_names():
        assert load_policy(name).name == name


def test_no_shipped_profile_gives_up_a_layer() -> None:
    assert all(load_policy(name).optional_layers == () for name in profile_names())


def test_standard_widens_strict_by_programs_and_loopback_only() -> None:
    standard, strict = load_policy("standard"), load_policy("strict")
    assert standard.limits == strict.limits
    assert standard.filesystem.write == ()
    assert standard.environment == {}
    assert standard.processes.execute == ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/share")
    assert standard.filesystem.system_files


def test_a_policy_file_is_loaded_by_its_path(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[limits]\nwall_seconds = 5\n')
    policy = load_policy(str(file))
    assert policy.name == "mine"
    assert policy.limits == msgspec.structs.replace(Limits(), wall_seconds=5.0)


BAD_FILES = {
    "unknown table": ("[netwrok]\n", "netwrok"),
    "unknown key": ("[limits]\nmemory = 5\n", "limits"),
    "unknown key is named": ("[limits]\nmemory = 5\n", "limits.memory: unknown field"),
    "unknown top-level key": ("colour = 1\n", "colour"),
    "wrong type": ('[limits]\nprocesses = "many"\n', "limits.processes"),
    "fraction of a process": ("[limits]\nprocesses = 2.5\n", "limits.processes"),
    "bool as a number": ("[limits]\nprocesses = true\n", "limits.processes"),
    "number as a bool": ("[processes]\nthreads = 1\n", "processes.threads"),
    "negative": ("[limits]\nwall_seconds = -1\n", "limits.wall_seconds"),
    "NaN": ("[limits]\nwall_seconds = nan\n", "limits.wall_seconds"),
    "infinite": ("[limits]\ncpus = inf\n", "limits.cpus"),
    "unknown layer": ('optional_layers = ["seccomp"]\n', "optional_layers"),
    "variable with =": ('[environment]\n"A=B" = "c"\n', "environment"),
    "not TOML": ("name = \n", "line 1"),
    "a path alone instead of a list": ('[filesystem]\nread = "/usr"\n', "filesystem.read"),
}


@pytest.mark.parametrize(("text", "named"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_mistake_in_a_file_names_the_file_and_the_key(tmp_path, text: str, named: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(PolicyError) as error:
        load_policy(str(file))
    assert str(file) in str(error.value)
    assert named in str(error.value)


def test_a_file_that_is_no_text_is_refused(tmp_path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match=r"mine\.toml"):
        load_policy(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    "name", ["lenient", "", "strict.toml", "a\0b", "../profiles/strict", "x" * 5000]
)
def test_a_name_that_leads_nowhere_is_a_policy_error(name: str) -> None:
    with pytest.raises(PolicyError):
        load_policy(name)


def test_a_file_of_deep_nesting_is_a_policy_error(tmp_path) -> None:
    (tmp_path / "deep.toml").write_text("name = " + "[" * 100_000)
    with pytest.raises(PolicyError, match="deep"):
        load_policy(str(tmp_path / "deep.toml"))


GOOD = [("wall_seconds", 0.001), ("memory_bytes", 8 * MIB), ("cpus", 0.01), ("processes", 1),
        ("output_bytes", 0), ("wall_seconds", 2**53), ("open_files", 16)]  # fmt: skip
BAD = [("wall_seconds", 0), ("memory_bytes", 8 * MIB - 1), ("cpus", 0.009), ("processes", 0),
       ("output_bytes", -1), ("wall_seconds", 2**53 + 2), ("wall_seconds", math.nan),
       ("wall_seconds", math.inf), ("wall_seconds", True), ("wall_seconds", None),
       ("wall_seconds", "3"), ("wall_seconds", 1j), ("wall_seconds", 10**400)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_limit_at_its_edge_is_accepted(name: str, value: float) -> None:
    check_limit(f"limits.{name}", value)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:20])
def test_a_limit_beyond_its_edge_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(PolicyError, match=name):
        check_limit(f"limits.{name}", value)


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(Limits)])
def test_every_limit_of_a_policy_is_checked(field: str) -> None:
    bad = with_limits(Policy(), **{field: math.nan})
    with pytest.raises(PolicyError, match=field):
        check_policy(bad)


@pytest.mark.parametrize(
    "field",
    [field.name for field in msgspec.structs.fields(Limits) if field.type is int],
)
def test_a_count_of_bytes_or_things_must_be_whole(field: str) -> None:
    """A Policy made in Python skips msgspec's check of types; the kernel's files take no fractions."""
    value = getattr(Limits(), field) + 0.5
    bad = with_limits(Policy(), **{field: value})
    with pytest.raises(PolicyError, match=field):
        check_policy(bad)


VARIABLES = [("A", "b", True), ("a.b-c", "", True), ("A", "\u00fc", True), ("", "x", False), ("A=", "x", False),
             ("A\n", "x", False), ("A\0", "x", False), ("A", "\0", False), ("A", "\n", False),
             ("A", "\ud800", False), ("\ud800", "x", False), (1, "x", False), ("A", None, False)]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "good"), VARIABLES, ids=repr)
def test_environment_variables_are_checked(name: object, value: object, good: bool) -> None:
    if good:
        check_variable(name, value)
        return
    with pytest.raises(PolicyError, match="environment"):
        check_variable(name, value)


def test_every_exception_is_one_of_ours_and_a_policy_error_is_a_value_error() -> None:
    for kind in (BusyError, ClosedError, InternalError, LaunchError, PolicyError, Unenforceable):
        assert issubclass(kind, CellwrightError)
    assert issubclass(PolicyError, ValueError)
    assert str(CellwrightError("what", "do this")) == "what\nhint: do this"
    assert str(CellwrightError("what")) == "what"
