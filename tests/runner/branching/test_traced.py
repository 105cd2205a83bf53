"""Stopping processes by their pidfds."""

import subprocess
import sys

import pytest

from cellwright.runner.branching.traced import machine
from tests.conftest import ROOT
from tests.runner.branching import tracer

pytestmark = pytest.mark.skipif(machine() is None, reason="no branches by memory on this machine")


def trace(*scenario: str) -> None:
    """Have a process of its own trace, in which no assertion may fail."""
    command = (sys.executable, "-m", tracer.__name__, *scenario)
    ended = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_a_process_that_has_the_number_of_a_dead_target_goes_on() -> None:
    """A target can end, and its number be another process's, between two looks."""
    trace("stop_dead_target")


@pytest.mark.parametrize("when", ["_interrupt", "go_on_to_call"])
def test_a_signal_that_comes_to_a_source_meanwhile_is_not_lost(when: str) -> None:
    trace("signal_source", when)
