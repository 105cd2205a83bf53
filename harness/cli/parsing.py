"""The argument parser: argparse with short errors that suggest the command or option meant."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence

TYPE_CHECKING = False  # `--version` does not need `typing`
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Compiled when there is an error.
_CHOICE = r"invalid choice: '(.*?)'"
_COLUMNS = 80  # width if the output is not a terminal
_NUMBER = r"argument (\S+): invalid (?:float|int) value: ('.*')"
_UNITS = {"MB": " of MiB", "S": " of seconds"}  # by the metavar of the option
_CHOICES = r"'?([^', ()]+)'?"
_HOSTS = "to let programs reach a host name it in network.allow of a policy file"
# Options of other tools, with cellwright's way to the same effect by a policy.
_ELSEWHERE = {
    **dict.fromkeys(
        ("--mount", "--volume", "--bind", "--ro-bind", "--allow-read"),
        "--file HOST copies files to /workspace; filesystem.read of a policy file shows a path",
    ),
    "--allow-write": "filesystem.write of a policy file lets programs write a path",
    **dict.fromkeys(("--network", "--net", "--allow-net", "--allow-network"), _HOSTS),
    **dict.fromkeys(
        ("--cpu", "--cpus"), "cpus below [limits] of a policy file is the share of processors"
    ),
    "--requirements": "did you mean --packages?",
    "--socket": "did you mean --connect?",
}  # fmt: skip
_OPTIONS_NEAR = 0.75  # difflib's ratio; high, because options are long and share their dashes


class _Formatter(argparse.HelpFormatter):
    """Asks for the terminal's width without shutil: argparse makes a formatter for every argument,
    and shutil imports every kind of compression."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    """Return what `shutil.get_terminal_size` does."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or _COLUMNS
    except OSError:  # not a terminal, or closed
        return _COLUMNS


class Parser(argparse.ArgumentParser):
    """Exits with status 2 on wrong usage, and prints the error in one line and a hint in another."""

    _given: Sequence[str] = ()
    takes_arguments = False  # words behind `--` are arguments of a program

    def __init__(self, **settings: "Any") -> None:
        super().__init__(**settings, formatter_class=_Formatter)

    def parse_known_args(self, args: "Any" = None, namespace: "Any" = None) -> "Any":
        self._given = args or ()
        if not self.takes_arguments:
            return super().parse_known_args(args, namespace)
        end = args.index("--") if "--" in args else len(args)
        self._given = args[:end]
        found, unknown = super().parse_known_args(self._given, namespace)
        found.arguments = args[end + 1 :]
        return found, unknown

    def error(self, message: str) -> "NoReturn":
        known = [name for name, _ in commands_of(self)]
        unknown = re.search(_CHOICE, message)
        is_command = bool(known) and "argument COMMAND: " in message
        if unknown and is_command:
            message = f"unknown command {unknown[1]!r}"
        if "not allowed with argument" in message and (options := self._unknown_options()):
            # argparse took the value of an unknown option as FILE, which -c excludes
            message = f"unrecognized arguments: {options[0]}"
        if number := re.fullmatch(_NUMBER, message):
            message = (
                f"argument {number[1]}: must be a number{self._unit(number[1])}, got {number[2]}"
            )
        if "required: COMMAND" in message:
            message = f"a command is missing: {', '.join(known)}"
        message = message.replace("one of the arguments FILE -c is", "FILE or -c CODE is")
        if unknown:
            from ...policies.argument_checks import similar

            choices = (
                known if is_command else re.findall(_CHOICES, message.partition("choose from")[2])
            )
            meant = similar(unknown[1], choices)
            hint = f"did you mean {meant}? " if meant else ""
        else:
            hint = self._hint_at_option()
        given = self._given_command()
        if "FILE or -c CODE is required" in message:
            hint = "- in place of FILE reads the program from standard input. "
        if not hint and message.startswith("unrecognized") and given.takes_arguments:
            hint = "arguments of the program go behind --. "
        prog = given.prog
        self.exit(2, f'{prog}: {message}\nhint: {hint}"{prog} --help" lists everything\n')

    def _unit(self, option: str) -> str:
        metavars = [each.metavar for each in self._actions if option in each.option_strings]
        return _UNITS.get(str(metavars[0]), "") if metavars else ""

    def _given_command(self) -> "Parser":
        """Return the parser of the command that was given: argparse reports its unknown arguments to
        that of `cellwright`."""
        found = self
        for word in self._given:
            below = dict(commands_of(found)).get(word)
            if below is None:
                break
            found = below
        return found

    def _hint_at_option(self) -> str:
        """Return cellwright's way to the effect of another tool's option, or the known option that
        resembles it."""
        from ...policies.argument_checks import similar  # only for errors

        known = list(self._given_command()._every_option())
        for word in self._unknown_options():
            if "--policy" in known and word in _ELSEWHERE:
                return f"{_ELSEWHERE[word]}. "
            if not word.startswith("--"):
                begun = sorted({each for each in known if each.startswith(f"-{word[:2]}")})
                if begun:
                    return f"did you mean {' or '.join(begun)}? "
            elif meant := similar(word, known, _OPTIONS_NEAR):
                return f"did you mean {meant}? "
        return ""

    def _unknown_options(self) -> list[str]:
        known = list(self._every_option())
        words = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        letters = [
            word for word in self._given
            if word[:1] == "-" and word[1:2].isalpha() and word[:2] not in known
        ]  # fmt: skip
        return [
            word for word in words if not any(each.startswith(word) for each in known)
        ] + letters

    def _every_option(self) -> Iterator[str]:
        """Yield the options of this command and of its subcommands."""
        yield from (option for action in self._actions for option in action.option_strings)
        for _, below in commands_of(self):
            yield from below._every_option()


def commands_of(parser: argparse.ArgumentParser) -> list[tuple[str, Parser]]:
    """Return the commands of a parser, by name."""
    return [
        (name, below)
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, below in action.choices.items()
    ]


def summary_of(parser: argparse.ArgumentParser, name: str) -> str:
    """Return the summary of a command in the help of `parser`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return next(
                (str(each.help) for each in action._choices_actions if each.dest == name), ""
            )
    return ""
