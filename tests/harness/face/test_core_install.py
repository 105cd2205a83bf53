"""The public names in a core install, without any extra."""

import subprocess
import sys

from tests.conftest import ROOT

WITHOUT_EXTRAS = """
import importlib.abc, sys
from importlib.metadata import packages_distributions
kept = {"msgspec", "psutil", "pyseccomp", "cellwright", "pip", *sys.stdlib_module_names}
blocked = packages_distributions().keys() - kept
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + code], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_names_are_there_and_have_help() -> None:
    out = run(
        "import cellwright, pydoc\n"
        "names = {}\n"
        "exec('from cellwright import *', names)\n"
        "assert set(cellwright.__all__) <= names.keys()\n"
        "for room in (*cellwright._ROOMS, 'agent', 'audit', 'executor', 'isolation', 'judging', 'permissions'):\n"
        "    exec(f'from cellwright.{room} import *', names)\n"
        "    pydoc.render_doc(f'cellwright.{room}')\n"
        "print(pydoc.plain(pydoc.render_doc(cellwright)))"
    )
    assert "class Sandbox" in out
    assert "Needs the extra `mcp`" in out


def test_a_name_whose_extra_is_missing_says_what_to_install_when_it_is_used() -> None:
    out = run(
        "from cellwright import McpServers, PolicyError, Sandbox\n"
        "assert not isinstance(1, McpServers)\n"
        "for use in (lambda: McpServers([]), lambda: McpServers.anything):\n"
        "    try: use()\n"
        "    except PolicyError as error: print(error)\n"
        "    else: raise AssertionError\n"
    )
    assert out.count("McpServers needs the extra `mcp`: No module named") == 2
    assert out.count(".[mcp]") == 2


def test_the_agents_client_of_a_model_does_the_same() -> None:
    out = run(
        "from cellwright import PolicyError\n"
        "from cellwright.agent import *\n"
        "try: ModelClient('http://localhost')\n"
        "except PolicyError as error: print(error)\n"
    )
    assert "ModelClient needs the extra `agent`: " in out
    assert ".[agent]" in out
