"""Models for search by meaning: a folder with a sentence encoder, shared by several indexes."""

import functools
import importlib.util
import os
from collections.abc import Set
from pathlib import Path
from typing import Protocol

from ...policies.errors import PolicyError
from ...policies.extras import how_to_install
from ..state import state_directory

MODEL_HELP = "search by meaning too, with the sentence encoder in this folder (extra semantic)"


class SemanticIndex(Protocol):
    """An index of texts by meaning; ids are those of documents."""

    def add(self, texts: dict[str, str]) -> None:
        """Add texts by id; each replaces the text with the same id."""

    def remove(self, id: str) -> None:
        """Remove a known text."""

    def nearest(self, query: str, count: int, allowed: Set[str] | None) -> list[tuple[str, float]]:
        """Return the ids of the `count` texts of `allowed` (default all) nearest to `query`, with their
        similarity: 1 is the same meaning, 0 an unrelated one."""


class Model:
    """A sentence encoder of a local folder, which makes a vector index for each search index.

    `cache` is a file that keeps the vectors of texts.  Safe from many threads.
    """

    def __init__(
        self, folder: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None
    ) -> None:
        """Read the encoder; raises PolicyError if the folder or the extra is missing."""
        if any(importlib.util.find_spec(name) is None for name in ("numpy", "tokenizers")):
            raise PolicyError("the extra `semantic` is not installed", how_to_install("semantic"))
        from .encoder import Encoder, VectorIndex

        encoder = Encoder(Path(folder))
        self._make = functools.partial(VectorIndex, encoder, Path(cache) if cache else None)

    def meaning(self) -> SemanticIndex:
        """Return a new vector index, for one search index."""
        return self._make()


def model_of(given: "Model | str | os.PathLike[str] | None") -> Model | None:
    """Return the given model, or the model of a folder; raises PolicyError."""
    return Model(given) if isinstance(given, str | os.PathLike) else given


def commands_model(folder: str | None) -> Model | None:
    """Return the model of a command's `--model`, whose vectors are cached between commands."""
    if folder is None:
        return None
    directory = state_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"cannot make {directory}: {error.strerror}") from None
    return Model(folder, directory / "vectors.db")
