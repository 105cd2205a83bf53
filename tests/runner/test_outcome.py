"""From what was observed to a result: a table."""

import signal

import pytest

from cellwright.policies.policy import Limits
from cellwright.runner.cgroups import CgroupUsage
from cellwright.runner.messages import Finished
from cellwright.runner.requests.outcome import conclude
from cellwright.runner.requests.result import SandboxResult, SandboxStatus
from cellwright.runner.watching.supervision import Observation

LIMITS = Limits(wall_seconds=5, cpu_seconds=3)
NOTHING = Finished(None, None, None, None)
QUIET = CgroupUsage(0.1, 0.1, 1000, 2)
BUSY = CgroupUsage(2.9, 0.2, 1000, 2)
UNCOUNTED = CgroupUsage(None, None, None, None)
S = SandboxStatus


class Text:
    """A stream that was captured: what `conclude` needs of one."""

    def __init__(self, name: str, text: str, dropped: int = 0) -> None:
        self.name, self._text, self.dropped_bytes = name, text, dropped
        self.total_bytes = len(text) + dropped

    def text(self) -> str:
        return self._text


def result_of(
    cause: str | None = None, wait_status: int | None = None, finished: Finished | None = None,
    oom_kills: int = 0, usage: CgroupUsage = QUIET,
) -> SandboxResult:  # fmt: skip
    seen = Observation(cause, wait_status, finished, "it lied")  # type: ignore[arg-type]
    captures = (Text("stdout", "out"), Text("stderr", "err", 5))
    return conclude(
        seen, usage._replace(killed_for_memory=oom_kills), captures, LIMITS,  # type: ignore[arg-type]
        execution_time=1.5, trace_id="t",
    )  # fmt: skip


RAISED = Finished(None, None, "E: no", "Traceback")
ENDS = {
    "ran": ({"wait_status": 0}, S.COMPLETED, "exit", None),
    "exit 3": ({"wait_status": 3 << 8}, S.FAILED, "exit", "exit code 3"),
    "raised": ({"wait_status": 1 << 8, "finished": RAISED}, S.FAILED, "exception", "E: no"),
    "exit with text": (
        {"wait_status": 1 << 8, "finished": Finished(None, None, "no luck", None)},
        S.FAILED, "exit", "no luck",
    ),
    "SIGSEGV": ({"wait_status": 11}, S.FAILED, "signal", "killed by SIGSEGV"),
    "SIGSEGV with core": ({"wait_status": 11 | 128}, S.FAILED, "signal", "killed by SIGSEGV"),
    "SIGKILL": ({"wait_status": 9}, S.FAILED, "signal", "killed by SIGKILL"),
    "SIGSYS": ({"wait_status": 31}, S.FAILED, "signal", "killed by SIGSYS"),
    "a real-time signal": ({"wait_status": 40}, S.FAILED, "signal", "killed by signal 40"),
    "SIGKILL and OOM": (
        {"wait_status": 9, "oom_kills": 1}, S.KILLED, "memory", "needed more than 268435456 bytes",
    ),
    "SIGSEGV and an OOM elsewhere": (
        {"wait_status": 11, "oom_kills": 1}, S.FAILED, "signal", "killed by SIGSEGV",
    ),
    "init itself killed and OOM": (
        {"oom_kills": 1}, S.KILLED, "memory", "needed more than 268435456 bytes",
    ),
    "init itself killed": ({}, S.FAILED, "signal", "killed by SIGKILL"),
    "a child was OOM-killed and the program went on": (
        {"wait_status": 0, "oom_kills": 1}, S.COMPLETED, "exit", None,
    ),
    "SIGXCPU that it sent itself": (
        {"wait_status": int(signal.SIGXCPU), "usage": QUIET}, S.FAILED, "signal", "killed by SIGXCPU",
    ),
    "SIGXCPU where nothing counts": (
        {"wait_status": int(signal.SIGXCPU), "usage": UNCOUNTED}, S.TIMEOUT, "cpu_time",
        "used more than 3 s of CPU time",
    ),
    "SIGKILL after all CPU time": (
        {"wait_status": 9, "usage": BUSY}, S.TIMEOUT, "cpu_time", "used more than 3 s of CPU time",
    ),
    "wall time": ({"cause": "wall_time"}, S.TIMEOUT, "wall_time", "ran longer than 5 s"),
    "CPU time": ({"cause": "cpu_time"}, S.TIMEOUT, "cpu_time", "used more than 3 s of CPU time"),
    "output": ({"cause": "output"}, S.KILLED, "output", "wrote more than 268435456 bytes"),
    "violation": (
        {"cause": "violation"}, S.KILLED, "violation", "it lied",
    ),
    "cancelled": ({"cause": "cancelled"}, S.CANCELLED, "cancelled", "cancelled by the caller"),
    "we ended it and it had an OOM": (
        {"cause": "wall_time", "oom_kills": 1}, S.TIMEOUT, "wall_time", "ran longer than 5 s",
    ),
    "our cause wins over what the guest said": (
        {"cause": "violation", "finished": RAISED}, S.KILLED, "violation",
        "it lied",
    ),
    "exit 0 though it said it raised": (
        {"wait_status": 0, "finished": RAISED}, S.COMPLETED, "exit", "E: no",
    ),
    "exit 1 though it said a value": (
        {"wait_status": 1 << 8, "finished": Finished(b"5", None, None, None)},
        S.FAILED, "exit", "exit code 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "status", "reason", "error"), ENDS.values(), ids=ENDS)
def test_how_it_ended(
    seen: dict[str, object], status: SandboxStatus, reason: str, error: str | None
) -> None:
    result = result_of(**seen)  # type: ignore[arg-type]
    assert (result.status, result.reason, result.error) == (status, reason, error)


VALUES = {
    "json": (Finished(b'{"a": [1, null]}', None, None, None), {"a": [1, None]}),
    "repr": (Finished(None, "<x>", None, None), "<x>"),
    "none": (NOTHING, None),
    "no frame": (None, None),
    "not json after all": (Finished(b"{", None, None, None), "{"),
    "not text either": (Finished(b"\xff", None, None, None), "\ufffd"),
    "deep": (Finished(b"[" * 100_000, None, None, None), "[" * 100_000),
    "NaN": (Finished(b"NaN", None, None, None), "NaN"),
}


@pytest.mark.parametrize(("finished", "value"), VALUES.values(), ids=VALUES)
def test_the_value_is_the_guests_word(finished: Finished | None, value: object) -> None:
    assert result_of(wait_status=0, finished=finished).value == value


def test_exit_code_and_signal_come_from_the_kernel_alone() -> None:
    assert (result_of(wait_status=3 << 8).exit_code, result_of(wait_status=3 << 8).signal) == (
        3,
        None,
    )
    assert (result_of(wait_status=11).exit_code, result_of(wait_status=11).signal) == (None, 11)
    assert (result_of(cause="output").exit_code, result_of(cause="output").signal) == (None, None)


def test_in_a_session_the_exit_code_is_the_programs_own_word() -> None:
    def of_a_session(finished: Finished, cause: str | None = None) -> SandboxResult:
        seen = Observation(cause, None, finished, None, stays=True)  # type: ignore[arg-type]
        captures = (Text("stdout", ""), Text("stderr", ""))
        return conclude(seen, QUIET, captures, LIMITS, execution_time=1.5)  # type: ignore[arg-type]

    left = of_a_session(Finished(None, None, None, None, exit_code=7))
    assert (left.status, left.reason, left.exit_code, left.error) == (
        S.FAILED, "exit", 7, "exit code 7",
    )  # fmt: skip
    contradicts_itself = Finished(None, None, None, None, ends_well=True, exit_code=7)
    assert of_a_session(contradicts_itself).exit_code == 0
    assert of_a_session(NOTHING).exit_code == 1  # not well, it says
    assert of_a_session(NOTHING, cause="wall_time").exit_code is None
    assert result_of(wait_status=0, finished=Finished(None, None, None, None, exit_code=7)).ok


def test_what_was_counted_is_reported() -> None:
    counted = result_of(wait_status=0, usage=CgroupUsage(1.0, 2.0, 3, 4)).usage
    assert (counted.cpu_user_seconds, counted.cpu_system_seconds) == (1.0, 2.0)
    assert (counted.memory_peak_bytes, counted.processes_peak) == (3, 4)
    assert counted.wall_seconds == 1.5
    assert result_of(wait_status=0, usage=CgroupUsage()).usage.memory_peak_bytes == 0


def test_the_result_of_a_good_end_does_not_need_a_wait_status() -> None:
    well = Finished(b"5", None, None, None, ends_well=True)
    result = result_of(finished=well)
    assert (result.status, result.reason, result.exit_code, result.value) == (
        S.COMPLETED,
        "exit",
        0,
        5,
    )
    assert result_of(finished=well, wait_status=9).signal == 9
    assert result_of(finished=well, cause="wall_time").exit_code is None


def test_streams_and_facts_are_passed_on() -> None:
    result = result_of(wait_status=0)
    assert (result.stdout, result.stderr) == ("out", "err")
    assert result.truncated == {"stderr": 5}
    assert result.usage.output_bytes == 11
    assert result.trace_id == "t"


def test_a_program_at_its_memory_limit_whose_time_was_up_is_told_of_memory() -> None:
    full = QUIET._replace(memory_peak_bytes=LIMITS.memory_bytes - 4096)
    (hint,) = result_of("wall_time", usage=full).hints
    assert "limits.memory_bytes" in hint
    assert result_of("wall_time").hints == ()
    assert result_of(wait_status=0, usage=full).hints == ()


def test_pictures_are_numbered_without_gaps_and_shown_without_their_content() -> None:
    """A table, a picture that was too large, an unknown type, two pictures."""
    pictures = (
        ("text/html", b"<b>"), ("image/png", b""), ("x/y", b"1"), ("image/png", b"p" * 2000),
        ("image/svg+xml", b"<svg/>"),
    )  # fmt: skip
    drawn = result_of(wait_status=0, finished=Finished(None, None, None, None, pictures=pictures))
    names = [each.name for each in drawn.artifacts]
    assert names == ["picture-1.html", "picture-1.png", "picture-2.svg"]
    shown = "Artifact(name='picture-1.png', mime='image/png', 2,000 bytes)"
    assert repr(drawn.artifacts[1]) == shown
