"""`CodeInterpreter`: the code contexts of an E2B sandbox, all in one cell; and the data of charts in
the form of E2B's code interpreter.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec

from ....policies.errors import CellwrightError, PolicyError, SessionLost
from ....runner.requests.result import Chart, ChartAxis, ChartSeries
from ...adapters.jupyter.notebook_session import (
    NotebookOutcome,
    NotebookSession,
    error_of,
)
from .control_messages import ExecuteCode

_DEFAULT = "default"
_PYTHON = ("python", "python3")
_MOST_CONTEXTS = 32
_QUEUED = 64
_FIGURE = "<Figure>"
_QUOTES = "'\""
_MEMBERS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg",
    "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex",
    "application/json": "json", "application/javascript": "javascript",
    "e2b/json": "json", "e2b/data": "data",
}  # fmt: skip


class CodeContext(msgspec.Struct):
    """A namespace of programs, with a directory of its own."""

    id: str
    cwd: str
    language: str = "python"
    executions: int = 0

    def told(self) -> dict[str, str]:
        """Return its form for clients."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}


class CodeInterpreter:
    """Runs code in the contexts of one sandbox, one program at a time; called in one event loop."""

    def __init__(self, notebook: NotebookSession, home: str) -> None:
        self._notebook, self._home = notebook, home
        self._contexts = {_DEFAULT: CodeContext(_DEFAULT, home)}
        self.is_killed = False
        self._turn = asyncio.Lock()

    def contexts(self) -> list[dict[str, str]]:
        return [each.told() for each in self._contexts.values()]

    def make(self, language: str | None, cwd: str | None) -> CodeContext:
        """Return a new context; raises PolicyError."""
        _check_language(language)
        if len(self._contexts) >= _MOST_CONTEXTS:
            raise PolicyError(f"at most {_MOST_CONTEXTS} contexts are possible", "remove one")
        made = CodeContext(secrets.token_hex(8), cwd=cwd or self._home)
        self._contexts[made.id] = made
        return made

    def find(self, id: str | None) -> CodeContext | None:
        return self._contexts.get(id or _DEFAULT)

    async def forget(self, context: CodeContext, *, is_removed: bool) -> None:
        """Drop the variables of a context, and with `is_removed` the context."""
        async with self._turn:
            await self._notebook.forget_context(context.id)
        context.executions = 0
        if is_removed and context.id != _DEFAULT:
            self._contexts.pop(context.id, None)

    def context_of(self, request: ExecuteCode) -> CodeContext:
        """Return the context in which to run a program; raises PolicyError, SessionLost."""
        _check_language(request.language)
        context = self.find(request.context_id)
        if context is None:
            raise SessionLost(f"context {str(request.context_id)[:64]} not found")
        return context

    async def run(self, context: CodeContext, request: ExecuteCode) -> AsyncGenerator[bytes]:
        """Yield the lines that tell how a program runs; a client that leaves interrupts it.

        The lines end before those of the outcome if the sandbox is killed meanwhile: `is_killed`.
        """
        async with self._turn:
            async for line in self._lines(context, request):
                if self.is_killed:
                    return
                yield msgspec.json.encode(line) + b"\n"

    async def _lines(
        self, context: CodeContext, request: ExecuteCode
    ) -> AsyncIterator[dict[str, Any]]:
        lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_QUEUED)

        async def tell(stream: str, text: str) -> None:
            await lines.put({"type": stream, "text": text, "timestamp": time.time_ns()})

        async def execute() -> None:
            try:
                for line in await self._execute(context, request, tell):
                    await lines.put(line)
            finally:
                await lines.put(None)

        running = asyncio.create_task(execute())
        try:
            while (line := await lines.get()) is not None:
                yield line
            await running
        finally:
            if not running.done():
                self._notebook.interrupt()
                while not running.done():  # it may wait for room
                    await _drain(lines, running)

    async def _execute(
        self, context: CodeContext, request: ExecuteCode, tell: Any
    ) -> list[dict[str, Any]]:
        context.executions += 1
        count = {"type": "number_of_executions", "execution_count": context.executions}
        try:
            done = await self._notebook.execute(
                request.code, context.executions, tell,
                context=context.id, cwd=context.cwd, env=request.env_vars,
            )  # fmt: skip
        except CellwrightError as error:
            name, message = error_of(error)
            return [
                count,
                {"type": "error", "name": name, "value": message, "traceback": str(error)},
            ]
        told = [count, *_results(done)]
        if not done.result.ok:
            name, value = error_of(done.result)
            traceback = done.traceback or f"{name}: {value}"
            told.append({"type": "error", "name": name, "value": value, "traceback": traceback})
        return told


async def _drain(
    lines: "asyncio.Queue[dict[str, Any] | None]", running: "asyncio.Task[None]"
) -> None:
    taking = asyncio.ensure_future(lines.get())
    await asyncio.wait([taking, running], return_when=asyncio.FIRST_COMPLETED)
    taking.cancel()


def _check_language(language: str | None) -> None:
    if language and language.lower() not in _PYTHON:
        raise PolicyError(
            f"language {language!r}: contexts of this server run Python",
            "run programs of other languages with sandbox.commands.run",
        )


def _results(done: NotebookOutcome) -> list[dict[str, Any]]:
    told = [_result(bundle, is_main=False) for bundle in done.displayed]
    for result, name in zip(told[len(told) - len(done.figures) :], done.figures, strict=True):
        charts = [each for each in done.result.charts if each.picture == name]
        result["text"] = charts[0].figure if charts else _FIGURE
        if chart := chart_of(charts):
            result["chart"] = chart
    if done.value:
        told.append(_result(done.value, is_main=True))
    return told


def _result(bundle: Mapping[str, Any], *, is_main: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"type": "result", "is_main_result": is_main}
    extra: dict[str, Any] = {}
    for mime, content in bundle.items():
        if mime in _MEMBERS:
            told[_MEMBERS[mime]] = content
        elif "/" in mime:
            extra[mime] = content
    if len(text := told.get("text", "")) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        told["text"] = text[1:-1]  # as E2B does with text values
    return {**told, "extra": extra} if extra else told


_TYPES = {"box": "box_and_whisker"}
_NAMES = {"line": "Line", "bar": "Group", "scatter": "Points"}  # labels of unnamed series
_DIGITS = 4  # digits of angles, which matplotlib computes in single precision
_BOX = ("min", "first_quartile", "median", "third_quartile", "max")


def chart_of(charts: list[Chart]) -> dict[str, Any] | None:
    """Return the data of a figure: of its chart, or a superchart of several."""
    if len(charts) < 2:
        return _chart(charts[0]) if charts else None
    title = charts[0].figure_title
    return {"type": "superchart", "title": title, "elements": [_chart(each) for each in charts]}


def _chart(chart: Chart) -> dict[str, Any]:
    kinds = {each.type for each in chart.series}
    kind = kinds.pop() if len(kinds) == 1 else "unknown"
    title = chart.title or None
    told: dict[str, Any] = {"type": _TYPES.get(kind, kind), "title": title, "elements": []}
    if kind != "pie":
        told |= {**_axis("x", chart.x), **_axis("y", chart.y)}
    if kind in ("line", "scatter"):
        told |= {**_ticks("x", chart.x), **_ticks("y", chart.y)}
    if kind != "unknown":
        told["elements"] = [
            element
            for number, each in enumerate(chart.series)
            for element in _elements(each, each.label or f"{_NAMES.get(kind, kind)} {number}")
        ]
    return told


def _axis(name: str, axis: ChartAxis) -> dict[str, Any]:
    return {f"{name}_label": axis.label or None, f"{name}_unit": axis.unit or None}


def _ticks(name: str, axis: ChartAxis) -> dict[str, Any]:
    return {
        f"{name}_ticks": axis.ticks, f"{name}_tick_labels": axis.tick_labels,
        f"{name}_scale": axis.scale,
    }  # fmt: skip


def _elements(series: ChartSeries, label: str) -> list[dict[str, Any]]:
    if series.type in ("line", "scatter"):
        return [{"label": label, "points": [list(each[:2]) for each in series.points]}]
    return [_element(series, label, list(point)) for point in series.points]


def _element(series: ChartSeries, group: str, point: list[Any]) -> dict[str, Any]:
    label, *values = point or [None]
    if series.type == "box":
        numbers = [*values, *[None] * len(_BOX)]
        far = [each[1] for each in series.outliers if len(each) == 2 and each[0] == label]
        return {"label": str(label), **dict(zip(_BOX, numbers, strict=False)), "outliers": far}
    value = values[0] if values else None
    if series.type == "pie":
        share = value if isinstance(value, int | float) else 0.0
        return {"label": str(label), "angle": round(360.0 * share, _DIGITS), "radius": 1.0}
    return {"label": str(label), "group": group, "value": value}
