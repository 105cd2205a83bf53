"""Personal data: how much of planted values is found, what reaches a model, and the speed."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable

from ..harness.privacy.privacy import Privacy
from .planted import Planter
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings
from .smuggling import Smuggling, rules

_SEED = 20
_MIB = 1024 * 1024
_EACH, _VALUES, _PROGRAMS = 500, 10_000, 50
_LEAST_RECALL = 0.99


def measure(settings: Settings) -> Report:
    """Return recall and precision by kind, the leaks of hostile programs, and megabytes a second."""
    planter = Planter(_SEED)
    found = _found(planter, settings.amount(_EACH, 20))
    programs = settings.amount(_PROGRAMS, 4)
    smuggling = _smuggled(planter, settings.amount(_VALUES, 40), programs)
    return _report(found, smuggling, programs, _speeds(planter, settings.amount(2, 1)))


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
    found: list[Row], smuggling: Smuggling, programs: int, speeds: list[tuple[str, float, int]]
) -> Report:
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
        tables=(kinds, leaks, rate), verdicts=_verdicts(found, smuggling),
        notes=("Processor time of one process. Values are made by chance, with valid checks.",),
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
