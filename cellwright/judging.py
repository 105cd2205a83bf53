"""Judging programs by cases: what `Sandbox.judge` takes and returns."""

from .harness.sandbox.judging.checkers import Checked, Floats, Interactor, ProgramChecker
from .harness.sandbox.judging.verdicts import (
    Case,
    CaseResult,
    JudgeLimits,
    Judgement,
    Verdict,
)
from .harness.sandbox.languages.compiled import Build

__all__ = [
    "Build",
    "Case",
    "CaseResult",
    "Checked",
    "Floats",
    "Interactor",
    "JudgeLimits",
    "Judgement",
    "ProgramChecker",
    "Verdict",
]
