"""Stubs of the tools of real servers: all of them compile, and type checkers accept them."""

from pathlib import Path

import pytest

from cellwright.harness.stubs.stub_tree import python_tree, typescript_tree
from cellwright.harness.stubs.stub_types import ANY
from tests.harness.stubs.catalogue import catalogue, described_all
from tests.harness.stubs.checking import mypy, tsc
from tests.harness.stubs.kinds import complaints

pytestmark = pytest.mark.needs("shared")


def test_every_tool_has_a_file_of_its_own() -> None:
    assert len(catalogue()) > 400
    names = [path for path in python_tree(catalogue()) if "__init__" not in path]
    assert len(names) == len(catalogue())
    modules = [path for path in typescript_tree(catalogue()) if path.endswith(".mjs")]
    assert len([path for path in modules if "index" not in path]) == len(catalogue())


def test_every_stub_compiles_and_is_made_of_what_stubs_are_made_of() -> None:
    for path, text in python_tree(catalogue()).items():
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert complaints(text) == [], path


@pytest.mark.slow
def test_mypy_accepts_every_stub(tmp_path: Path) -> None:
    assert mypy(python_tree(catalogue()), tmp_path) == ""


@pytest.mark.slow
@pytest.mark.needs("tsc")
def test_tsc_accepts_every_declaration(tmp_path: Path) -> None:
    assert tsc(typescript_tree(catalogue()), tmp_path) == ""


def test_most_is_known_of_what_tools_take() -> None:
    """Types would be of little use if they were `Any`."""
    fields = [field for each in described_all() for field in each.parameters]
    assert len([field for field in fields if field.type == ANY]) < len(fields) / 20
    assert len([each for each in described_all() if each.result != ANY]) >= 20
