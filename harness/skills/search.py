"""`SkillSearch`: a search index over skills and the tools of a registry, kept up to date."""

import threading
from typing import Any

from ..search.model import Model
from ..search.search import SearchIndex
from ..tools.index import ToolSource, document_of_tool
from .skills import SkillSet, answer_of, documents


class SkillSearch:
    """Finds skills and tools, which it ranks together.  Safe from many threads.

    `model` finds them by meaning too.
    """

    def __init__(self, skills: SkillSet, tools: ToolSource, model: Model | None = None) -> None:
        self._skills = skills
        self._tools = tools
        self._model = model
        self._lock = threading.Lock()
        self._known: tuple[int, tuple[str, ...]] | None = None
        self._index = SearchIndex()

    def search(self, query: str, limit: int = 5) -> dict[str, Any]:
        """Return what matches a query, the best first, in the form of SkillSet.search."""
        return answer_of(self._current().search(query, limit=limit))

    def _current(self) -> SearchIndex:
        """Return the index, made anew if a tool or a skill has changed."""
        skills = self._skills.usable()
        known = self._tools.revision(), tuple(each.reference for each in skills)
        with self._lock:
            if known != self._known:
                tools = map(document_of_tool, self._tools.list_tools())
                meaning = self._model.meaning() if self._model else None
                self._index = SearchIndex([*documents(skills), *tools], meaning=meaning)
                self._known = known
            return self._index
