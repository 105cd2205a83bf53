"""Near-duplicate tools: which are merged, which are not, and what stays of them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox, ToolFactory, ToolRegistry
from cellwright.errors import ToolDenied, ToolExists
from cellwright.harness.agent.planner import Toolsmith
from cellwright.tools import ToolState
from tests.harness.agent.scripted import ScriptedModel

pytestmark = pytest.mark.needs("userns")
COUNT = "def {0}(text: str) -> int:\n    return len(text.split())"
OTHER = "def {0}(words: str) -> int:\n    return sum(1 for each in words.split())"
DESCRIPTIONS = ("Count the words of a given English text", "Count the words of an English sentence")


@pytest.fixture
def factory(strict: Sandbox) -> Iterator[ToolFactory]:
    with ToolFactory(strict, maker="agent", pool=1) as made:
        yield made


def two(factory: ToolFactory, second: str = OTHER, test: str = "assert {0}('a b c') == 3") -> None:
    for name, source, description, case in (
        ("count_words", COUNT, DESCRIPTIONS[0], "assert {0}('a b') == 2"),
        ("word_count", second, DESCRIPTIONS[1], test),
    ):
        factory.create_tool(
            name, description, source.format(name), tests=[case.format(name)], allow_similar=True
        )


def test_of_two_tools_that_do_the_same_one_is_kept_with_the_tests_of_both(
    factory: ToolFactory,
) -> None:
    two(factory)
    ((kept, retired),) = factory.merge_similar()
    assert (kept.reference, len(kept.tests), kept.state) == (
        "count_words@2", 2, ToolState.TESTED,
    )  # fmt: skip
    assert factory.run_tests("count_words") == 2
    assert (retired.name, retired.state) == ("word_count", ToolState.RETIRED)
    with pytest.raises(ToolDenied, match="count_words does the same") as refused:
        factory.call("word_count", {"words": "a b"})
    assert refused.value.hint == "call count_words(text)"
    assert [each.name for each in factory.list_tools()] == ["count_words"]
    assert factory.merge_similar() == ()


@pytest.mark.parametrize(
    ("second", "test"),
    [
        (OTHER.replace("words.split()", "words"), "assert {0}('a b c') == 5"),  # counts characters
        (OTHER.replace("words: str", "words: str, more: int = 1"), "assert {0}('a b c') == 3"),
        (
            OTHER.replace("sum(1 for", "sum(2 for"),
            "assert {0}('') == 0",
        ),  # passes, but not both ways
    ],
)
def test_tools_that_only_look_alike_stay(factory: ToolFactory, second: str, test: str) -> None:
    two(factory, second, test)
    assert factory.merge_similar() == ()
    assert len(factory.list_tools()) == 2


def test_the_opposite_of_a_tool_is_not_like_it(factory: ToolFactory) -> None:
    """Their tests show no difference, so the descriptions must."""
    for name, words in (
        ("a", "Convert Celsius to Fahrenheit"),
        ("b", "Convert Fahrenheit to Celsius"),
    ):
        source = f"def {name}(degrees: float) -> float:\n    return degrees * {ord(name)}"
        factory.create_tool(name, words, source, tests=["assert True"])
    assert factory.merge_similar() == ()


def test_the_name_of_a_merged_tool_leads_to_the_one_that_stays(factory: ToolFactory) -> None:
    two(factory, test="assert {0}('a b') == 2")  # also if there is no test to add
    factory.merge_similar()
    changed = COUNT.format("count_words").replace("text.split()", "text.split(None)")
    assert factory.create_tool("count_words", DESCRIPTIONS[0], changed).replaces == ("word_count",)
    model = ScriptedModel([], [AssertionError("the model is asked")])
    found = Toolsmith(model, factory).build_new_tool("word_count", DESCRIPTIONS[1])
    assert found.name == "count_words"
    factory.registry.set_state("count_words", ToolState.RETIRED)
    with pytest.raises(ToolDenied, match="a person retired it"):
        factory.call("word_count", {"words": "a b"})


def test_a_tool_that_its_tests_do_not_call_is_left_alone(factory: ToolFactory) -> None:
    """It does more than the other, whose tests it passes; the other would pass its own."""
    more = OTHER + " if words else 10 // 0"
    two(factory, more, test="assert 'a {0}'")
    assert factory.merge_similar() == ()


def test_a_trusted_tool_is_kept_and_stays_trusted(factory: ToolFactory) -> None:
    two(factory)
    factory.registry.set_state("word_count", ToolState.TRUSTED)
    ((kept, retired),) = factory.merge_similar()
    assert (kept.reference, kept.state) == ("word_count@2", ToolState.TRUSTED)
    assert factory.get_tool("word_count").state is ToolState.TRUSTED
    assert retired.name == "count_words"


def test_tools_of_another_maker_are_left_alone(factory: ToolFactory, strict: Sandbox) -> None:
    two(factory)
    with ToolFactory(strict, factory.registry, maker="other", pool=0) as other:
        assert other.merge_similar() == ()
    assert len(factory.list_tools()) == 2


def test_two_makers_of_one_name_at_once_get_one_tool(strict: Sandbox, tmp_path: Path) -> None:
    """With `is_new`, the tool that is stored first is the tool: no draft replaces another."""
    path, ready = tmp_path / "tools.db", threading.Barrier(4)
    told: list[str] = []

    def make(number: int) -> None:
        with (
            ToolRegistry(path) as registry,
            ToolFactory(strict, registry, maker="a", pool=0) as own,
        ):
            source = f"def f(x: int) -> int:\n    return x + {number}"
            ready.wait(20)
            try:
                told.append(own.create_tool("f", f"Adds {number}.", source, is_new=True).reference)
            except ToolExists as exists:
                told.append(exists.existing)

    ToolRegistry(path).close()
    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(told) == ["f", "f", "f", "f@1"]


def test_a_retired_tool_does_not_hold_its_name(factory: ToolFactory) -> None:
    factory.create_tool("f", "Adds one.", "def f(x: int) -> int:\n    return x + 1")
    factory.registry.set_state("f", ToolState.RETIRED)
    source = "def f(x: int) -> int:\n    return 1 + x"
    assert factory.create_tool("f", "Adds one.", source, is_new=True).version == 2
