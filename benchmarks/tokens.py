"""Tokens that a model reads of a catalogue: as JSON, by name, in a line each, as signatures, in full;
and what it costs a request that its sandbox has so many tools."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..harness.sandbox.sandbox import Sandbox
from ..harness.schemas.spec import ToolSpec
from ..harness.stubs.stub_tree import brief, paths, python_tree, say
from ..harness.tools.tool import Tool
from .catalogues import tool_specs
from .measuring import Contender, median, percentile_columns, percentile_row, side_by_side
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings

_MODULES = Path(sys.prefix, "node", "node_modules")  # as scripts/setup installs them
_ENCODING = _MODULES / "gpt-tokenizer" / "cjs" / "encoding" / "o200k_base.js"
_COUNT = (
    "const {countTokens} = require(process.argv[1]);"
    "const texts = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
    "console.log(JSON.stringify(texts.map((text) => countTokens(text))));"
)
_FEW = 3
_SIGNATURES, _NAMES = 20.0, 2.5  # percent of the JSON
Level = tuple[str, Callable[[ToolSpec], str]]


def measure(settings: Settings) -> Report:
    """Return tokens of the tools of `settings.data`, else of tools that were made up."""
    specs = tool_specs(settings.data)
    rendering = _rendering(specs)  # first: texts are kept
    table, verdicts = _tokens(specs, real=settings.data is not None)
    costs, cheap = _costs(specs, settings)
    notes = ["JSON: name, description and schemas of each tool, without blanks."]
    notes += [] if _tokenizer() else ["No tokenizer was there: four characters count as a token."]
    notes += [] if settings.data else ["The tools were made up: --data DIR names those of servers."]
    return Report(
        name="tokens", title="What a model reads of tools", tables=(table, rendering, costs),
        verdicts=(*verdicts, cheap), notes=tuple(notes),
    )  # fmt: skip


def _tokens(specs: Sequence[ToolSpec], *, real: bool) -> tuple[ReportTable, tuple[Criterion, ...]]:
    where = paths(specs)
    levels: tuple[Level, ...] = (
        ("JSON", _as_json),
        ("names", lambda spec: spec.name),
        ("name and first sentence", brief),
        ("signature and first sentence", lambda spec: say(spec, where[spec.name], "summary")),
        ("in full, Python", lambda spec: say(spec, where[spec.name], "full")),
        ("in full, TypeScript", lambda spec: say(spec, where[spec.name], "full", "typescript")),
    )
    counts = {name: count_tokens([render(spec) for spec in specs]) for name, render in levels}
    whole = sum(counts["JSON"])
    rows: list[tuple[Value, ...]] = [
        (name, sum(each), sum(each) / whole * 100, median(each), max(each))
        for name, each in counts.items()
    ]
    table = ReportTable(
        title=f"Tokens of {len(specs)} tools, {tokenizer()}",
        columns=(Column("rendering"), Column("tokens", 0), Column("% of JSON"),
                 Column("a tool, p50", 0), Column("the longest", 0)),
        rows=tuple(rows),
    )  # fmt: skip
    share = {str(row[0]): float(str(row[2])) for row in rows}
    limits = {
        "signature and first sentence": _SIGNATURES if real else 100.0,
        "names": _NAMES if real else 100.0,
    }
    return table, tuple(
        Criterion(f"{name}: at most {most:g} %", share[name] <= most, f"{share[name]:.1f} %")
        for name, most in limits.items()
    )


def _as_json(spec: ToolSpec) -> str:
    said = {"name": spec.name, "description": spec.description, "inputSchema": spec.parameters}
    said |= {"outputSchema": spec.output_schema} if spec.output_schema else {}
    return json.dumps(said, separators=(",", ":"), ensure_ascii=False)


def count_tokens(texts: Sequence[str]) -> list[int]:
    """Return the tokens of each text; an estimate where there is no tokenizer."""
    node = _tokenizer()
    if not node:
        return [len(text) // 4 for text in texts]
    command = [node, "-e", _COUNT, str(_ENCODING)]
    done = subprocess.run(
        command, input=json.dumps(texts), text=True, capture_output=True, check=True
    )
    counts: list[int] = json.loads(done.stdout)
    return counts


def tokenizer() -> str:
    """Return whose tokens are counted."""
    return "o200k" if _tokenizer() else "estimated"


def _tokenizer() -> str:
    """Return the node that can count, empty if there is none."""
    return (shutil.which("node") or "") if _ENCODING.is_file() else ""


# What it costs


def _rendering(specs: Sequence[ToolSpec]) -> ReportTable:
    rows: list[tuple[Value, ...]] = []
    for name in ("the first time", "again"):
        began = time.thread_time()
        files = python_tree(specs)
        rows.append(
            (name, (time.thread_time() - began) * 1e3, sum(map(len, files.values())) // 1024)
        )
    return ReportTable(
        title=f"Stubs of {len(specs)} tools, processor time",
        columns=(Column("rendered"), Column("ms", 0), Column("KiB", 0)), rows=tuple(rows),
    )  # fmt: skip


def _costs(specs: Sequence[ToolSpec], settings: Settings) -> tuple[ReportTable, Criterion]:
    offers = {"no tools": 0, f"{_FEW} tools": _FEW, f"{len(specs)} tools": len(specs)}
    with contextlib.ExitStack() as stack:
        contenders = [
            _contender(name, stack.enter_context(_sandbox(specs[:count], settings)))
            for name, count in offers.items()
        ]
        times = side_by_side(contenders, settings.amount(300, 10))
    table = ReportTable(
        title="`1+1` in a cell that stood ready, by what its sandbox offers",
        columns=(Column("offered"), *percentile_columns()),
        rows=tuple((name, *percentile_row(each)) for name, each in times.items()),
    )
    few, many = (median(times[name]) for name in list(offers)[1:])
    seen = f"{few * 1e3:.2f} ms and {many * 1e3:.2f} ms"
    return table, Criterion(
        "many tools cost a request no more than twice few", many <= 2 * few, seen
    )


def _contender(name: str, box: Sandbox) -> Contender:
    return Contender(name, lambda: box.execute("1+1"), box.settle)


@contextlib.contextmanager
def _sandbox(specs: Sequence[ToolSpec], settings: Settings) -> Iterator[Sandbox]:
    tools = [Tool(spec, lambda arguments, _: arguments) for spec in specs]
    with Sandbox(policy=settings.policy, tools=tools or None, pool=2) as box:
        yield box
