"""`Detector`: finds personal data of one kind or more in a text.

The text is hostile: every pattern has bounded repetitions, and takes time linear in the text.

Detectors of other projects, Presidio and piighost, as detectors of cellwright.

The caller makes the engine with its models, so cellwright imports neither package.

Places in the JSON of tools: paths that rules name, and `x-pii` in schemas.

A path is of names with dots between; `[]` behind a name means every item of the list there, and `*`
any name.  "crm.find:customers[].name" is the name of each customer in a result of the tool crm.find;
a tool may be a glob.
"""

import asyncio
import fnmatch
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

KIND = re.compile(r"[a-z][a-z0-9]{1,15}")


class FoundValue(NamedTuple):
    """The position of a value, its kind, and its normal form, which is equal for every way to write it.

    `text` is the value as a tool gets it; empty means as it is written.
    """

    start: int
    end: int
    kind: str
    normal: str
    text: str = ""


class Detector(Protocol):
    """Finds values; `kinds` are words of lower-case letters and digits, which tokens contain."""

    @property
    def kinds(self) -> frozenset[str]: ...

    def find(self, text: str) -> Iterable[FoundValue]:
        """Return the values in `text`, in any order; they may overlap."""


def never(text: str, start: int, end: int) -> bool:
    """Tell that nothing around a match says that it is something else."""
    return False


class PatternDetector:
    """Values of one form: a pattern, and a function that checks and normalises its matches.

    `normal` returns None for a match that is no value, and `is_other` tells by the text around a match
    that it is something else.  A text without any of `hints` is skipped, and one without digits if a
    value `needs_digit`.
    """

    def __init__(
        self, kind: str, pattern: str, normal: Callable[[str], str | None], hints: Sequence[str] = (),
        is_other: Callable[[str, int, int], bool] = never, *, needs_digit: bool = False,
    ) -> None:  # fmt: skip
        self.kinds = frozenset([kind])
        self.needs_digit = needs_digit
        self._kind = kind
        self._pattern = re.compile(
            pattern, re.ASCII
        )  # known_values.py makes other digits and letters plain
        self._normal = normal
        self._hints = tuple(hints)
        self._is_other = is_other

    def find(self, text: str) -> Iterable[FoundValue]:
        if self._hints and not any(hint in text for hint in self._hints):
            return
        for match in self._pattern.finditer(text):
            normal = self._normal(match[0])
            if normal and not self._is_other(text, *match.span()):
                yield FoundValue(*match.span(), self._kind, normal)


# Words that announce the number of an order, a part or a book, not of a person.
_NUMBERED = re.compile(
    r"(?i)(?<![^\W\d_])(?:order|invoice|ticket|case|part|sku|rma|po|inv|ref(?:erence)?|tracking|serial"
    r"|lot|batch|item|coupon|voucher|isbn|ean|gtin|upc|pages?|bestell(?:ung|nummer|nr)"
    r"|(?:rechnung|auftrag)(?:snummer|snr)?|artikel(?:nummer|nr)?|commande|facture|article|pedido|factura"
    r"|art[ií]culo|ordine|fattura)(?:[ _-]?(?:no|nr|num|number|id|n[º°]))?[\s.:#=\"'()-]{0,5}\Z"
)
_BEFORE = 32


def is_numbered(text: str, start: int, end: int = 0) -> bool:
    """Tell whether a word before a number says that it is the number of a thing."""
    return bool(_NUMBERED.search(text, max(0, start - _BEFORE), start))


class DigitRun(NamedTuple):
    """Digits in groups, which single spaces or dashes separate: the digits, the position of each
    in the text, and the places at which groups begin and end."""

    digits: str
    places: list[int]
    begins: list[int]
    ends: list[int]


# not the digits of a decimal such as 0.4111
_RUN = re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ \u00a0-]?\d){7,255}(?!\.\d)", re.ASCII)
_SHORTEST_GROUP = 2  # otherwise every row of single digits would be one number


def digit_runs(text: str) -> list[DigitRun]:
    """Return the runs of eight digits or more in `text`."""
    return [_run(match[0], match.start()) for match in _RUN.finditer(text)]


def _run(run: str, start: int) -> DigitRun:
    places = [start + place for place, character in enumerate(run) if character.isdigit()]
    digits = "".join(character for character in run if character.isdigit())
    starts = [0] + [n for n in range(1, len(places)) if places[n] > places[n - 1] + 1]
    return DigitRun(digits, places, starts, [*starts[1:], len(places)])


def windows(run: DigitRun, lengths: range) -> Iterable[tuple[int, int, str]]:
    """Yield each sequence of whole groups of a run that has one of `lengths` digits: start and end in
    the text, and the digits."""
    if len(run.begins) * _SHORTEST_GROUP > len(run.digits):
        return
    for begin in run.begins:
        for end in run.ends:
            if end - begin in lengths:
                yield run.places[begin], run.places[end - 1] + 1, run.digits[begin:end]


def merged(found: Iterable[FoundValue], text: str) -> list[FoundValue]:
    """Return the values in order without overlaps: of nested ones the outer, of equal ones the first;
    partly overlapping ones become one value, so that no part stays."""
    kept: list[FoundValue] = []
    grown: set[int] = set()  # kept findings whose text was read once, because many may chain
    for each in sorted(found, key=lambda one: (one.start, -one.end)):
        last = kept[-1] if kept else None
        if last is None or each.start >= last.end:
            kept.append(each)
        elif each.end > last.end:
            kept[-1] = FoundValue(last.start, each.end, last.kind, "")
            grown.add(len(kept) - 1)
    for number in grown:
        start, end = kept[number][:2]
        kept[number] = kept[number]._replace(normal=text[start:end].casefold())
    return kept


_MOST_SECONDS = 60.0  # for one text


class _Finding(Protocol):
    """A result of Presidio's analyzer (presidio_analyzer.RecognizerResult)."""

    entity_type: str
    start: int
    end: int
    score: float


class _Analyzer(Protocol):
    """Presidio's engine (presidio_analyzer.AnalyzerEngine)."""

    def analyze(self, text: str, language: str) -> Iterable[Any]: ...


class _AsyncDetector(Protocol):
    """A detector of piighost (piighost.components.detector.AnyDetector)."""

    def detect(self, text: str) -> Coroutine[Any, Any, Iterable[Any]]: ...


_KINDS = {"person": "name", "location": "place", "emailaddress": "email", "phonenumber": "phone",
          "creditcard": "card", "ibancode": "iban", "ipaddress": "ip", "usssn": "ssn"}  # fmt: skip


def kind_of(label: str, kinds: Mapping[str, str] = _KINDS) -> str:
    """Return the kind for a label such as EMAIL_ADDRESS."""
    word = re.sub("[^a-z0-9]", "", label.lower()).lstrip("0123456789")
    return kinds.get(word, word[:16] if len(word) > 1 else "personal")


class PresidioDetector:
    """Detects with an `AnalyzerEngine` of presidio-analyzer; findings below `score` are left out."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, engine: _Analyzer, language: str = "en", score: float = 0.5) -> None:
        self._engine = engine
        self._language = language
        self._score = score

    def find(self, text: str) -> Iterable[FoundValue]:
        findings: Iterable[_Finding] = self._engine.analyze(text=text, language=self._language)
        for each in findings:
            if each.score >= self._score:
                normal = text[each.start : each.end].casefold()
                yield FoundValue(each.start, each.end, kind_of(each.entity_type), normal)


class PiighostDetector:
    """Detects with a detector of piighost; findings below `confidence` are left out."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, detector: _AsyncDetector, confidence: float = 0.5) -> None:
        self._detector = detector
        self._confidence = confidence

    def find(self, text: str) -> Iterable[FoundValue]:
        for each in _awaited(self._detector.detect(text)):
            if each.confidence >= self._confidence:
                span = each.span
                yield FoundValue(
                    span.start,
                    span.end,
                    kind_of(each.label),
                    text[span.start : span.end].casefold(),
                )


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine, which runs in a thread, because this thread may have an
    event loop."""
    kept: list[Any] = []

    def run() -> None:
        try:
            kept.append(asyncio.run(asyncio.wait_for(coroutine, _MOST_SECONDS)))
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            kept.append(error)

    thread = threading.Thread(target=run, name="cellwright-detector")
    thread.start()
    thread.join()
    if isinstance(kept[0], BaseException):
        raise kept[0]
    return kept[0]


_ITEMS = "[]"
_PART = re.compile(r"\[\]|[^.\[\]]+")
_MOST_SCHEMAS = 64  # schemas that apply to one place
DECLARATION = "x-pii"
Path = tuple[str, ...]
Schema = Mapping[str, Any]


class PlaceRule(NamedTuple):
    """A rule for a place: `tool` is a glob, `kind` the kind of personal data there."""

    tool: str
    path: Path
    kind: str

    def holds_for(self, tool: str) -> bool:
        return fnmatch.fnmatchcase(tool, self.tool)


def path_rule(place: str, kind: str = "") -> PlaceRule:
    """Return the rule that `place` names: a tool, a colon, and a path."""
    tool, _, path = place.rpartition(":")
    return PlaceRule(tool, tuple(_PART.findall(path)), kind)


class ToolPlace(NamedTuple):
    """A place in the arguments or in the result of a tool: the rules that may hold there or below, each
    with the rest of its path, and the schemas that hold there.

    `above` is the kind that was declared for the object or list around it.
    """

    rules: tuple[tuple[Path, str], ...]
    schemas: tuple[Schema, ...]
    root: Schema
    path: Path = ()
    above: str = ""

    def entry(self, name: str) -> "ToolPlace":
        rules = tuple(
            (path[1:], kind) for path, kind in self.rules if path[:1] in ((name,), ("*",))
        )
        below = [each for schema in self.schemas for each in _of_entry(schema, name)]
        return self._at(rules, below, name)

    def item(self) -> "ToolPlace":
        rules = tuple((path[1:], kind) for path, kind in self.rules if path[:1] == (_ITEMS,))
        below = [each for schema in self.schemas for each in _of_items(schema)]
        return self._at(rules, below, _ITEMS)

    def _at(
        self, rules: tuple[tuple[Path, str], ...], below: Iterable[Any], step: str
    ) -> "ToolPlace":
        schemas = expanded(below, self.root)
        return ToolPlace(rules, schemas, self.root, (*self.path, step), self.kind)

    @property
    def kind(self) -> str:
        """The kind of personal data declared for this place or an enclosing one; empty if none."""
        declared = [kind for path, kind in self.rules if not path]
        declared += [str(each[DECLARATION]) for each in self.schemas if DECLARATION in each]
        return next((_as_kind(each) for each in declared if each), self.above)

    @property
    def name(self) -> str:
        """The name of the entry here, or of the list whose item it is."""
        return next((step for step in reversed(self.path) if step != _ITEMS), "")

    @property
    def is_named(self) -> bool:
        """Whether a rule names this very place."""
        return any(not path for path, _ in self.rules)

    def allows(self, kind: str) -> bool:
        """Tell whether the schemas allow a value of a JSON type here, as far as they say types."""
        said = [each["type"] for each in self.schemas if "type" in each]
        return not said or any(
            kind == each or (isinstance(each, list) and kind in each) for each in said
        )

    def __str__(self) -> str:
        return ".".join(self.path).replace("." + _ITEMS, _ITEMS) or "the whole"


def place_of(rules: Iterable[PlaceRule], tool: str, schema: Schema | None) -> ToolPlace:
    """Return the place of the whole arguments, or of the whole result, of a tool."""
    root = schema or {}
    held = tuple((each.path, each.kind) for each in rules if each.holds_for(tool))
    return ToolPlace(held, expanded([root], root), root)


def _as_kind(declared: str) -> str:
    """Return a declared kind as tokens have it; "personal" if it is malformed."""
    word = re.sub("[^a-z0-9]", "", declared.lower())[:16]
    return word if KIND.fullmatch(word) else "personal"


def expanded(schemas: Iterable[Any], root: Schema) -> tuple[Schema, ...]:
    """Return schemas with those that they refer to or combine, without end in recursive ones."""
    found: list[Schema] = []
    waiting = [each for each in schemas if isinstance(each, Mapping)]
    while waiting and len(found) < _MOST_SCHEMAS:
        schema = waiting.pop()
        if any(schema is each for each in found):
            continue
        found.append(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            waiting += _referred(reference, root)
        waiting += [each for each in _combined(schema) if isinstance(each, Mapping)]
    return tuple(found)


def _combined(schema: Schema) -> list[Any]:
    """Return the schemas that may hold at the same place."""
    parts = [schema.get(word) for word in ("allOf", "anyOf", "oneOf")]
    found = [each for part in parts if isinstance(part, list) for each in part]
    dependent = schema.get("dependentSchemas")
    found += dependent.values() if isinstance(dependent, Mapping) else ()
    return found + [schema.get(word) for word in ("if", "then", "else")]


def _referred(reference: str, root: Schema) -> list[Schema]:
    """Return the schema that a reference within the same document means."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return [found] if reference.startswith("#") and isinstance(found, Mapping) else []


def _of_entry(schema: Schema, name: str) -> list[Any]:
    """Return the schemas of an entry; patterns are not tried: a server can make them slow."""
    patterns = schema.get("patternProperties")
    found = list(patterns.values()) if isinstance(patterns, Mapping) else []
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return [*found, properties[name]]
    return [*found, schema.get("additionalProperties"), schema.get("unevaluatedProperties")]


def _of_items(schema: Schema) -> list[Any]:
    first = schema.get("prefixItems")
    others = [schema.get(word) for word in ("items", "contains", "unevaluatedItems")]
    return [*others, *(first if isinstance(first, list) else ())]
