"""The table of `scripts/languages`: its programs and its results."""

import pytest

from cellwright.policies.languages.table import language_table
from tests.conformance import languages
from tests.conftest import OPTIONAL

WRITTEN = (languages.HERE / "LANGUAGES.md").read_text()


def test_every_language_has_programs_and_a_result() -> None:
    names = set(language_table().names())
    assert set(languages.programs()) == names
    assert all(f"\n| {name} |" in WRITTEN for name in names)


def test_no_language_does_otherwise_in_cells() -> None:
    assert "| NO |" not in WRITTEN


@pytest.mark.needs("userns", "gcc")
@pytest.mark.parametrize("profile", languages.PROFILES)
def test_programs_in_c_are_told_their_cell(profile: str) -> None:
    entry = language_table().called("c")
    assert entry
    tried = languages.try_language(entry, languages.programs()["c"], profile, OPTIONAL)
    assert tried.wrong == {}
    assert tried.sees == "1 256"
