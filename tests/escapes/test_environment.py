"""A launcher started with nothing: no variable and no memory of the embedding process."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cellwright import Sandbox
from tests.conftest import policy_named

SECRET = "a-secret-of-the-host"


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.setenv("HOST_SECRET", SECRET)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    with Sandbox(policy=policy_named("strict")) as box:
        yield box


def test_a_plain_child_would_see_the_variable(sandbox: Sandbox) -> None:
    read = [sys.executable, "-c", "import os; print(os.environ['HOST_SECRET'])"]
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout.strip() == SECRET
    assert sandbox.execute("import os; 'HOST_SECRET' in os.environ").value is False


def test_a_clean_environment_is_all_there_is(sandbox: Sandbox) -> None:
    names = sandbox.execute("import os; sorted(os.environ)").value
    assert names == ["HOME", "LANG", "PATH", "TMPDIR", "TZ"]


def test_the_kernels_copy_of_the_environment_is_empty(sandbox: Sandbox) -> None:
    """os.environ.clear() does not touch it; only an exec with nothing does."""
    assert sandbox.execute("open('/proc/self/environ').read()").value == ""


def test_arguments_of_the_launcher_name_no_path_of_ours(sandbox: Sandbox) -> None:
    arguments = sandbox.execute("open('/proc/self/cmdline').read()").value
    assert os.path.dirname(os.path.dirname(os.path.abspath(__file__))) not in arguments
