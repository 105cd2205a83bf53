"""The known name that an unknown one was meant to be."""

import time

import pytest

from cellwright.policies.argument_checks import did_you_mean, similar
from cellwright.policies.errors import PolicyError
from cellwright.policies.policy import named_layers
from cellwright.policies.profiles.loading import load_policy


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("stirct", ["standard", "strict"], "strict"),
        ("Strict", ["standard", "strict"], "strict"),
        ("trusted_read", ["trusted-read"], "trusted-read"),
        ("wall_second", ["cpu_seconds", "wall_seconds"], "wall_seconds"),
        ("work", ["network", "workshop"], "workshop"),
        ("ma", ["mail.send", "maths"], ""),
        ("zebra", ["standard", "strict"], ""),
        ("", ["a"], ""),
        ("x" * 101, ["x" * 101], ""),
        ("strict", [], ""),
    ],
)
def test_the_name_that_was_meant(word: str, known: list[str], meant: str) -> None:
    assert similar(word, known) == meant


def test_no_hint_is_made_of_something_else_than_text() -> None:
    assert did_you_mean(5, ["five"], "see the list") == "see the list"
    assert did_you_mean("fiv", ["five"]) == "did you mean five?"


def test_an_endless_number_of_names_is_not_read() -> None:
    def names():  # type: ignore[no-untyped-def]
        yield from (f"name-{number}" for number in range(1000))
        raise AssertionError

    assert similar("nothing like it", names()) == ""


def test_names_that_are_dear_to_compare_are_compared_for_a_bounded_time() -> None:
    names = [f"{number:03}" + "ab" * 48 for number in range(1000)]
    before = time.process_time()
    similar("ba" * 50, names)
    assert time.process_time() - before < 1.5  # 2 s without the bound, and 0.2 s with it


def test_errors_of_policies_and_layers_suggest() -> None:
    with pytest.raises(PolicyError, match=r"did you mean workshop\?"):
        load_policy("workshpo")
    with pytest.raises(PolicyError, match=r"did you mean landlock\?"):
        named_layers("--optional", ["landlok"])
    with pytest.raises(PolicyError, match="neither a file nor one of [^?]*$"):
        load_policy("/nowhere/at/all")
