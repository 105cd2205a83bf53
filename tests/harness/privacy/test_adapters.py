"""Detectors of other projects find what they find; Presidio's is a stand-in of its interface."""

import asyncio
from typing import NamedTuple

import pytest

from cellwright import Privacy
from cellwright.harness.privacy.detector import kind_of
from cellwright.privacy import PiighostDetector, PresidioDetector


class Finding(NamedTuple):
    entity_type: str
    start: int
    end: int
    score: float


class Engine:
    """What presidio_analyzer.AnalyzerEngine offers here: analyze(text=, language=)."""

    def analyze(self, text: str, language: str) -> list[Finding]:
        assert language == "en"
        place = text.find("Ann Smith")
        weak = Finding("DATE_TIME", 0, 3, 0.2)
        return [weak, Finding("PERSON", place, place + 9, 0.85)] if place >= 0 else [weak]


def test_presidio() -> None:
    privacy = Privacy(kinds=["email"], detectors=[PresidioDetector(Engine())])
    made = privacy.text("May: Ann Smith, ann@example.org")
    assert made.startswith("May: pii_name_")
    assert "pii_email_" in made
    assert privacy.reveal(made) == "May: Ann Smith, ann@example.org"


def test_piighost() -> None:
    regex = pytest.importorskip("piighost.components.detector.regex")
    detector = regex.RegexDetector({"CUSTOMER_ID": r"C-\d{4}"})
    privacy = Privacy(kinds=["email"], detectors=[PiighostDetector(detector)])
    assert privacy.text("about C-1234").startswith("about pii_customerid_")

    async def within_a_loop() -> str:
        return privacy.text("about C-9876")

    assert asyncio.run(within_a_loop()).startswith("about pii_customerid_")


def test_an_error_of_a_detector_is_not_swallowed() -> None:
    class Broken:
        async def detect(self, text: str) -> list[object]:
            raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        Privacy(detectors=[PiighostDetector(Broken())]).text("x")


@pytest.mark.parametrize(("label", "kind"), [
    ("EMAIL_ADDRESS", "email"), ("PERSON", "name"), ("US_SSN", "ssn"), ("IT_VAT_CODE", "itvatcode"),
    ("1", "personal"), ("A_VERY_LONG_LABEL_OF_SOMETHING", "averylonglabelof"),
])  # fmt: skip
def test_labels_become_kinds(label: str, kind: str) -> None:
    assert kind_of(label) == kind
