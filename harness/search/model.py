"""Search by meaning: a folder with a sentence encoder, shared by all indexes that use it."""

import functools
import importlib.util
import os
from collections.abc import Set
from pathlib import Path
from typing import Protocol

from ...policies.errors import PolicyError
from ..state import state_directory

MODEL_HELP = "search by meaning too, with the sentence encoder in this folder (extra semantic)"


class SemanticIndex(Protocol):
    """Knows which texts mean about the same; `id` is that of a document."""

    def add(self, texts: dict[str, str]) -> None:
        """Know these texts, in place of those known by the same ids."""

    def remove(self, id: str) -> None:
        """Forget a text that is known."""

    def nearest(self, query: str, count: int, allowed: Set[str] | None) -> list[tuple[str, float]]:
        """Return the `count` texts that mean most nearly the same, and how nearly: 1 the same, 0
        nothing of it.  Only of `allowed`, if given."""


class Model:
    """A sentence encoder of a local folder; each index gets vectors of its own from it.

    `cache` is a file that remembers vectors of texts.  Safe from many threads.
    """

    def __init__(
        self, folder: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None
    ) -> None:
        """Read the encoder; raises PolicyError if there is none, or the extra is not installed."""
        if any(importlib.util.find_spec(name) is None for name in ("numpy", "tokenizers")):
            raise PolicyError(
                "the extra `semantic` is not installed", "pip install 'cellwright[semantic]'"
            )
        from .encoder import Encoder, VectorIndex

        encoder = Encoder(Path(folder))
        self._make = functools.partial(VectorIndex, encoder, Path(cache) if cache else None)

    def meaning(self) -> SemanticIndex:
        """Return what one index needs to search by meaning."""
        return self._make()


def model_of(given: "Model | str | os.PathLike[str] | None") -> Model | None:
    """Return the model that is given, or that of a folder; raises PolicyError."""
    return Model(given) if isinstance(given, str | os.PathLike) else given


def commands_model(folder: str | None) -> Model | None:
    """Return the model of a command's `--model`, whose vectors are kept between commands."""
    if folder is None:
        return None
    directory = state_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"cannot make {directory}: {error.strerror}") from None
    return Model(folder, directory / "vectors.db")
