"""One order out of several: what words find and what meaning finds.

Pure.  Who knows the meaning of a text is somebody else (`semantic.py`, or whatever a caller has).
"""

from collections.abc import Sequence, Set
from typing import Protocol

# Reciprocal rank fusion (Cormack, Clarke, Buettcher 2009) with 10 instead of their 60: an agent reads
# the first five results and not the first thousand, so the first places have to differ more.
_RANK_CONSTANT = 10


class Meaning(Protocol):
    """Knows which texts mean about the same; `id` is that of a document."""

    def add(self, texts: dict[str, str]) -> None:
        """Know these texts, in place of those known by the same ids."""

    def remove(self, id: str) -> None:
        """Forget a text that is known."""

    def nearest(self, query: str, count: int, allowed: Set[str] | None) -> list[tuple[str, float]]:
        """Return the `count` texts that mean most nearly the same, and how nearly: 1 the same, 0
        nothing of it.  Only of `allowed`, if given."""


def fuse(rankings: Sequence[Sequence[str]]) -> list[str]:
    """Return the ids of all rankings in one order; the first of each is best, ties go by the id."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for place, id in enumerate(ranking, 1):
            scores[id] = scores.get(id, 0.0) + 1 / (_RANK_CONSTANT + place)
    return sorted(scores, key=lambda id: (-round(scores[id], 12), id))
