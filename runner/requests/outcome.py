"""`conclude`: turns observations into a result.  Pure."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from ...policies.policy import Limits
from ..cells.workspace import Artifact
from ..cgroups import CgroupUsage
from ..messages import CHARTS, Finished, decode_json
from ..watching.gpu_use import NO_USE, GpuUse
from ..watching.guest_channel import Capture
from ..watching.supervision import Observation
from .result import Chart, Reason, SandboxResult, SandboxStatus, Usage, charts_of

# The code in a guest sends less (1,000 and 50,000 bytes), but a guest that forges its final frame could
# fill the whole frame.
_ERROR_CHARACTERS, _TRACEBACK_CHARACTERS = 4_000, 64_000
_STATUS_OF_CAUSE = {
    "wall_time": SandboxStatus.TIMEOUT,
    "cpu_time": SandboxStatus.TIMEOUT,
    "cancelled": SandboxStatus.CANCELLED,
}
_MORE_MEMORY = "needed more than {} bytes"
# part of the memory limit, because a charge of several pages fails just below the limit
_FULL = 0.99


class _End(msgspec.Struct, frozen=True):
    status: SandboxStatus
    reason: Reason
    error: str | None = None


def conclude(
    seen: Observation, counted: CgroupUsage, captures: tuple[Capture, ...], limits: Limits,
    *, execution_time: float, artifacts: tuple[Artifact, ...] = (), gpu: GpuUse = NO_USE,
    **facts: Any,
) -> SandboxResult:  # fmt: skip
    """Return the result of an execution; `facts` become fields of it unchanged."""
    finished = seen.finished or Finished(None, None, None, None)
    exit_code, signal_number = _exit_of(seen)
    texts, truncated, output_bytes = {}, {}, 0
    for each in captures:
        texts[each.name] = each.text()
        output_bytes += each.total_bytes
        if lost := each.dropped_bytes:
            truncated[each.name] = lost
    if finished.dropped_bytes:
        truncated["value"] = finished.dropped_bytes
    usage = _usage(counted, output_bytes, execution_time, limits, gpu)
    end = _end(seen, exit_code, signal_number, usage, limits)
    drawn = finished.pictures
    return SandboxResult(
        status=end.status,
        reason=end.reason,
        stdout=texts.get("stdout", ""),  # empty if the caller took the streams
        stderr=texts["stderr"],
        value=_value(finished, limits.value_bytes),
        exit_code=exit_code,
        signal=signal_number,
        error=end.error or _cut(finished.error, _ERROR_CHARACTERS),
        traceback=_cut(finished.traceback, _TRACEBACK_CHARACTERS),
        violations=seen.violations,
        artifacts=(*_pictures(finished), *artifacts) if drawn else artifacts,
        charts=_charts(finished) if drawn else (),
        execution_time=execution_time,
        usage=usage,
        truncated=truncated,
        notices=tuple(_notices(usage, limits, end.reason, gpu.left_bytes)),
        **facts,
    )


def _end(
    seen: Observation, exit_code: int | None, number: int | None, usage: Usage, limits: Limits
) -> _End:  # fmt: skip
    """Return how it ended: our own reasons come first, then the kernel's, then the program's."""
    if seen.cause:
        status = _STATUS_OF_CAUSE.get(seen.cause, SandboxStatus.KILLED)
        return _End(status, seen.cause, _explain(seen, limits))
    if seen.stays and seen.finished:
        return _by_its_own_word(seen.finished)
    if exit_code is None:
        return _killed(number or _signal.SIGKILL, usage, limits)
    if exit_code == 0:
        return _End(SandboxStatus.COMPLETED, "exit")
    raised = seen.finished is not None and seen.finished.traceback is not None
    return _End(
        SandboxStatus.FAILED,
        "exception" if raised else "exit",
        None if seen.finished and seen.finished.error else f"exit code {exit_code}",
    )


def _by_its_own_word(finished: Finished) -> _End:
    """Return how a request of a session ended, as the guest says: no process ends with a request,
    so there is no other source."""
    if finished.ends_well:
        return _End(SandboxStatus.COMPLETED, "exit")
    reason: Reason = "exit" if finished.traceback is None else "exception"
    error = None if finished.error else f"exit code {finished.exit_code or 1}"
    return _End(SandboxStatus.FAILED, reason, error)


def _explain(seen: Observation, limits: Limits) -> str:
    explanations = {
        "wall_time": f"ran longer than {limits.wall_seconds:g} s",
        "cpu_time": f"used more than {limits.cpu_seconds:g} s of CPU time",
        "memory": _MORE_MEMORY.format(limits.memory_bytes),
        "output": f"wrote more than {limits.output_total_bytes} bytes",
        "violation": str(seen.complaint),
        "cancelled": "cancelled by the caller",
    }
    return explanations[seen.cause or ""]


def _killed(number: int, usage: Usage, limits: Limits) -> _End:
    """Tell the kernel's caps from other signals: OOM kills and used-up CPU time."""
    cpu_seconds = usage.cpu_user_seconds + usage.cpu_system_seconds
    if usage.killed_for_memory and number == _signal.SIGKILL:
        return _End(SandboxStatus.KILLED, "memory", _MORE_MEMORY.format(limits.memory_bytes))
    # A program can send itself SIGXCPU.  Without a cgroup no time is counted, and the signal decides.
    is_spent = cpu_seconds >= limits.cpu_seconds
    if (number == _signal.SIGXCPU and (is_spent or not cpu_seconds)) or (
        number == _signal.SIGKILL and is_spent
    ):
        return _End(
            SandboxStatus.TIMEOUT,
            "cpu_time",
            f"used more than {limits.cpu_seconds:g} s of CPU time",
        )
    return _End(SandboxStatus.FAILED, "signal", f"killed by {_signal_name(number)}")


def _notices(usage: Usage, limits: Limits, reason: Reason, left_bytes: int) -> Iterator[str]:
    """Yield notices of children that the kernel stopped at a limit, which a continuing program may
    not report, and of memory of a GPU that the driver has not freed."""
    if left_bytes:
        yield f"{left_bytes:,} bytes of GPU memory are not free, though all of its processes have ended"
    if (killed := usage.killed_for_memory) and reason != "memory":
        processes = "process" if killed == 1 else "processes"
        yield (
            f"the kernel killed {killed:,} {processes}: all together needed more than "
            f"{limits.memory_bytes} bytes"
        )
    if refused := usage.forks_refused:
        yield (
            f"{refused:,} attempts to start a process or thread failed: at most {limits.processes} "
            "live at once"
        )


def _signal_name(number: int) -> str:
    import signal  # slow to import, and seldom needed

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_of(seen: Observation) -> tuple[int | None, int | None]:
    """Return (exit code, signal) of the guest's main process, one of them None.

    After a good end the supervisor does not wait for the process: the guest asked to be ended.
    """
    if seen.wait_status is not None:
        code = os.waitstatus_to_exitcode(seen.wait_status)
        return (code, None) if code >= 0 else (None, -code)
    if seen.finished and seen.finished.ends_well and not seen.cause:
        return 0, None  # also in a session, as if the program had ended
    if seen.finished and seen.stays and not seen.cause:
        return seen.finished.exit_code or 1, None
    return None, None


_SUFFIXES = {
    "image/png": "png",
    "image/jpeg": "jpeg",
    "image/svg+xml": "svg",
    "text/html": "html",
    "text/markdown": "md",
}


def _charts(finished: Finished) -> tuple[Chart, ...]:
    data = next((content for mime, content in finished.pictures if mime == CHARTS), b"")
    if not data:
        return ()
    return charts_of(data, _picture_names(finished))


def _pictures(finished: Finished) -> tuple[Artifact, ...]:
    """Return the guest's pictures under names that the host chose; empty ones and unknown types are
    dropped."""
    names = _picture_names(finished)
    return tuple(
        Artifact(name, mime, content)
        for name, (mime, content) in zip(names, finished.pictures, strict=True)
        if name
    )


def _picture_names(finished: Finished) -> tuple[str, ...]:
    """Return the name of each picture, empty for one that is dropped.  Images are counted apart from
    HTML and Markdown, which a reader may leave out, so that neither kind has gaps."""
    counts, names = {True: 0, False: 0}, []
    for mime, content in finished.pictures:
        is_image, is_kept = mime.startswith("image/"), bool(content and mime in _SUFFIXES)
        counts[is_image] += is_kept
        names.append(f"picture-{counts[is_image]}.{_SUFFIXES[mime]}" if is_kept else "")
    return tuple(names)


def _value(finished: Finished, limit: int) -> Any:
    """Return the value as the guest sent it; invalid JSON becomes text.

    A guest that forges its last frame may send more than its limits: that is cut.
    """
    if finished.value is None:
        return _cut(finished.representation, limit)
    try:
        if len(finished.value) <= limit:
            return decode_json(finished.value)
    except msgspec.DecodeError:
        pass
    return finished.value[:limit].decode("utf-8", "replace")


def _cut(text: str | None, limit: int) -> str | None:
    return text if text is None or len(text) <= limit else text[:limit]


def _usage(
    counted: CgroupUsage, output_bytes: int, wall_seconds: float, limits: Limits, gpu: GpuUse
) -> Usage:  # fmt: skip
    return Usage(
        wall_seconds=wall_seconds,
        cpu_user_seconds=counted.cpu_user_seconds or 0.0,
        cpu_system_seconds=counted.cpu_system_seconds or 0.0,
        memory_peak_bytes=counted.memory_peak_bytes or 0,
        processes_peak=counted.processes_peak or 0,
        output_bytes=output_bytes,
        killed_for_memory=counted.killed_for_memory,
        memory_limit_reached=(counted.memory_peak_bytes or 0) >= _FULL * limits.memory_bytes,
        forks_refused=counted.forks_refused,
        gpu_memory_peak_bytes=gpu.memory_peak_bytes,
        gpu_seconds=gpu.seconds,
    )
