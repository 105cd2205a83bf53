"""The kernel for notebooks, started as Jupyter starts it and asked over its sockets."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jupyter_kernel_test
import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

_SECONDS = 60

# The clients of Jupyter leave an event loop for the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def _install(prefix: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cellwright", "jupyter", "install", "--prefix", str(prefix)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    prefix = tmp_path_factory.mktemp("jupyter")
    done = _install(prefix)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(prefix / "share/jupyter"))
        patch.setenv("IPYTHONDIR", str(prefix / "ipython"))
        yield prefix


class Notebook:
    """A client of a kernel that runs."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the reply, and the messages about outputs."""
        told: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(
            code, timeout=_SECONDS, output_hook=told.append, allow_stdin=False, **options
        )
        leave_out = ("status", "execute_input")
        return reply["content"], [each for each in told if each["msg_type"] not in leave_out]

    def text(self, code: str) -> str:
        """Return the text of the value of a program."""
        reply, told = self.run(code)
        assert reply["status"] == "ok", reply
        return str(told[-1]["content"]["data"]["text/plain"])

    def ask(self, message_id: str) -> dict[str, Any]:
        reply = self.client.get_shell_msg(timeout=_SECONDS)
        assert reply["parent_header"]["msg_id"] == message_id
        content: dict[str, Any] = reply["content"]
        return content


@pytest.fixture(scope="module")
def notebook(installed: Path) -> Iterator[Notebook]:
    manager, client = start_new_kernel(kernel_name="cellwright", startup_timeout=_SECONDS)
    yield Notebook(manager, client)
    client.stop_channels()
    manager.shutdown_kernel()


@pytest.mark.usefixtures("installed")
class TestConformance(jupyter_kernel_test.KernelTests):
    """The suite of the Jupyter project; what it has no samples for here, it skips."""

    kernel_name = "cellwright"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples: ClassVar = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n"]
    incomplete_code_samples: ClassVar = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples: ClassVar = ["import = 7q"]
    code_generate_error = "raise ValueError('x')"
    code_execute_result: ClassVar = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data: ClassVar = [{"code": "display(1)", "mime": "text/plain"}]
    code_inspect_sample = "zip"
    supported_history_operations = ("tail",)


def test_a_notebook_keeps_variables_and_shows_values(notebook: Notebook) -> None:
    notebook.run("rows = [(1, 'a'), (2, 'b')]")
    assert notebook.text("rows") == "[(1, 'a'), (2, 'b')]"
    assert notebook.text("_") == "[(1, 'a'), (2, 'b')]"  # nothing that the kernel asks is `_`


def test_output_comes_while_the_program_runs(notebook: Notebook) -> None:
    reply, told = notebook.run(
        "import sys, time\nprint('one', flush=True)\nprint('two', file=sys.stderr)"
    )
    assert [(each["content"]["name"], each["content"]["text"]) for each in told] == [
        ("stdout", "one\n"), ("stderr", "two\n"),
    ]  # fmt: skip
    assert reply["status"] == "ok"


def test_an_error_has_the_number_of_the_notebooks_cell_and_is_told_once(notebook: Notebook) -> None:
    notebook.client.complete("pri")
    notebook.client.get_shell_msg(
        timeout=_SECONDS
    )  # a call of the session, which moves its numbers
    reply, told = notebook.run("def broken():\n    return 1 / 0\nbroken()")
    (error,) = told
    assert error["msg_type"] == "error"
    assert (reply["ename"], reply["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert f'File "<cell {reply["execution_count"]}>", line 2, in broken' in "\n".join(
        reply["traceback"]
    )


@pytest.mark.parametrize("code", ["def g(:", "raise ExceptionGroup('all', [ValueError(1)])"])
def test_errors_of_other_forms_are_told_once(notebook: Notebook, code: str) -> None:
    assert [each["msg_type"] for each in notebook.run(code)[1]] == ["error"]


def test_what_a_program_writes_before_its_traceback_stays(notebook: Notebook) -> None:
    _, told = notebook.run("import sys; sys.stderr.write('before\\n'); 1/0")
    assert [each["content"].get("text") for each in told] == ["before\n", None]


_SHOWN = """
class Shown:
    def _repr_html_(self):
        return '<b>bold</b><script>parent.escaped = 1</script>'
    def _repr_png_(self):
        return b'\\x89PNG'
    def _repr_json_(self):
        return {"a": [1]}
    def _repr_mimebundle_(self, **_):
        return {"application/javascript": "parent.escaped = 1", "application/vnd.jupyter.widget-view+json": {}}
"""


def test_a_value_shows_itself_without_executing_scripts(notebook: Notebook) -> None:
    notebook.run(_SHOWN)
    _, (told,) = notebook.run("Shown()")
    data = told["content"]["data"]
    assert set(data) == {"text/plain", "text/html", "image/png", "application/json"}
    assert data["application/json"] == {"a": [1]}
    assert data["text/html"].startswith('<iframe sandbox="" ')
    assert "<script" not in data["text/html"]


def test_display_shows_several_values_in_order(notebook: Notebook) -> None:
    notebook.run(_SHOWN)
    _, told = notebook.run("display(1, Shown())\ndisplay('two')\n3")
    assert [each["msg_type"] for each in told] == ["display_data"] * 3 + ["execute_result"]
    assert "image/png" in told[1]["content"]["data"]
    assert told[2]["content"]["data"] == {"text/plain": "'two'"}


def test_a_refused_attempt_is_shown(notebook: Notebook) -> None:
    _, told = notebook.run("open('/etc/shadow')")
    assert "refused: openat '/etc/shadow'" in told[0]["content"]["text"]


def test_input_is_refused_with_a_reason(notebook: Notebook) -> None:
    reply, _ = notebook.run("input('name? ')")
    assert reply["ename"] == "EOFError"
    assert "cannot ask a person" in reply["evalue"]


def test_completion_and_inspection_are_answered_in_the_cell(notebook: Notebook) -> None:
    notebook.run(
        "class Account:\n    'Money.'\n    def deposit(self, amount: int) -> None: ...\nmine = Account()"
    )
    found = notebook.ask(notebook.client.complete("x = mine.dep"))
    assert (found["matches"], found["cursor_start"], found["cursor_end"]) == (["deposit"], 9, 12)
    told = notebook.ask(notebook.client.inspect("mine.deposit(", 13))
    assert "Signature: mine.deposit(amount: int) -> None" in told["data"]["text/plain"]
    assert not notebook.ask(notebook.client.inspect("nothing_of_that_name", 5))["found"]


@pytest.mark.parametrize(
    "attack",
    [
        "class Bad:\n    def __dir__(self): return ['x' * 10**6] * 10**4\nbad = Bad()",
        "class Bad:\n    def __dir__(self): raise SystemExit\nbad = Bad()",
        "class Bad:\n    def __dir__(self): return [1, None]\nbad = Bad()",
        "import sys; sys.modules['_cellwright_notebook']._MATCH_CHARACTERS = 10**7\nclass Bad:\n    def __dir__(self): return ['x' * 10**6, 'xy']\nbad = Bad()",
        "import sys; sys.modules['_cellwright_notebook'].answer = lambda value: 1/0\nbad = 1",
        "import sys; sys.modules['_cellwright_notebook'].json.dumps = lambda value: '[' * 10**6\nbad = 1",
    ],
)
def test_a_hostile_answer_to_completion_is_bounded(notebook: Notebook, attack: str) -> None:
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=_SECONDS)
    notebook.run(attack)
    found = notebook.ask(notebook.client.complete("bad.x"))
    assert sum(map(len, found["matches"])) <= 500 * 200
    reply, told = notebook.run("print('still here')\n1 + 1")
    assert reply["status"] == "ok", reply
    assert told[0]["content"]["text"] == "still here\n"


def test_a_hostile_description_is_cut(notebook: Notebook) -> None:
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=_SECONDS)
    notebook.run(
        "import sys; module = sys.modules['_cellwright_notebook']; module._TEXT_CHARACTERS = 10**7\n"
        "module._description = lambda *given, **more: 'x' * 900_000\nbad = 1"
    )
    told = notebook.ask(notebook.client.inspect("bad", 1))
    assert len(told["data"]["text/plain"]) == 20_000


def test_an_interrupt_keeps_the_variables(notebook: Notebook) -> None:
    notebook.run("kept = 5")
    threading.Timer(0.5, notebook.manager.interrupt_kernel).start()
    reply, _ = notebook.run("while True: pass")
    assert reply["ename"] == "KeyboardInterrupt"
    assert notebook.text("kept") == "5"


def test_a_lost_cell_is_said_and_the_notebook_goes_on_in_another(notebook: Notebook) -> None:
    notebook.run("kept = 5")
    reply, _ = notebook.run("import os; os._exit(3)")
    assert reply["traceback"][-1].startswith("The cell is gone")
    assert notebook.run("kept")[0]["ename"] == "NameError"


def test_a_restart_begins_with_nothing(notebook: Notebook) -> None:
    notebook.run("kept = 5")
    notebook.manager.restart_kernel()
    notebook.client.wait_for_ready(timeout=_SECONDS)
    assert notebook.run("kept")[0]["ename"] == "NameError"


def test_expressions_of_the_frontend_are_evaluated_in_the_cell(notebook: Notebook) -> None:
    told = notebook.run("n = 6", user_expressions={"double": "n * 2", "bad": "1/0"})[0][
        "user_expressions"
    ]
    assert told["double"]["data"]["text/plain"] == "12"
    assert told["bad"]["ename"] == "ZeroDivisionError"


def test_nbclient_runs_a_notebook(installed: Path) -> None:
    cells = [nbformat.v4.new_code_cell("n = 20"), nbformat.v4.new_code_cell("print('so')\nn + 1")]
    document = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(document, timeout=_SECONDS, kernel_name="cellwright").execute()
    stream, value = cells[1].outputs
    assert (stream["text"], value["data"]["text/plain"]) == ("so\n", "21")


def test_install_writes_the_options_into_the_command(tmp_path: Path) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('extends = "strict"\nname = "mine"\n')
    done = _install(tmp_path, "--name", "mine", "--policy", str(policy), "--timeout", "5")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "share/jupyter/kernels/mine/kernel.json").read_text()
    assert f'"{policy}"' in text
    assert "Python in a cell (mine)" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--policy", "nosuch"), "nosuch"), (("--name", "a b"), "--name"), (("--prefix", "/proc/1"), "cannot write")],
)  # fmt: skip
def test_install_refuses_what_cannot_work(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = _install(tmp_path, *options)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
