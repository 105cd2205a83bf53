"""The interface of cellwright itself: `/v1/judge`, `/v1/languages` and `/v1/status`."""

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ....policies.errors import CellwrightError, PolicyError
from ....policies.languages import PYTHON
from ....policies.policy import MIB
from ...sandbox.judging.checkers import CHECKERS, ProgramChecker
from ...sandbox.judging.verdicts import Case, CaseResult, JudgeLimits, Judgement
from .judging_core import (
    DialectError,
    JudgingCore,
    Seconds,
    answer,
    body_of,
    client_of,
    until_gone_of,
)

_MOST_CASES = 10_000


class OwnCase(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: str = ""
    expected: str | None = None
    name: str = ""
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = {}


class OwnChecker(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A checker that is a program."""

    source: str
    language: str = "cpp"
    flags: tuple[str, ...] = ()
    files: dict[str, str] = {}


class OwnRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request of `/v1/judge`."""

    source: str
    cases: list[OwnCase]
    language: str = PYTHON
    checker: str | OwnChecker = "tokens"
    time_seconds: Seconds = 2.0
    wall_seconds: Seconds | None = None
    compile_timeout: Seconds | None = None
    memory_bytes: int = 256 * MIB
    output_bytes: int = 16 * MIB
    flags: tuple[str, ...] = ()
    sources: dict[str, str] = {}
    all: bool = False
    strict: bool = False


class OwnDialect:
    """The routes of cellwright."""

    def __init__(self, core: JudgingCore) -> None:
        self._core = core

    async def judge(self, request: Request) -> Response:
        """Judge a program by its cases; compiled once."""
        asked = await body_of(request, OwnRequest)
        if len(asked.cases) > _MOST_CASES:
            raise DialectError(422, f"cases: at most {_MOST_CASES}")
        if isinstance(asked.checker, str) and asked.checker not in CHECKERS:
            raise DialectError(422, f"checker: must be one of {', '.join(CHECKERS)}, or a program")
        try:
            done = await self._core.work(
                client_of(request), partial(self._judged, asked), until_gone_of(request)
            )
        except PolicyError as error:
            raise DialectError(422, str(error)) from None
        except CellwrightError as error:
            raise DialectError(503, str(error)) from None
        return answer(done)

    def _judged(self, asked: OwnRequest, cancel: int) -> dict[str, object]:
        checker = asked.checker
        limits = JudgeLimits(
            time_seconds=asked.time_seconds, wall_seconds=asked.wall_seconds,
            memory_bytes=asked.memory_bytes, output_bytes=asked.output_bytes,
        )  # fmt: skip
        self._core.check(limits)
        done = self._core.sandbox.judge(
            asked.source, asked.language,
            [Case(**msgspec.structs.asdict(each)) for each in asked.cases],
            checker=checker if isinstance(checker, str)
            else ProgramChecker(**msgspec.structs.asdict(checker)),
            limits=limits, all=asked.all, strict=asked.strict, flags=asked.flags, sources=asked.sources,
            compile_timeout=asked.compile_timeout, cancel=cancel,
        )  # fmt: skip
        self._core.count(done, cancel)
        return _shown(done)

    async def languages(self, _: Request) -> Response:
        """List the languages that this host has."""
        return answer([each.name for each in self._core.languages])

    async def status(self, _: Request) -> Response:
        """Tell how much is done and waits."""
        core = self._core
        return answer(
            {
                "running": core.running, "waiting": core.waiting, "at_once": core.at_once,
                "per_minute": core.per_minute(), "verdicts": dict(core.verdicts),
            }
        )  # fmt: skip

    async def page(self, _: Request) -> Response:
        """Show the same as a page that reloads itself."""
        core = self._core
        rows = "".join(
            f"<tr><td>{name}<td>{count:,}" for name, count in core.verdicts.most_common()
        )
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta http-equiv="refresh" content="2">'
            "<title>cellwright judge</title><h1>cellwright judge</h1>"
            f"<p>{core.per_minute():,} requests in the last minute; {core.running} run, "
            f"{core.waiting} wait; at most {core.at_once} at once.</p><table>{rows}</table></html>"
        )
        policy = {"Content-Security-Policy": "default-src 'none'"}
        return HTMLResponse(text, headers=policy)


def _shown(done: Judgement) -> dict[str, object]:
    compiled = done.compile
    return {
        "verdict": done.verdict.value, "passed": done.passed, "total": done.total,
        "score": done.score, "seconds": done.seconds, "memory_bytes": done.memory_bytes,
        "message": done.message,
        "compile": compiled and {
            # Not `cached`: it would tell a client what others have submitted.
            "ok": compiled.ok, "output": compiled.output, "seconds": compiled.seconds,
        },
        "cases": [_of_case(each) for each in done.cases],
    }  # fmt: skip


def _of_case(each: CaseResult) -> dict[str, object]:
    return {
        "name": each.name, "verdict": each.verdict.value, "seconds": each.seconds,
        "wall_seconds": each.wall_seconds, "memory_bytes": each.memory_bytes,
        "stdout": each.stdout, "stderr": each.stderr, "exit_code": each.exit_code,
        "signal": each.signal, "message": each.message, "points": each.points,
        "dropped": each.dropped,
    }  # fmt: skip
