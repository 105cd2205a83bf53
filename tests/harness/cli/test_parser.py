"""The whole parser: every argument of every command says what it is for, and its default."""

import argparse
from collections.abc import Iterator

import pytest

from cellwright.harness.cli import commands
from cellwright.harness.cli.options import PROFILES
from cellwright.harness.cli.parsing import Parser, commands_of

# Options without which nothing of the kind happens.  Any other option that takes a value says its default.
WITHOUT_DEFAULT = {
    "-c", "--audit", "--calls", "--change", "--collect", "--connect", "--data", "--diff",
    "--documents", "--env", "--expect", "--file", "--for", "--from", "--html", "--input",
    "--inputs", "--json", "--key-file", "--kind", "--mb", "--days", "--memory", "--metrics",
    "--model", "--optional", "--packages", "--peers", "--prefix", "--read", "--region",
    "--registry", "--remember", "--remote", "--request-log", "--requires", "--runs", "--servers",
    "--skills", "--test", "--tools", "--units", "--venv", "--workspace", "--write", "--config",
}  # fmt: skip


def every_parser(parser: Parser) -> Iterator[Parser]:
    yield parser
    for _, below in commands_of(parser):
        yield from every_parser(below)


PARSERS = {each.prog: each for each in every_parser(commands.complete_parser())}


def arguments_of(parser: Parser) -> list[argparse.Action]:
    left_out = argparse._SubParsersAction | argparse._HelpAction
    return [action for action in parser._actions if not isinstance(action, left_out)]


def help_of(parser: Parser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def test_a_second_folder_of_wheels_does_not_replace_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.complete_parser().parse_args(
            ["env", "lock", "--find-links", "a", "--find-links", "b", "thing"]
        )
    assert ended.value.code == 2
    assert "--find-links: given twice" in capsys.readouterr().err


@pytest.mark.parametrize("prog", PARSERS)
def test_every_argument_has_help(prog: str) -> None:
    parser = PARSERS[prog]
    unsaid = [action.dest for action in arguments_of(parser) if not help_of(parser, action)]
    assert unsaid == []


@pytest.mark.parametrize("prog", PARSERS)
def test_every_option_with_a_value_says_its_default(prog: str) -> None:
    parser = PARSERS[prog]
    for action in arguments_of(parser):
        is_optional = bool(action.option_strings) or action.nargs in ("?", "*")
        if action.nargs == 0 or action.required or not is_optional:
            continue
        text = help_of(parser, action)
        if "default" in text.lower():
            continue
        assert action.default in (None, [], ""), f"{action.dest}: has a default, says: {text}"
        has_other_form = (
            not action.option_strings and action.nargs == "?"
        )  # in a group of which one is needed
        known = has_other_form or WITHOUT_DEFAULT & set(action.option_strings)
        assert known, f"{action.option_strings or action.dest}: says no default: {text}"


def test_no_option_is_excused_in_vain() -> None:
    used = {
        option for parser in PARSERS.values() for action in arguments_of(parser)
        if "default" not in help_of(parser, action).lower() for option in action.option_strings
    }  # fmt: skip
    assert used >= WITHOUT_DEFAULT


@pytest.mark.parametrize(
    "prog", [prog for prog, each in PARSERS.items() if "--policy" in each._option_string_actions]
)
def test_help_of_a_policy_names_the_profiles_and_the_default(prog: str) -> None:
    parser = PARSERS[prog]
    text = help_of(parser, parser._option_string_actions["--policy"])
    for name in PROFILES:
        assert name in text
    default = parser.get_default("policy") or "strict"
    assert f"default {default}" in text or prog in ("cellwright shell", "cellwright image build")
