"""Personal data: how much of planted values is found, what reaches a model, and the speed."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from ..harness.privacy.naming import tokens_in
from ..harness.privacy.privacy import Privacy
from .faker_texts import REGIONS, RENDERINGS, FakerTexts, Planted, has_faker
from .planted import Planter
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings
from .smuggling import Smuggling, rules

_SEED = 20
_HELD_OUT = 977  # a seed with which the detectors were never tuned
_MIB = 1024 * 1024
_EACH, _VALUES, _PROGRAMS = 500, 10_000, 50
_LEAST_RECALL = 0.99
_LEAST_OF_FAKER, _LEAST_NATIONAL, _LEAST_PRECISION = 0.98, 0.9, 0.97
_UNRENDERED = ("secret", "nhs", "phone, national")  # a word before them counts, or case


def measure(settings: Settings) -> Report:
    """Return recall and precision by kind, the leaks of hostile programs, and megabytes a second."""
    planter = Planter(_SEED)
    found = _found(planter, settings.amount(_EACH, 20))
    programs = settings.amount(_PROGRAMS, 4)
    smuggling = _smuggled(planter, settings.amount(_VALUES, 40), programs)
    speeds = _speeds(planter, settings.amount(2, 1))
    of_faker = _of_faker(settings.amount(_EACH, 4)) if has_faker() else None
    return _report(found, smuggling, programs, speeds, of_faker)


class _OfFaker(NamedTuple):
    """What was found in texts of the package Faker."""

    by_group: list[tuple[str, int, float]]  # planted, recall
    by_kind: list[tuple[str, int, float]]  # found, precision
    renderings: list[tuple[str, int, float, float]]  # planted, recall, restored as it was


def _of_faker(each: int) -> _OfFaker:
    """Look for values of Faker between its words, and in hard negatives, which hold none."""
    texts = FakerTexts(_HELD_OUT)
    planted = list(texts.planted(each))
    scope = Privacy(regions=REGIONS).scope()
    hits, found, right = Counter[str](), Counter[str](), Counter[str]()
    for one in [*planted, *texts.negatives(max(1, each // 25))]:
        for seen in scope.find(one.text):
            is_value = bool(one.kind) and seen.start < one.end and seen.end > one.start
            found[seen.kind] += 1
            right[seen.kind] += is_value
            hits[one.group] += is_value and seen.start <= one.start and seen.end >= one.end
    groups = Counter(one.group for one in planted)
    return _OfFaker(
        [(group, count, hits[group] / count) for group, count in groups.items()],
        [(kind, count, right[kind] / count) for kind, count in sorted(found.items())],
        [_rendered(name, planted[:: max(1, len(planted) // (4 * each))]) for name in RENDERINGS],
    )


def _rendered(name: str, planted: list[Planted]) -> tuple[str, int, float, float]:
    """Write values in another way; return how many are found, and how many a tool would get whole."""
    hits = whole = 0
    values = [one.text[one.start : one.end] for one in planted if one.group not in _UNRENDERED]
    for value in values:
        scope = Privacy(regions=REGIONS).scope()
        made = scope.text(f"to {RENDERINGS[name](value)} x")
        tokens = [each.token for each in tokens_in(made)]
        hits += len(tokens) == 1
        given = scope.value(tokens[0]) if len(tokens) == 1 else None
        whole += given is not None and given.casefold() == value.casefold()
    return name, len(values), hits / len(values), whole / len(values)


Row = tuple[str, int, float, float, int]  # kind, planted, recall, precision, of the wrong kind


def _found(planter: Planter, each: int) -> list[Row]:
    """Plant values between sentences and look-alikes, and compare what is found with them."""
    names = [planter.name() for _ in range(each)]
    scope = Privacy(names=names).scope()
    hits, others, wrong = Counter[str](), Counter[str](), Counter[str]()
    for kind in planter.kinds:
        for number in range(each):
            value = names[number] if kind == "name" else planter.value(kind)
            text, start = _planted(planter, kind, value)
            for seen in scope.find(text):
                if seen.start >= start + len(value) or seen.end <= start:
                    others[seen.kind] += 1
                elif seen.start <= start and seen.end >= start + len(value):
                    hits[kind] += 1
                    wrong[kind] += seen.kind != kind
    return [
        (kind, each, hits[kind] / each, hits[kind] / max(1, hits[kind] + others[kind]), wrong[kind])
        for kind in planter.kinds
    ]


def _planted(planter: Planter, kind: str, value: str) -> tuple[str, int]:
    """Return a text with the value, and where it begins."""
    before, behind = f"{planter.sentence()} {planter.look_alike()} ", ""
    if kind == "login":
        before, behind = f"{before}https://", "@host.example"
    return f"{before}{value}{behind}, {planter.sentence(6)}", len(before)


def _smuggled(planter: Planter, values: int, programs: int) -> Smuggling:
    kinds = planter.kinds
    distinct: dict[str, None] = {}
    while len(distinct) < values:
        distinct[planter.value(kinds[len(distinct) % len(kinds)])] = None
    smuggling = Smuggling(list(distinct), programs)
    smuggling.run(rules())
    return smuggling


def _speeds(planter: Planter, size: int) -> list[tuple[str, float, int]]:
    """Return megabytes a second, and values: of text with none, few and many, and of JSON."""
    shares = {"prose, no values": 0.0, "a value every 100 lines": 0.01, "a value a line": 1.0}
    rows = []
    for name, share in shares.items():
        text = _prose(planter, share, size * _MIB)
        rows.append((name, *_timed(text, lambda text: len(Privacy().scope().find(text)))))
    records = [
        {"id": n, "text": planter.sentence(), "mail": planter.value("email")} for n in range(2000)
    ]
    return [*rows, ("JSON of a tool, replaced", *_timed(json.dumps(records), _replaced))]


def _prose(planter: Planter, share: float, size: int) -> str:
    source = random.Random(_SEED)
    lines: list[str] = []
    length = 0
    while length < size:
        value = planter.value("email") if source.random() < share else "lines"
        lines.append(f"{planter.sentence()} {value}")
        length += len(lines[-1]) + 1
    return "\n".join(lines)


def _replaced(text: str) -> int:
    return sum(Privacy().scope().json(json.loads(text)).counts.values())


def _timed(text: str, look: Callable[[str], int]) -> tuple[float, int]:
    begun = time.process_time()
    count = look(text)
    return len(text) / 1e6 / (time.process_time() - begun), count


def _report(
    found: list[Row], smuggling: Smuggling, programs: int, speeds: list[tuple[str, float, int]],
    of_faker: _OfFaker | None,
) -> Report:  # fmt: skip
    kinds = ReportTable(
        title="Values between sentences and look-alikes, by kind",
        columns=(Column("kind"), Column("planted", 0), Column("recall", 3), Column("precision", 3),
                 Column("as another kind", 0)),
        rows=tuple(found),
        note="Recall: the whole value was replaced. Precision: the part that was planted of what was "
        "found as this kind.",
    )  # fmt: skip
    counts = sum(map(len, smuggling.batches)), len(smuggling.leaks), len(smuggling.delivered)
    leaks = ReportTable(
        title="Programs that smuggle",
        columns=(Column("programs", 0), Column("values", 0), Column("read on the model's side", 0),
                 Column("delivered to the tool", 0), Column("characters looked at", 0)),
        rows=((programs, *counts, smuggling.seen_characters),),
    )  # fmt: skip
    rate = ReportTable(
        title="Text", rows=tuple(speeds),
        columns=(Column("what"), Column("MB/s", 2), Column("values", 0)),
    )  # fmt: skip
    return Report(
        name="privacy", title="What is found of personal data, and what reaches a model",
        tables=(kinds, *_tables_of_faker(of_faker), leaks, rate),
        verdicts=(*_verdicts(found, smuggling), *_verdicts_of_faker(of_faker)),
        notes=("Processor time of one process. Values are made by chance, with valid checks.",),
    )  # fmt: skip


def _tables_of_faker(of_faker: _OfFaker | None) -> tuple[ReportTable, ...]:
    if of_faker is None:
        return ()
    kind, count = Column("kind"), Column("planted", 0)
    return (
        ReportTable(
            title=f"Values of the package Faker, between its words (seed {_HELD_OUT})",
            columns=(kind, count, Column("recall", 3)), rows=tuple(of_faker.by_group),
            note="Regions US, DE, FR, ES and GB; three of ten phone numbers have no word before them.",
        ),
        ReportTable(
            title="The same texts, and hard negatives: orders, versions, logs, files, programs",
            columns=(kind, Column("found", 0), Column("precision", 3)), rows=tuple(of_faker.by_kind),
        ),
        ReportTable(
            title="Values of Faker, written in another way",
            columns=(Column("how"), count, Column("recall", 3), Column("a tool gets it whole", 3)),
            rows=tuple(of_faker.renderings),
        ),
    )  # fmt: skip


def _verdicts_of_faker(of_faker: _OfFaker | None) -> tuple[Criterion, ...]:
    if of_faker is None:
        return ()
    national = next(row for row in of_faker.by_group if row[0] == "phone, national")
    recall = min((row for row in of_faker.by_group if row is not national), key=lambda row: row[2])
    precision = min(of_faker.by_kind, key=lambda row: row[2])
    rendered = min(of_faker.renderings, key=lambda row: row[2])
    return (
        Criterion("of Faker, recall of each kind is at least 0.98", recall[2] >= _LEAST_OF_FAKER,
                  f"{recall[0]} {recall[2]:.3f}"),
        Criterion("and of national phone numbers 0.9", national[2] >= _LEAST_NATIONAL,
                  f"{national[2]:.3f}"),
        Criterion("with hard negatives, precision is at least 0.97", precision[2] >= _LEAST_PRECISION,
                  f"{precision[0]} {precision[2]:.3f}"),
        Criterion("written in another way, recall is at least 0.98", rendered[2] >= _LEAST_OF_FAKER,
                  f"{rendered[0]} {rendered[2]:.3f}"),
    )  # fmt: skip


def _verdicts(found: list[Row], smuggling: Smuggling) -> tuple[Criterion, ...]:
    values = [value for batch in smuggling.batches for value in batch]
    least = min(found, key=lambda row: row[2])
    arrived = sorted(smuggling.delivered) == sorted(values)
    ways = ", ".join(sorted({name for name, _ in smuggling.leaks})[:5])
    leaked = f"{len(smuggling.leaks)} of {len(values):,} {ways}".strip()
    delivered = f"{len(smuggling.delivered):,} of {len(values):,}"
    recall = f"{least[0]} {least[2]:.3f}"
    return (
        Criterion("no value reaches the model's side", not smuggling.leaks, leaked),
        Criterion("the tool gets each value, as it was", arrived, delivered),
        Criterion("recall of each kind is at least 0.99", least[2] >= _LEAST_RECALL, recall),
    )
