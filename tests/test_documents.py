"""Documents name what exists, all of it; their links lead somewhere.  What is in their blocks is for
`test_document_blocks.py`."""

import argparse
import ast
import datetime
import enum
import re
import tomllib

import msgspec
import pytest

import cellwright
from cellwright import errors, privacy, results, tools
from cellwright.harness.cli import commands, options
from cellwright.harness.sandbox.remote import frames
from cellwright.harness.servers.daemon.quotas import ServeLimits
from cellwright.policies import policy
from cellwright.policies.compiling.host import ALWAYS
from cellwright.policies.profiles.loading import profile_names
from cellwright.runner import messages
from cellwright.runner.requests.result import SandboxStatus, Usage
from tests import conftest
from tests.conftest import ROOT
from tests.documents import NAMES, rows_of, text_of


def named_in(name: str) -> set[str]:
    """Return the words that a document sets in code: what it says exists."""
    prose = re.sub(r"```.*?```", "", text_of(name), flags=re.DOTALL)
    return {
        word for code in re.findall(r"`([^`]+)`", prose) for word in re.split(r"[\s,()]+", code)
    }


def test_every_folder_that_people_read_has_its_document() -> None:
    folders = ("cellwright", "runner", "runner/kernel", "policies", "harness", "harness/cli")
    wanted = {f"{folder}/README.md" for folder in (*folders, "tests", "benchmarks", "scripts")}
    wanted |= {"README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert wanted <= set(NAMES)


@pytest.mark.parametrize("folder", ["runner", "harness", "policies"])
def test_every_room_is_named_in_the_document_of_its_folder(folder: str) -> None:
    rooms = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert {room for room in rooms if f"{room}/" not in text_of(f"{folder}/README.md")} == set()


def test_the_main_readme_is_two_screens_long() -> None:
    """Without the text of the picture, which is folded."""
    shown = re.sub(r"<details>.*?</details>\n\n", "", text_of("README.md"), flags=re.DOTALL)
    assert len(shown.splitlines()) <= 125


def test_every_row_of_the_comparison_was_measured() -> None:
    """Each row has the numbers of a row of a committed result, which ends at `:` or a cell."""
    measured = [
        row for name in NAMES if name.startswith("benchmarks/results/") for row in rows_of(name)
    ]
    number = re.compile(r"[\d.,]+")
    compared = [
        row for row in rows_of("harness/paths/comparison.md") if any(map(number.fullmatch, row))
    ]
    assert len(compared) > 20
    for name, *cells in compared:
        numbers = {cell for cell in cells if number.fullmatch(cell)}
        assert any(row[0] == name and numbers <= {*row} for row in measured), name


def test_the_readme_counts_the_tests_of_other_authors_as_their_table_does() -> None:
    counts = [row[4:6] for row in rows_of("tests/conformance/RESULTS.md") if len(row) == 7][2:]
    outside, inside = (sum(int(row[side].split(",")[0]) for row in counts) for side in (0, 1))
    assert f"{outside:,} pass outside of a cell and {inside:,} in one" in text_of(
        "README.md"
    ).replace("\n", " ")


# Links and names of files


@pytest.mark.parametrize("name", NAMES)
def test_local_links_lead_to_something(name: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)\s#]+)", text_of(name))
    missing = [target for target in targets if not ((ROOT / name).parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_links_into_a_document_lead_to_a_heading(name: str) -> None:
    for target, place in re.findall(r"\]\((?!https?:)([^)\s#]*)#([^)\s]+)\)", text_of(name)):
        path = (ROOT / name).parent / target if target else ROOT / name
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        assert place in {slug(heading) for heading in headings}, f"{target}#{place}"


def slug(heading: str) -> str:
    """Return the name by which a heading is linked to, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_layer_has_a_proof_and_every_proof_is_named() -> None:
    layers = text_of("SECURITY.md").partition("## Isolation layers")[2].partition("\n## ")[0]
    further = text_of("runner/THREATS.md")
    proofs = set(re.findall(r"\((?:\.\./)?(tests/escapes/test_\w+\.py)\)", layers + further))
    rows = [line for line in layers.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    assert [row for row in rows if "tests/escapes/test_" not in row] == []
    assert proofs == {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/escapes/test_*.py")
    }


def test_every_layer_is_in_the_table() -> None:
    fallbacks = {"rlimit_as", "rlimit_nproc"}
    assert {*ALWAYS, *policy.OPTIONAL_LAYERS, *fallbacks} <= named_in("SECURITY.md")


@pytest.mark.parametrize("name", NAMES)
def test_no_document_knows_the_machine_that_it_was_written_on(name: str) -> None:
    """Not its checkout, not its interpreter, no user's home; /workspace and /home/user are the cell's."""
    assert re.findall(r"/work\b|/root/|/home/(?!user\b)\w+|\.pyenv", text_of(name)) == []


# Names in the code


def test_every_field_of_a_policy_is_described_with_its_default() -> None:
    rows = [row for row in rows_of("policies/README.md") if len(row) == 5]
    described = {(row[0].strip("`"), row[1].strip("`")): row[4].strip("`") for row in rows[2:]}
    actual: dict[tuple[str, str], str] = {}
    for field in msgspec.structs.fields(policy.Policy):
        default = getattr(policy.Policy(), field.name)
        if isinstance(default, msgspec.Struct):
            for inner in msgspec.structs.fields(type(default)):
                actual[field.name, inner.name] = in_words(getattr(default, inner.name))
        else:
            actual["", field.name] = in_words(default)
    assert described == actual


def in_words(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, int | float):
        if isinstance(default, enum.Enum):
            return default.name
        whole = int(default)
        assert whole == default
        return f"{whole // policy.MIB} MiB" if whole >= policy.MIB else f"{whole:,}"
    if default and isinstance(default, tuple):
        return ", ".join(default)
    return default if isinstance(default, str) else "none" if not default else repr(default)


def test_every_field_of_a_config_is_described_with_its_default() -> None:
    rows = [row for row in rows_of("harness/README.md") if len(row) == 3]
    described = {row[0].strip("`"): row[1] for row in rows}
    config = cellwright.SandboxConfig()
    for name in config.__dataclass_fields__:
        assert described.get(name) == in_words(getattr(config, name)), name


def test_every_profile_and_optional_layer_is_described() -> None:
    assert {*profile_names(), *policy.OPTIONAL_LAYERS} <= named_in("policies/README.md")


@pytest.mark.parametrize("kind", [cellwright.SandboxResult, Usage], ids=lambda kind: kind.__name__)
def test_every_field_of_a_result_is_described(kind: type[msgspec.Struct]) -> None:
    fields = {field.name for field in msgspec.structs.fields(kind)}
    assert fields <= named_in("harness/README.md")


def test_every_public_name_is_described() -> None:
    # parts of a result are described by their fields
    inside = {"SandboxStatus", "Violation"}
    places = ("README.md", "sandbox/README.md", "sandbox/workspaces/README.md")
    described = set().union(*(named_in(f"harness/{place}") for place in places))
    modules = (errors, privacy, results, tools)
    names = {*cellwright.__all__, *(name for each in modules for name in each.__all__)}
    assert names - inside <= described


def test_every_status_and_reason_is_described() -> None:
    statuses = {status.name for status in SandboxStatus} - {"PENDING"}  # nothing waits
    reasons = set(cellwright.SandboxResult.__annotations__["reason"].__args__)
    assert statuses | reasons <= named_in("harness/README.md")


def parsers_below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands of a parser; only the one that it was made for has options."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a command and of the commands below it."""
    own = {option for action in parser._actions for option in action.option_strings}
    return own.union(*map(options_of, parsers_below(parser).values())) - {"-h", "--help"}


def test_every_command_is_described_with_its_options() -> None:
    """The command in the document of the command line; an option there, or where its subject is."""
    described = text_of("harness/cli/README.md")
    places = [name for name in NAMES if name.startswith("harness/")] + ["benchmarks/README.md"]
    named = set().union(*map(named_in, places))
    seen: set[str] = set()
    for command in parsers_below(commands.parser_of()):
        assert f"`cellwright {command}" in described
        options = options_of(parsers_below(commands.parser_of(command))[command])
        assert options - named == set(), command
        seen |= options
    assert {"--backend", "--as-skill", "--forks"} <= seen  # also of `tools export`


def test_every_exit_status_is_described() -> None:
    rows = {row[0] for row in rows_of("harness/cli/README.md")}
    statuses = (
        options.SUCCEEDED, options.FAILED, options.USAGE_ERROR, options.SANDBOX_FAILED,
    )  # fmt: skip
    assert {str(status) for status in statuses} <= rows


def test_every_frame_is_described() -> None:
    frames = {
        name for name, kind in vars(messages).items()
        if isinstance(kind, type) and issubclass(kind, messages._Frame) and not name.startswith("_")
    }  # fmt: skip
    assert frames <= named_in("runner/README.md")
    assert len(frames) > 5


def test_every_frame_and_limit_of_the_daemon_is_described() -> None:
    kinds = {
        name for name, kind in vars(frames).items()
        if isinstance(kind, type) and issubclass(kind, frames._DaemonFrame) and not name.startswith("_")
    }  # fmt: skip
    assert kinds <= named_in("harness/servers/daemon/README.md")
    assert len(kinds) > 20
    rows = {row[0].strip("`"): row[1] for row in rows_of("harness/servers/daemon/README.md")}
    for name, value in ServeLimits()._asdict().items():
        sizes = {65 << 20: "65 MiB", 512 << 20: "512 MiB", 768 << 20: "768 MiB", 1 << 30: "1 GiB"}
        assert rows.get(name) == sizes.get(value, f"{value:g}"), name


def test_every_option_of_the_daemon_is_described() -> None:
    options = options_of(parsers_below(commands.parser_of("serve"))["serve"])
    assert options <= named_in("harness/README.md")
    assert "--drain" in options


def test_every_process_is_described() -> None:
    """By the name that ps(1) shows, which the code gives it."""
    calls = [
        node.args[1].value
        for path in ROOT.glob("runner/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "set_process_name"
        and isinstance(node.args[1], ast.Constant)
    ]
    assert len(set(calls)) == 7
    assert set(calls) <= named_in("runner/README.md")


def test_every_need_and_variable_of_the_tests_is_described() -> None:
    assert set(conftest._NEEDS) <= named_in("tests/README.md")
    used = set(re.findall(r"CELLWRIGHT_TEST_[A-Z]+", (ROOT / "tests/conftest.py").read_text()))
    assert used <= named_in("tests/README.md")


@pytest.mark.parametrize("folder", ["scripts", "benchmarks"])
def test_every_script_is_described(folder: str) -> None:
    files = {path.name for path in (ROOT / folder).iterdir() if path.is_file()} - {
        "README.md",
        "__init__.py",
    }
    assert {name for name in files if name not in text_of(f"{folder}/README.md")} == set()


# The change log

KINDS = {
    "Added", "Changed", "Deprecated", "Removed", "Fixed", "Migration", "Security", "Known limits",
}  # fmt: skip


def test_the_change_log_keeps_the_form() -> None:
    lines = text_of("CHANGELOG.md").splitlines()
    assert lines[0] == "# Changelog"
    versions = [line for line in lines if line.startswith("## ")]
    pending = versions[:1] == ["## [Unreleased]"]
    released = [
        re.fullmatch(r"## \[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", line)
        for line in versions[pending:]
    ]
    assert all(released), versions
    order = [tuple(map(int, found.groups()[:3])) for found in released if found]
    dates = [datetime.date.fromisoformat(found[4]) for found in released if found]
    assert order == sorted(set(order), reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_the_newest_version_in_the_change_log_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.findall(r"^## \[(\d\S*)\]", text_of("CHANGELOG.md"), re.MULTILINE)[0]
    assert newest == project["version"]


def test_changes_stand_under_their_kinds() -> None:
    for version in re.split(r"^## ", text_of("CHANGELOG.md"), flags=re.MULTILINE)[1:]:
        head, *groups = re.split(r"^### ", version, flags=re.MULTILINE)
        assert len(head.splitlines()) == 1 or not head.partition("\n")[2].strip(), head
        for group in groups:
            kind, _, entries = group.partition("\n")
            assert kind in KINDS
            assert re.search(r"^- \S", entries, re.MULTILINE), f"nothing under {kind}"
