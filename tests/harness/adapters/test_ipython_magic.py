"""The magic `%%cellwright`, in a shell of IPython."""

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from cellwright import PolicyError
from cellwright.harness.adapters.jupyter.magic import options_of


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        made = InteractiveShell.instance()
        made.history_manager.enabled = False
        made.run_line_magic("load_ext", "cellwright")
        yield made
        made.run_line_magic("unload_ext", "cellwright")
        assert "cellwright" not in made.magics_manager.magics["cell"]
        made.history_manager.end_session()
        InteractiveShell.clear_instance()


def test_values_go_in_and_come_out(shell: InteractiveShell) -> None:
    shell.user_ns["rows"] = [1, 2, 3]
    cell = "import datetime\ntotal, day = sum(rows), datetime.date(2026, 1, 2)\ntotal * 2"
    assert shell.run_cell_magic("cellwright", "-i rows --out total,day", cell) == 12
    assert (shell.user_ns["total"], shell.user_ns["day"]) == (6, "2026-01-02")
    assert shell.run_cell("%cellwright total + 1").result == 7  # its variables stay


def test_output_and_violations_are_shown(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    done = shell.run_cell("%%cellwright\nprint('inside')\nopen('/etc/shadow')")
    out, err = capsys.readouterr()
    assert not done.success
    assert out.startswith("inside\n")
    assert "cellwright: refused: openat '/etc/shadow'" in err


def test_a_program_does_not_run_in_the_notebook_itself(shell: InteractiveShell) -> None:
    shell.user_ns["secret"] = "s3cret"
    assert not shell.run_cell("%cellwright secret").success


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-i nosuch", "no such variable"),
        ("-o nosuch", "NameError"),
        ("-i shell_object", "not JSON"),
    ],
)
def test_values_that_cannot_pass_are_refused(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    shell.user_ns["shell_object"] = object()
    assert not shell.run_cell(f"%%cellwright {line}\n1").success
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("line", ["--nosuch", "-i", "--timeout soon", "-o 1a", "-i a-b"])
def test_wrong_options_are_refused(line: str) -> None:
    with pytest.raises(PolicyError):
        options_of(line)


def test_reset_begins_with_nothing(shell: InteractiveShell) -> None:
    shell.run_cell_magic("cellwright", "", "kept = 1")
    assert not shell.run_cell("%%cellwright --reset\nkept").success
