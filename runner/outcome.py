"""From what was observed to a result.  Pure."""

import os
import signal
from typing import Any, NamedTuple

import msgspec

from ..policies.policy import Limits
from .capture import Capture
from .cgroups import Usage as CgroupUsage
from .messages import Finished, Reaped, decode_json
from .result import Reason, SandboxResult, SandboxStatus, Usage
from .supervision import Observation

_STATUS_OF_CAUSE = {
    "wall_time": SandboxStatus.TIMEOUT,
    "cpu_time": SandboxStatus.TIMEOUT,
    "cancelled": SandboxStatus.CANCELLED,
}


class Count(NamedTuple):
    """What the cell's cgroup counted."""

    usage: CgroupUsage
    oom_kills: int


class _End(NamedTuple):
    status: SandboxStatus
    reason: Reason
    error: str | None = None


def conclude(
    seen: Observation, counted: Count, captures: tuple[Capture, ...], limits: Limits,
    *, execution_time: float, **facts: Any,
) -> SandboxResult:  # fmt: skip
    """Return the result of an execution.  `facts` are passed on to it unchanged."""
    usage = _usage(seen.reaped, counted.usage, captures, execution_time)
    end = _end(seen, counted.oom_kills, usage, limits)
    finished = seen.finished or Finished(None, None, None, None)
    exit_code, signal_number = _decode_wait_status(seen.wait_status)
    return SandboxResult(
        status=end.status,
        reason=end.reason,
        stdout=captures[0].text(),
        stderr=captures[1].text(),
        value=_value(finished),
        exit_code=exit_code,
        signal=signal_number,
        error=end.error or finished.error,
        traceback=finished.traceback,
        violations=seen.violations,
        execution_time=execution_time,
        usage=usage,
        truncated={each.name: each.dropped_bytes for each in captures if each.dropped_bytes},
        **facts,
    )


def _end(seen: Observation, oom_kills: int, usage: Usage, limits: Limits) -> _End:
    """Say how it ended: what we did comes first, then what the kernel did, then the program."""
    if seen.cause:
        status = _STATUS_OF_CAUSE.get(seen.cause, SandboxStatus.KILLED)
        return _End(status, seen.cause, _explain(seen, limits))
    exit_code, number = _decode_wait_status(seen.wait_status)
    if exit_code is None:
        return _killed(number or signal.SIGKILL, oom_kills, usage, limits)
    if exit_code == 0:
        return _End(SandboxStatus.COMPLETED, "exit")
    raised = seen.finished is not None and seen.finished.traceback is not None
    return _End(
        SandboxStatus.FAILED,
        "exception" if raised else "exit",
        None if seen.finished and seen.finished.error else f"exit code {exit_code}",
    )


def _explain(seen: Observation, limits: Limits) -> str:
    explanations = {
        "wall_time": f"ran longer than {limits.wall_seconds:g} s",
        "cpu_time": f"used more than {limits.cpu_seconds:g} s of CPU time",
        "output": f"wrote more than {limits.output_total_bytes} bytes",
        "violation": str(seen.complaint),
        "cancelled": "cancelled by the caller",
    }
    return explanations[seen.cause or ""]


def _killed(number: int, oom_kills: int, usage: Usage, limits: Limits) -> _End:
    """Tell the kernel's caps from other signals: who was OOM-killed and who ran out of CPU time."""
    cpu_seconds = usage.cpu_user_seconds + usage.cpu_system_seconds
    if oom_kills and number == signal.SIGKILL:
        return _End(SandboxStatus.KILLED, "memory", f"needed more than {limits.memory_bytes} bytes")
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
        return _End(
            SandboxStatus.TIMEOUT,
            "cpu_time",
            f"used more than {limits.cpu_seconds:g} s of CPU time",
        )
    return _End(SandboxStatus.FAILED, "signal", f"killed by {_signal_name(number)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _decode_wait_status(wait_status: int | None) -> tuple[int | None, int | None]:
    """Return (exit code, signal) of the guest's main process, one of them None."""
    if wait_status is None:
        return None, None
    code = os.waitstatus_to_exitcode(wait_status)
    return (code, None) if code >= 0 else (None, -code)


def _value(finished: Finished) -> Any:
    """Return the value in the guest's words; what is not JSON after all is taken as text."""
    if finished.value is None:
        return finished.representation
    try:
        return decode_json(finished.value)
    except msgspec.DecodeError:
        return finished.value.decode("utf-8", "replace")


def _usage(
    reaped: Reaped, counted: CgroupUsage, captures: tuple[Capture, ...], wall_seconds: float
) -> Usage:
    """Prefer the cgroup's count: wait4(2) misses children whose parent ignores SIGCHLD."""
    return Usage(
        wall_seconds=wall_seconds,
        cpu_user_seconds=_or(counted.cpu_user_seconds, reaped.cpu_user_seconds),
        cpu_system_seconds=_or(counted.cpu_system_seconds, reaped.cpu_system_seconds),
        memory_peak_bytes=int(_or(counted.memory_peak_bytes, reaped.max_rss_bytes)),
        processes_peak=int(_or(counted.processes_peak, 0)),
        output_bytes=sum(each.total_bytes for each in captures),
    )


def _or(preferred: float | None, otherwise: float) -> float:
    return otherwise if preferred is None else preferred
