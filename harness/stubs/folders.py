"""Folders of stubs in cells, kept equal to the tools that the broker offers."""

import threading
from collections.abc import Callable

from ...policies.languages import LANGUAGES, interpreter_of
from ...runner.shared_files import SharedFiles
from ..schemas.spec import ToolSpec

_NODE = interpreter_of("javascript")


class StubFolders:
    """The stub folders of one sandbox: TypeScript for Node's languages, Python for all others.  Safe
    from many threads."""

    def __init__(self, may_call: Callable[[str], bool]) -> None:
        self._may_call = may_call
        self._lock = threading.Lock()
        self._files: dict[bool, SharedFiles] = {}
        self._laid: dict[bool, list[ToolSpec]] = {}

    def shared_files(self, language: str) -> SharedFiles:
        """Return the folder that cells of `language` see."""
        with self._lock:
            return self._files.setdefault(_is_node(language), SharedFiles())

    def follow(self, language: str, specs: list[ToolSpec]) -> None:
        """Write the stubs of the callable tools in `specs`, if the tools have changed.

        Nothing is written before a program of the language runs.
        """
        if self._laid.get(_is_node(language)) == specs:  # quick: the same objects are equal
            return
        from .tree import python_tree, typescript_tree  # lazy: needed only with tools

        tree = typescript_tree if _is_node(language) else python_tree
        shared_files = self.shared_files(language)
        with self._lock:
            shared_files.replace(tree(spec for spec in specs if self._may_call(spec.name)))
            self._laid[_is_node(language)] = specs


def _is_node(language: str) -> bool:
    return language in LANGUAGES and interpreter_of(language) == _NODE
