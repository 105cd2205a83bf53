"""Instructions and hints for a model: limits, and nothing that only a person at a command line can do."""

import ast
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright.harness.servers.mcp.instructions import (
    instructions_of,
    usable_languages,
)
from cellwright.harness.text.model_hints import advice, for_model
from cellwright.policies import hints
from cellwright.policies.hints import missing_module
from cellwright.policies.policy import Packages, Policy

PLAIN = Policy(name="plain")
ALLOWING = replace(PLAIN, packages=Packages(allow=("pandas",)))


def texts() -> list[str]:
    """Return every text in the source of the hints, with a word for each value."""
    found = []
    for node in ast.walk(ast.parse(Path(hints.__file__).read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [
                str(each.value) if isinstance(each, ast.Constant) else "pandas"
                for each in node.values
            ]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_the_hints_for_people_name_options() -> None:
    assert len([text for text in texts() if re.search(r"--[a-z]", text)]) > 5


@pytest.mark.parametrize("policy", [PLAIN, ALLOWING], ids=["plain", "allowing"])
def test_no_hint_names_an_option_or_an_argument_of_python(policy: Policy) -> None:
    for text in texts():
        told = for_model(text, policy)
        assert not re.search(r"--[a-z]|\w=\)|[{}]packages", told), told
        assert "your policy" not in told


@pytest.mark.parametrize("policy", [PLAIN, ALLOWING], ids=["plain", "allowing"])
def test_where_programs_are_all_that_a_model_gives_no_hint_names_an_argument(
    policy: Policy,
) -> None:
    for text in texts():
        told = "".join(advice([], [text], policy, is_ok=False))
        assert not re.search(r"--[a-z]|packages=|\w with the argument|this server", told), told


def test_a_missing_package_is_asked_for_where_the_policy_allows_it() -> None:
    told = missing_module("pandas")
    assert 'packages=["pandas"]' in for_model(told, ALLOWING)
    assert "the owner of this server decides" in for_model(told, PLAIN)
    assert 'packages=["' not in for_model(told, PLAIN)


def test_limits_packages_and_languages_are_told() -> None:
    told = instructions_of(ALLOWING, ("python", "bash"), has_skills=False)
    assert "30 s, 256 MiB of memory and 64 MiB of files" in told
    assert "Languages: python, bash (bash with builtins only)" in told
    assert told.endswith("and with packages pandas.")
    assert "load_skill" not in told


def test_only_languages_of_the_host_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert usable_languages("/usr/bin/python3") == ("python",)
    assert "typescript" in usable_languages(None)
