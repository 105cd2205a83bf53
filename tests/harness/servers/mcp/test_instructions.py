"""Instructions and hints for a model: limits, and nothing that only a person at a command line can do."""

import re
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright import Sandbox
from cellwright.harness.servers.mcp.mcp_server import instructions_of
from cellwright.harness.servers.mcp.served_tools import served_tools
from cellwright.harness.text.hidden import advice, for_model
from cellwright.policies.advice import hints
from cellwright.policies.advice.hints import missing_module
from cellwright.policies.languages import SPOKEN
from cellwright.policies.languages.table import language_table
from cellwright.policies.policy import Packages, Policy
from cellwright.runner.host.interpreters import HostLanguage
from tests.conftest import policy_named

PLAIN = Policy(name="plain")
ALLOWING = replace(PLAIN, packages=Packages(allow=("pandas",)))


def texts() -> list[str]:
    """Return every text of the hints, with a word for each value."""
    data = tomllib.loads(Path(hints.__file__).with_suffix(".toml").read_text())
    entries = [each["hint"] for each in (*data["error"], *data["command"]) if "hint" in each]
    found = [*data["texts"].values(), *data["network"].values(), *entries]
    return [each.format("pandas", package="pandas") for each in found]


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
    bash = HostLanguage("bash", "Bash", "sessions", "bash", "")
    told = instructions_of(ALLOWING, (bash,), has_skills=False)
    assert "30 s, 256 MiB of memory and 64 MiB of files" in told
    assert told.endswith("and with packages pandas; bash have builtins only.")
    assert "load_skill" not in told


def test_only_languages_of_the_host_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shutil.which", lambda name, **_: (name == "perl" and f"/usr/bin/{name}") or None
    )
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        found = sandbox.languages()
    assert {each.name for each in found} == {*SPOKEN, *language_table().names()}
    assert all(each.missing for each in found if each.name not in ("python", "perl"))
    run = next(
        each for each in served_tools(open_world=False, languages=found) if each.name == "run_code"
    )
    told = run.input_schema["properties"]["language"]
    assert told["enum"] == ["python", "perl"]
    assert told["description"] == "only those up to python have sessions"
