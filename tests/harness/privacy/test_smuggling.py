"""Programs that get planted values and encode them reach no model with any, and the tool gets them all.

`cellwright bench privacy` does the same with 10,000 values.
"""

import pytest

from cellwright.benchmarks.planted import Planter
from cellwright.benchmarks.smuggling import Smuggling, rules

pytestmark = pytest.mark.needs("userns")
PROGRAMS = 20  # programs of the fifty


def planted(count: int) -> list[str]:
    planter = Planter(3)
    kinds = planter.kinds
    return [planter.value(kinds[number % len(kinds)]) for number in range(count)]


def test_programs_leak_nothing_and_the_tool_gets_every_value() -> None:
    values = planted(4 * PROGRAMS)
    smuggling = Smuggling(values, PROGRAMS)
    smuggling.run(rules())
    assert smuggling.leaks == []
    assert sorted(smuggling.delivered) == sorted(values)


def test_without_privacy_the_same_programs_leak_each_in_its_way() -> None:
    """Else the test above could not fail."""
    smuggling = Smuggling(planted(4 * 10), 10)
    smuggling.run(None)
    assert len({name for name, _ in smuggling.leaks if " by " in name}) == 10


@pytest.mark.parametrize("kind", Planter(1).kinds)
def test_planted_values_are_found_by_kind(kind: str) -> None:
    from cellwright import Privacy

    planter = Planter(5)
    values = [planter.value(kind) for _ in range(20)]
    scope = Privacy(names=values if kind == "name" else ()).scope()
    form = "see https://{}@host.example/x" if kind == "login" else "see {} there"
    for value in values:
        text = form.format(value)
        assert value not in scope.text(text)
        assert scope.reveal(scope.text(text)) == text
