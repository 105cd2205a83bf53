"""Help of the command line: mistakes, completion, the manual page, colours."""

import importlib
import inspect
import os
import pty
import re
import subprocess
import sys

import pytest

from cellwright.harness.cli import commands
from cellwright.harness.cli.exit_status import EXIT_CODES
from cellwright.harness.cli.helping.completion import SHELLS
from cellwright.harness.cli.options import PROFILES
from cellwright.harness.cli.parsing import commands_of
from cellwright.policies.profiles.loading import profile_names
from tests.conftest import OPTIONAL, ROOT

OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]


def cellwright(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cellwright", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]])
def test_a_bare_command_and_help_list_every_command(arguments: list[str]) -> None:
    done = cellwright(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    for name, _ in commands_of(commands.parser_of()):
        assert f"    {name}" in done.stdout


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_is_a_module_with_its_arguments_and_its_function(name: str) -> None:
    module = importlib.import_module(f"{commands.__package__}.{commands.COMMANDS[name][0]}")
    assert (module.__doc__ or "").startswith(f"`cellwright {name}`: ")
    for function, parameters in (module.add, ["parser"]), (module.run, ["options"]):
        assert [
            each.strip("_") or "options" for each in inspect.signature(function).parameters
        ] == parameters


def test_a_command_imports_no_other() -> None:
    code = (
        "import sys; from cellwright.harness.cli.commands import COMMANDS, parser_of; parser_of('run'); "
        "print(*(name for name, (module, _) in COMMANDS.items() "
        "if f'cellwright.harness.cli.{module}' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "run\n"


def test_help_of_a_command_is_what_its_own_option_prints() -> None:
    assert (
        cellwright("help", "audit", "trace").stdout == cellwright("audit", "trace", "--help").stdout
    )
    shown = cellwright("help", "run").stdout
    for words in ("server, standard, strict", "default strict", "30 under strict"):
        assert words in " ".join(shown.split())


def test_the_profiles_in_help_are_those_that_are_shipped() -> None:
    assert profile_names() == PROFILES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], 'cellwright: unknown command \'rnu\'\nhint: did you mean run? "cellwright --help"'),
        (["audit", "tial"], "cellwright audit: unknown command 'tial'\nhint: did you mean tail?"),
        (["run", "--timout=5", "-c", "1"], "cellwright run: unrecognized arguments: --timout=5\nhint: did you mean --timeout?"),
        (["run", "--timout", "5", "-c", "1"], "unrecognized arguments: --timout\nhint: did you mean --timeout?"),
        (["run", "report.py", "--year", "5"], "unrecognized arguments: --year 5\nhint: arguments of the program go behind --. "),
        (["workspace", "list", "--zzz"], 'workspace list: unrecognized arguments: --zzz\nhint: "cellwright workspace list --help"'),
        (["completion", "bahs"], "(choose from 'bash', 'zsh', 'fish')\nhint: did you mean bash?"),
        (["help", "rnu"], "unknown command 'rnu'\nhint: did you mean run?"),
        (["run", "--policy", "stirct", "-c", "1"], "workshop\nhint: did you mean strict?"),
        (["run", "--language", "pyhton", "-c", "1"], "unknown language 'pyhton'\nhint: did you mean python?"),
        (["explain", "--optional", "landlok"], "got 'landlok'\nhint: did you mean landlock?"),
        (["run", "--zzz", "-c", "1"], '--zzz\nhint: arguments of the program go behind --. "cellwright run --help"'),
    ],
)  # fmt: skip
def test_a_typing_error_is_told_with_what_was_meant(arguments: list[str], said: str) -> None:
    done = cellwright(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 2


COMPLETE = """
source /dev/stdin <<< "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_cellwright
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["wor"], "workspace"),
        (["run", "--time"], "--timeout"),
        (["run", "--policy", "st"], "standard strict"),
        (["audit", "tra"], "trace"),
        (["audit", "trace", "--h"], "--help --html"),
        (["run", "file-of-mine"], ""),
    ],
)
def test_bash_completes_commands_options_and_their_words(words: list[str], found: str) -> None:
    script = cellwright("completion", "bash").stdout
    command = ["bash", "--norc", "-c", COMPLETE, "bash", script, "cellwright", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == (found, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_completion_script_names_every_option(shell: str) -> None:
    script = cellwright("completion", shell).stdout
    for name, parser in commands_of(commands.complete_parser()):
        assert name in script
        for action in parser._actions:
            for option in action.option_strings:
                assert option.lstrip("-") in script, (name, option)


def test_the_manual_page_has_every_command_and_option() -> None:
    page = cellwright("man").stdout
    for _, parser in commands_of(commands.complete_parser()):
        assert f".SS {parser.prog}\n" in page
        for action in parser._actions:
            for option in action.option_strings:
                assert option.replace("-", r"\-") in page, option
    for code in EXIT_CODES:
        assert rf"\fB{code}\fR" in page


@pytest.mark.parametrize(
    "lint",
    [
        pytest.param(["groff", "-man", "-Tutf8", "-ww", "-z"], marks=pytest.mark.needs("groff")),
        pytest.param(["mandoc", "-T", "lint", "-W", "style"], marks=pytest.mark.needs("mandoc")),
        pytest.param(["man", "--warnings", "-l", "-"], marks=pytest.mark.needs("groff")),
    ],
    ids=lambda command: command[0],
)
def test_the_manual_page_has_no_mistakes(lint: list[str]) -> None:
    done = subprocess.run(
        lint, input=cellwright("man").stdout, env=os.environ | {"MANPAGER": "cat", "LC_ALL": "C.UTF-8"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    shown = done.stdout if lint[0] == "mandoc" else ""
    assert (done.returncode, shown, done.stderr) == (0, "", "")


@pytest.mark.needs("mandoc")
def test_the_manual_page_shows_commands_as_they_are_typed() -> None:
    shown = subprocess.run(
        ["mandoc", "-T", "utf8", "-O", "width=200"], input=cellwright("man").stdout, capture_output=True, text=True,
        check=True,
    ).stdout.replace("_\b", "")  # fmt: skip
    plain = re.sub(".\b", "", shown)
    assert "cellwright run -c 'print(sum(range(10)))'" in plain
    assert "a check of `cellwright doctor` failed" in plain


def on_a_terminal(*arguments: str, **environment: str) -> bytes:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "cellwright", *arguments]
    variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables | environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    ):  # fmt: skip
        os.close(theirs)
        told = b""
        try:
            while part := os.read(ours, 4096):
                told += part
        except OSError:  # EIO: the other end is closed
            pass
    os.close(ours)
    return told


def test_a_terminal_gets_colours_unless_they_are_declined() -> None:
    arguments = ["run", *OPTIONS, "-c", "open('/etc/shadow')"]
    told = on_a_terminal(*arguments)
    assert b"\x1b[33mrefused\x1b[0m" in told
    assert b"\x1b[31mfailed (exception)\x1b[0m" in told
    for declined in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        assert b"\x1b" not in on_a_terminal(*arguments, **declined)
    assert "\x1b" not in cellwright(*arguments, FORCE_COLOR="").stderr


def test_a_pipe_gets_colours_only_on_request_and_json_never() -> None:
    arguments = ["run", *OPTIONS, "-c", "open('/etc/shadow')"]
    assert "\x1b[31mfailed" in cellwright(*arguments, FORCE_COLOR="1", NO_COLOR="").stderr
    done = cellwright("run", "--json", *arguments[1:], FORCE_COLOR="1", NO_COLOR="")
    assert "\x1b" not in done.stdout
    for command in (
        ["explain", *OPTIONS, "--json"],
        ["status", "--help"],
        ["ps", "--json"],
        ["man"],
    ):
        assert "\x1b" not in cellwright(*command, FORCE_COLOR="1", NO_COLOR="").stdout
