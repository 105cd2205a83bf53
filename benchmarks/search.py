"""Search over tools: how much of what people ask for is found, and what a query costs.

SQLite's FTS5, with the same weights, is beside it: what one would use without a search of one's own.
Times are of the processor: a query waits for nothing.
"""

import contextlib
import itertools
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence

from ..harness.search.documents import Document
from ..harness.search.search import SearchIndex, SemanticIndex
from .catalogues import Questions, catalogue, questions
from .measuring import (
    Contender,
    median,
    percentile,
    percentile_columns,
    percentile_row,
    side_by_side,
)
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings

Finder = Callable[[str, int], Sequence[str]]  # query and count to ids

_COUNTS = (1, 5, 10)
_WORDS_REACH, _MEANING_REACHES = (0.64, 0.87, 0.92), (0.65, 0.93, 0.97)
_MILLISECOND = 1e-3
_UNKNOWN = ("zymurgy", "zymurgy for quokkas", "a numdah", "what is a quokka")


def measure(settings: Settings) -> Report:
    """Return what is found among the functions of `settings.data`, and times over a large catalogue."""
    documents = catalogue(1000 if settings.smoke else 10_000, settings.data)
    made: list[SearchIndex] = []
    building = _processor_seconds(lambda: made.append(SearchIndex(documents)))
    index = made[0]
    asked = questions(settings.data) if settings.data else None
    tables, verdicts = _found(asked, settings) if asked else ((), ())
    times, cost = _times(index, documents, asked, settings)
    if asked and settings.model:
        from .meaning import cost_of_meaning  # numpy is an extra

        tables = (*tables, cost_of_meaning(settings.model, asked, settings.amount(200, 5)))
    change = _change(index, documents, building, settings)
    return Report(
        name="search", title="Search over tools", tables=(*tables, times, change),
        verdicts=(*verdicts, *cost, *_sound(index, documents)), notes=_notes(settings),
    )  # fmt: skip


def _notes(settings: Settings) -> tuple[str, ...]:
    notes = ["FTS5: porter over unicode61, bm25 with the weights of our fields, any word matches."]
    if not settings.data:
        notes.append("How much is found was not measured: --data DIR names a folder of questions.")
    elif not settings.model:
        notes.append("SemanticIndex was not measured: --model DIR names a sentence encoder.")
    return tuple(notes)


# How much is found


def _found(
    asked: Questions, settings: Settings
) -> tuple[tuple[ReportTable, ...], tuple[Criterion, ...]]:
    rows: list[tuple[Value, ...]] = []
    verdicts: list[Criterion] = []
    with _fts5(asked.documents) as fts5:
        rows.append(("FTS5", *_shares(fts5, asked)))
    for name, meaning, least in _ways(settings):
        shares = _shares(_finder(SearchIndex(asked.documents, meaning)), asked)
        rows.append((name, *shares))
        seen = " ".join(f"{share:.3f}" for share in shares)
        wanted = " ".join(f"{share:.2f}" for share in least)
        holds = all(share >= bar for share, bar in zip(shares, least, strict=True))
        verdicts.append(Criterion(f"{name}: first, among five, ten at least {wanted}", holds, seen))
    table = ReportTable(
        title=f"Answers to {len(asked.questions):,} questions among {len(asked.documents)} functions",
        columns=(Column("by"), *(Column(f"among {count}", 3) for count in _COUNTS)),
        rows=tuple(rows),
    )
    return (table,), tuple(verdicts)


def _ways(settings: Settings) -> Iterator[tuple[str, SemanticIndex | None, tuple[float, ...]]]:
    yield "words", None, _WORDS_REACH
    if settings.model:
        from ..harness.search.encoder import Encoder, VectorIndex

        yield "words and meaning", VectorIndex(Encoder(settings.model)), _MEANING_REACHES


def _shares(find: Finder, asked: Questions) -> list[float]:
    found = [(find(text, max(_COUNTS)), answers) for text, answers in asked.questions]
    return [
        sum(not answers.isdisjoint(ids[:count]) for ids, answers in found) / len(found)
        for count in _COUNTS
    ]


def _finder(index: SearchIndex) -> Finder:
    return lambda query, count: [
        match.document.id for match in index.search(query, limit=count).matches
    ]


# What it costs


def _times(
    index: SearchIndex, documents: Sequence[Document], asked: Questions | None, settings: Settings
) -> tuple[ReportTable, tuple[Criterion, ...]]:
    rounds = settings.amount(2000, 100)
    kinds = {"some words of a name": [_keywords(each) for each in documents[:: _stride(documents)]]}
    kinds["the first sentence of a description"] = [
        each.description.partition(".")[0] for each in documents[:: _stride(documents)]
    ]
    if asked:
        kinds["a question of a person"] = [text for text, _ in asked.questions]
    times: dict[str, list[float]] = {}
    with _fts5(documents) as fts5:
        for kind, queries in kinds.items():
            found = side_by_side(
                [_contender(f"{kind}, ours", _finder(index), queries),
                 _contender(f"{kind}, FTS5", fts5, queries)], rounds,
            )  # fmt: skip
            times |= found
    table = ReportTable(
        title=f"A query over {len(documents):,} tools, five results, ms of processor time",
        columns=(Column("query"), *percentile_columns()),
        rows=tuple((name, *percentile_row(each)) for name, each in times.items()),
    )
    return table, _quick([each for name, each in times.items() if "ours" in name], times, settings)


def _quick(
    ours: list[list[float]], times: dict[str, list[float]], settings: Settings
) -> tuple[Criterion, ...]:
    theirs = [each for name, each in times.items() if "FTS5" in name]
    ratios = [median(other) / median(own) for own, other in zip(ours, theirs, strict=True)]
    seen = ", ".join(f"{ratio:.1f} times" for ratio in ratios)
    slower = Criterion("no query takes longer than with FTS5", min(ratios) >= 1, seen)
    if settings.smoke:
        return (slower,)
    seen = ", ".join(
        f"{median(each) * 1e3:.2f} (p99 {percentile(each, 0.99) * 1e3:.2f})" for each in ours
    )
    holds = all(median(each) <= _MILLISECOND for each in ours)
    return slower, Criterion("a query takes at most a millisecond, p50", holds, seen)


def _contender(name: str, find: Finder, queries: Sequence[str]) -> Contender:
    turn = itertools.cycle(queries)
    return Contender(name, lambda: _processor_seconds(lambda: find(next(turn), 5)))


def _processor_seconds(work: Callable[[], object]) -> float:
    """Return what work costs that waits for nothing: neighbours would only add to it."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _change(
    index: SearchIndex, documents: Sequence[Document], building: float, settings: Settings
) -> ReportTable:
    chosen = documents[:: _stride(documents)][: settings.amount(500, 50)]
    removing = [_processor_seconds(lambda each=each: index.remove(each.id)) for each in chosen]  # type: ignore[misc]
    adding = [_processor_seconds(lambda each=each: index.add(each)) for each in chosen]  # type: ignore[misc]
    return ReportTable(
        title=f"An index of {len(documents):,} tools, processor time",
        columns=(Column("made, s"), Column("one more, us, p50", 0), Column("one less, us, p50", 0)),
        rows=((building, median(adding) * 1e6, median(removing) * 1e6),),
    )


def _keywords(document: Document) -> str:
    return " ".join(re.findall(r"[A-Za-z][a-z]*", document.name)[:4])


def _stride(documents: Sequence[Document]) -> int:
    return max(1, len(documents) // 1000)


# What must hold of every catalogue


def _sound(index: SearchIndex, documents: Sequence[Document]) -> tuple[Criterion, ...]:
    chosen = documents[:: _stride(documents)]
    first = sum(
        index.search(each.full_name, limit=1).matches[0].document.id == each.id for each in chosen
    )
    nothing = sum(not index.search(query).matches for query in _UNKNOWN)
    return (
        Criterion(
            "a tool stands first for its name", first == len(chosen), f"{first} of {len(chosen)}"
        ),
        Criterion(
            "what shares no word with a tool finds nothing", nothing == len(_UNKNOWN),
            f"{nothing} of {len(_UNKNOWN)}",
        ),
    )  # fmt: skip


@contextlib.contextmanager
def _fts5(documents: Sequence[Document]) -> Iterator[Finder]:
    """Give a finder that is a table of SQLite's, in memory."""
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute(
            "CREATE VIRTUAL TABLE tools USING fts5(id UNINDEXED, name, description, parameters, "
            "tokenize='porter unicode61')"
        )
        rows = (
            (
                each.id, _apart(f"{each.server} {each.name}"), _apart(each.description),
                _apart(" ".join(f"{one.name} {one.description}" for one in each.parameters)),
            )
            for each in documents
        )  # fmt: skip
        base.executemany("INSERT INTO tools VALUES (?, ?, ?, ?)", rows)
        yield lambda query, count: _rows(base, query, count)


def _rows(base: sqlite3.Connection, query: str, count: int) -> list[str]:
    said = dict.fromkeys(re.findall(r"\w+", _apart(query).lower()))
    match = " OR ".join(f'"{word}"' for word in said)
    ask = "SELECT id FROM tools WHERE tools MATCH ? ORDER BY bm25(tools, 0, 4, 2, 1), id LIMIT ?"
    return [row[0] for row in base.execute(ask, (match, count))] if match else []


def _apart(text: str) -> str:
    """Return a text in which camel case and underscores are words, which FTS5 does not see."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " "))
