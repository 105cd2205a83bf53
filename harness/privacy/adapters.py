"""Detectors of other projects, Presidio and piighost, as detectors of cellwright.

The caller makes the engine, with the models that it wants, so cellwright imports neither package.
"""

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol

from .detector import FoundValue

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
    """Return what a coroutine returns; it runs in a thread, since this one may have an event loop."""
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
