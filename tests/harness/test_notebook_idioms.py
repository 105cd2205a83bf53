"""Programs as IPython has them: indented ones, shell lines, magics and `IPython.display`."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.harness.adapters.jupyter.notebook_session import NotebookOutcome, NotebookSession
from cellwright.harness.sandbox.calls.idioms import without_indent
from cellwright.policies.compiling.environment import own_home
from tests.conftest import policy_named


class Shown(NamedTuple):
    """The outcome of one program, and its output."""

    outcome: NotebookOutcome
    text: str

    @property
    def value(self) -> object:
        return (self.outcome.value or {}).get("text/plain")


class Notebook:
    """Runs programs one after the other."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._session = NotebookSession(sandbox.session, 60.0)

    def run(self, code: str) -> Shown:
        said: list[str] = []

        async def note(_: str, text: str) -> None:
            said.append(text)

        outcome = asyncio.run(self._session.execute(code, 1, note))
        return Shown(outcome, "".join(said))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("workshop"), pool=0) as made:
        yield made


@pytest.fixture(scope="module")
def notebook(sandbox: Sandbox) -> Notebook:
    return Notebook(sandbox)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("\n    x = 6\n    x * 7\n    ", 42),
        ("  if True:\n      y = 1\n  y", 1),
        ("\t1", 1),
        ("\n\n  # a comment\n  'a'", "a"),
        ("    # a comment\n5", 5),
        ("  text = '''\n  a\nb'''\n  text", "\na\nb"),
    ],
)
def test_an_indented_program_runs(sandbox: Sandbox, code: str, value: object) -> None:
    result = sandbox.execute(code)
    assert (result.value, result.error) == (value, None)


def test_lines_of_an_indented_program_keep_their_numbers(sandbox: Sandbox) -> None:
    result = sandbox.execute("\n\n    x = 1\n    x / 0\n")
    assert 'File "<cell>", line 4' in (result.traceback or "")


@pytest.mark.parametrize("code", ["5", "x = 1\n  \n", "", "\n\n", "if x:\n    y"])
def test_a_program_that_is_not_indented_stays(code: str) -> None:
    assert without_indent(code) == code


@pytest.mark.parametrize(
    ("code", "value", "text"),
    [
        ("!echo its; pwd", None, "its\n/workspace\n"),
        ("word = 'there'\nfor n in range(2):\n    !echo {n} $word $HOME", None, "0 there /workspace\n1 there /workspace\n"),
        ("lines = !printf 'a\\nb'\nlines", "['a', 'b']", ""),
        ("%cd /tmp\n%cd -\n%pwd", "'/workspace'", "/tmp\n/workspace\n"),
        ("%env GIVEN=5\nimport os\nos.environ['GIVEN']", "'5'", "env: GIVEN=5\n"),
        ("%%bash\necho one\necho two", None, "one\ntwo\n"),
        ("%%writefile made.txt\n%text", None, "Writing made.txt\n"),
        ("!cat made.txt", None, "%text\n"),
        ("%%capture said\nprint('hidden')", None, ""),
        ("said.stdout", "'hidden\\n'", ""),
        ("%matplotlib inline\n%load_ext autoreload\n1", "1", ""),
        ("text = '''\n!ls\n%pwd\n'''\n!true\ntext", "'\\n!ls\\n%pwd\\n'", ""),
        ("    !echo a \\\n        b\n    2", "2", "a b\n"),
    ],
)  # fmt: skip
def test_commands_of_ipython_run(
    notebook: Notebook, code: str, value: str | None, text: str
) -> None:
    shown = notebook.run(code)
    assert (shown.outcome.result.error, shown.value, shown.text) == (None, value, text)


@pytest.mark.parametrize(
    ("code", "said"),
    [("%time 1 + 1", "Wall time"), ("%%time\nx = 5", "Wall time"), ("%timeit -n 5 -r 2 1", "2 runs, 5 loops")],
)  # fmt: skip
def test_time_is_measured(notebook: Notebook, code: str, said: str) -> None:
    shown = notebook.run(code)
    assert shown.outcome.result.ok
    assert said in shown.text


@pytest.mark.parametrize("code", ["!pip install {}", "%pip install {}", "pip install -q {}>=1"])
def test_a_package_that_is_missing_is_refused_with_the_option_that_adds_it(
    notebook: Notebook, code: str
) -> None:
    error = notebook.run(code.format("no-such-package")).outcome.result.error or ""
    assert error.startswith("PackageMissingError: pip install no-such-package")
    assert "--packages" in error


def test_an_unknown_magic_and_a_failing_script_are_errors(notebook: Notebook) -> None:
    assert notebook.run("%nothing").outcome.result.error == (
        "UsageError: Line magic function `%nothing` not found."
    )
    assert "CalledProcessError" in (notebook.run("%%bash\nexit 3").outcome.result.error or "")


def test_a_policy_without_processes_refuses_shell_lines_and_says_so() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as strict:
        made = Notebook(strict)
        error = made.run("!ls").outcome.result.error or ""
        assert error.startswith("PermissionError: the policy lets programs start no processes")
        assert made.run("%pwd").value == "'/workspace'"


def test_values_are_shown_by_ipythons_own_names(notebook: Notebook) -> None:
    code = """
    import IPython
    from IPython.display import display, HTML, Image, JSON, Markdown
    display(HTML("<b>x</b>"), Markdown("# y"))
    display({"text/latex": "z"}, raw=True)
    display(Image(b"\\x89PNG"), JSON('{"a": 1}'))
    IPython.display.HTML("<i>last</i>")
    """
    outcome = notebook.run(code).outcome
    assert outcome.result.error is None
    html, markdown, latex, image, json = outcome.displayed
    assert (html["text/html"], markdown["text/markdown"]) == ("<b>x</b>", "# y")
    assert latex == {"text/latex": "z"}
    assert (image["image/png"], json["application/json"]) == ("iVBORw==", {"a": 1})
    assert (outcome.value or {})["text/html"] == "<i>last</i>"


def test_workspace_is_also_at_a_own_home() -> None:
    policy = policy_named("workshop")
    at_home = msgspec.structs.replace(
        policy, environment={**policy.environment, "HOME": "/home/user"}
    )
    with Sandbox(policy=at_home, pool=0) as sandbox:
        code = """
        import os, subprocess
        with open(os.path.expanduser("~/a"), "w") as file:
            file.write("x")
        subprocess.check_output("cd; pwd; ls /workspace", shell=True, text=True)
        """
        assert sandbox.execute(code).value == "/home/user\na\n"
    shown = msgspec.structs.replace(
        at_home, filesystem=msgspec.structs.replace(at_home.filesystem, read=("/home",))
    )
    assert own_home(at_home) == "/home/user"
    assert own_home(shown) == ""
