"""Completion in real shells: each shell runs at a terminal, finds the script where its first lines say, and
gets keys.  A command `cellwright` of the test shows the words with which the shell then called it."""

import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright.harness.cli.helping.completion import NAMES, SHELLS
from tests.conftest import ROOT

PATIENCE_SECONDS = 60
SCRIPTS = {
    "bash": ".local/share/bash-completion/completions/cellwright",
    "zsh": "functions/_cellwright",
    "fish": ".config/fish/completions/cellwright.fish",
}
STARTED = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SETUP = {
    "bash": """
        PS1='> '; source /usr/share/bash-completion/bash_completion
        bind 'set show-all-if-ambiguous on'; bind 'set enable-bracketed-paste off'""",
    "zsh": """
        PS1='> '; fpath=(~/functions $fpath); autoload -Uz compinit; compinit -u
        unset zle_bracketed_paste; setopt no_auto_menu""",
    "fish": """
        set -g fish_autosuggestion_enabled 0; set -g fish_greeting
        source ~/.config/fish/completions/cellwright.fish""",
}
COMMAND = f"""#!/bin/sh
if [ "$1" = completion ]; then
    echo asked >> ~/asked
    cd {ROOT} && exec {sys.executable} -m cellwright "$@"
fi
[ "$1" = begin ] && echo BEGUN:{{}} && exit
printf 'CALLED:'; printf '<%s>' "$@"; echo ':END'
"""


class Shell:
    """A shell at a terminal of 200 columns, which has completion of cellwright."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        command, setup = STARTED[name], textwrap.dedent(SETUP[name])
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(self._ours, (50, 200))
        environment = {
            "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "TERM": "dumb",
            "XDG_STATE_HOME": str(home / "state"), "LANG": "C.UTF-8",
        }  # fmt: skip
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command], cwd=home / "work", env=environment,
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self._seen = b""
        self.type(f"{setup}\ncellwright begin\n")
        self.read_until("BEGUN:{}")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, *texts: str) -> str:
        """Return what the shell wrote since the last call, once it has all of `texts`."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not all(text.encode() in self._seen for text in texts):
            ready, _, _ = select.select([self._ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"{texts} not in {self._seen.decode(errors='replace')}"
            self._seen += os.read(self._ours, 65536)
        seen, self._seen = self._seen, b""
        return seen.decode(errors="replace")

    def completed(self, line: str) -> str:
        """Return the words that the command gets after Tab and Enter at the end of `line`."""
        self.type(f"{line}\t\n")
        return self.read_until(":END").partition("CALLED:")[2].partition(":END")[0]

    def close(self) -> None:
        os.close(self._ours)  # SIGHUP
        self._process.wait(PATIENCE_SECONDS)


def generated(shell: str) -> str:
    command = [sys.executable, "-m", "cellwright", "completion", shell]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the scripts of all shells, a workspace, and a directory to work in."""
    made = tmp_path_factory.mktemp("home")
    for shell, path in SCRIPTS.items():
        (made / path).parent.mkdir(parents=True)
        (made / path).write_text(generated(shell))
    (made / "bin").mkdir()
    (made / "bin" / "cellwright").write_text(COMMAND)
    (made / "bin" / "cellwright").chmod(0o755)
    (made / "work").mkdir()
    (made / "work" / "report-of-mine.py").write_text("print(1)")
    put = [
        sys.executable,
        "-m",
        "cellwright",
        "workspace",
        "put",
        "notes-of-mine",
        f"{made}/work/report-of-mine.py",
    ]
    subprocess.run(put, cwd=ROOT, env=os.environ | {"XDG_STATE_HOME": f"{made}/state"}, check=True)
    return made


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("bash", marks=pytest.mark.needs("bash_completion")),
        pytest.param("zsh", marks=pytest.mark.needs("zsh")),
        pytest.param("fish", marks=pytest.mark.needs("fish")),
    ],
)
def shell(request: pytest.FixtureRequest, home: Path) -> Iterator[Shell]:
    opened = Shell(request.param, home)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cellwright works", "<workspace>"),
        ("cellwright audit tra", "<audit><trace>"),
        ("cellwright run --timeo", "<run><--timeout>"),
        ("cellwright run --policy trus", "<run><--policy><trusted-read>"),
        ("cellwright run --language type", "<run><--language><typescript>"),
        ("cellwright repl --optional landl", "<repl><--optional><landlock>"),
        ("cellwright explain --diff worksh", "<explain><--diff><workshop>"),
        ("cellwright run report-of-", "<run><report-of-mine.py>"),
        ("cellwright run --stdin report-of-", "<run><--stdin><report-of-mine.py>"),
        ("cellwright run report-of-mine.py -- report-of-", "<run><report-of-mine.py><--><report-of-mine.py>"),
        ("cellwright run --timeout 5 --pol", "<run><--timeout><5><--policy>"),
        ("cellwright run --workspace notes-of", "<run><--workspace><notes-of-mine>"),
        ("cellwright workspace show notes-of", "<workspace><show><notes-of-mine>"),
        ("cellwright help exit", "<help><exit-codes>"),
        ("cellwright bench throughp", "<bench><throughput>"),
        ("cellwright runs mark runs.db 1 2 mad", "<runs><mark><runs.db><1><2><made>"),
        ("cellwright privacy scan --kind ema", "<privacy><scan><--kind><email>"),
    ],
)  # fmt: skip
def test_tab_completes(shell: Shell, line: str, words: str) -> None:
    assert shell.completed(line) == words


def test_the_value_behind_an_equals_sign_is_completed(shell: Shell) -> None:
    words = shell.completed("cellwright run --policy=trus")
    assert words == "<run><--policy=trusted-read>"


@pytest.mark.parametrize(
    "line", ["cellwright run --timeout report-of-", "cellwright status report-of-"]
)
def test_files_are_not_offered_where_none_is_taken(shell: Shell, line: str) -> None:
    """A number of seconds is no file: nothing is added to what was typed."""
    assert shell.completed(line).endswith("<report-of->")


def test_several_matches_are_listed(shell: Shell) -> None:
    line = "cellwright run --policy st"
    # fish shows its list only at a terminal that moves the cursor
    shell.type(f"complete -C '{line}'\n" if shell.name == "fish" else f"{line}\t")
    shell.read_until("standard", "strict")
    shell.type("\x15cellwright begin\n")
    shell.read_until("BEGUN:{}")


def test_only_names_that_are_kept_start_a_process(shell: Shell, home: Path) -> None:
    """What the parser knows is in the script: Tab starts no Python for it."""
    (home / "asked").unlink(missing_ok=True)
    shell.completed("cellwright run --policy trus")
    assert not (home / "asked").exists()
    shell.completed("cellwright workspace show notes-of")
    assert (home / "asked").exists()


@pytest.mark.parametrize("kind", NAMES)
def test_a_user_who_keeps_nothing_has_no_names(kind: str, tmp_path: Path) -> None:
    variables = {
        "XDG_STATE_HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "cellwright", "completion", "--names", kind], cwd=ROOT,
        env=os.environ | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")


def test_a_name_that_a_shell_would_execute_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from cellwright.harness.cli.helping import completion

    hostile = ["good", "$(touch x)", "`id`", "a b", "a\nb", "; id", "é", ""]
    monkeypatch.setitem(completion._NAMES, "sets", lambda: hostile)
    assert completion.names_of("sets") == ["good"]


@pytest.mark.parametrize("shell_name", SHELLS)
def test_a_script_parses(shell_name: str) -> None:
    if program := shutil.which(shell_name):
        done = subprocess.run(
            [program, "-n"], input=generated(shell_name), text=True, capture_output=True, check=True
        )
        assert done.stderr == ""
