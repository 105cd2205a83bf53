"""`help(Sandbox)` is what a newcomer reads first: two screens, with `execute` before all others."""

import pydoc
from unittest.mock import create_autospec

from cellwright import Sandbox

COLUMNS = 100


class Own(Sandbox):
    """A sandbox with a method of its own."""

    def count(self) -> int:
        return 1


def help_of(kind: type) -> list[str]:
    lines = pydoc.plain(pydoc.render_doc(kind)).splitlines()
    return [
        line[start : start + COLUMNS]
        for line in lines
        for start in range(0, max(len(line), 1), COLUMNS)
    ]


def test_the_first_two_screens_of_help_have_the_text_and_then_execute() -> None:
    text = "\n".join(help_of(Sandbox)[:100])
    assert "class Sandbox in module cellwright" in text
    assert str(Sandbox.__doc__).split()[-1] in text
    methods = text.partition("Methods ")[2]
    assert methods.partition("(")[0].split()[-1] == "execute"
    assert str(Sandbox.execute.__doc__).split()[-1] in methods


def test_the_text_names_every_argument_and_every_method() -> None:
    text = Sandbox.__doc__ or ""
    words = {word.strip("`,.:;()") for word in text.split()}
    assert set(Sandbox.__init__.__wrapped__.__signature__.parameters) - {"self"} <= words  # type: ignore[attr-defined]
    mine = {name for name in dir(Sandbox) if name[0] != "_"}
    internal = {"has_tool", "leave_open_at_exit", "sibling", "compiles", "execute_on_streams"}
    twins = {name for name in mine if name[0] == "a" and name[1:] in mine}
    assert mine - internal - twins <= words


def test_everything_else_gets_every_name() -> None:
    assert {"session", "aexecute", "create", "close"} <= set(dir(Sandbox))
    with Sandbox(pool=0) as sandbox:
        assert {"session", "aexecute", "close"} <= set(dir(sandbox))
    assert create_autospec(Sandbox).session
    assert "count(self) -> int" in "\n".join(help_of(Own))
