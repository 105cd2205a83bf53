"""The cost of search by meaning: a sentence encoder, a catalogue of vectors, a query."""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..harness.search.encoder import Encoder, VectorIndex
from ..harness.search.search import SearchIndex
from .catalogues import Questions
from .measuring import median
from .report import Column, ReportTable, Value
from .scratch import scratch_directory

_THREADS = "OPENBLAS_NUM_THREADS"


def cost_of_meaning(model: Path, asked: Questions, queries: int) -> ReportTable:
    """Return seconds of the processor, of all threads of the process."""
    with scratch_directory() as directory:
        cache = Path(directory, "vectors.db")
        encoder = Encoder(model)
        index: list[SearchIndex] = []

        def fill() -> None:
            index.append(SearchIndex(asked.documents, VectorIndex(encoder, cache)))

        texts = itertools.cycle(text for text, _ in asked.questions)
        rows: tuple[tuple[Value, ...], ...] = (
            ("the model is read", _seconds(lambda: Encoder(model))),
            (f"{len(asked.documents)} tools are encoded, and kept in a file", _seconds(fill)),
            ("the same from that file", _seconds(fill)),
            (
                "a question is encoded and compared, p50",
                median([_seconds(lambda: index[0].search(next(texts))) for _ in range(queries)]),
            ),
        )
    threads = os.environ.get(_THREADS, "as many as it likes")
    return ReportTable(
        title=f"Meaning, with these threads of the linear algebra ({_THREADS}): {threads}",
        columns=(Column("what"), Column("processor, s", 3)),
        rows=rows,
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
