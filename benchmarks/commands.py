"""`cellwright bench`: what is measured, and where the results go.

Exit status 1 if a verdict of a benchmark does not hold.
"""

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..policies.errors import PolicyError
from ..policies.policy import Policy
from .documents import write_documents
from .machine import facts, load
from .page import as_page
from .report import Report
from .settings import Settings
from .tables import show

_HOLDS, _FAILS = 0, 1
# name -> what it tells; each is a module of this package with a function `measure`
BENCHMARKS = {
    "latency": "what one call costs",
    "throughput": "fresh cells a second, and CPU time a call",
    "ladder": "what each layer costs, one by one",
    "density": "memory of cells that stand ready, and of sessions",
    "growth": "what becomes slower with time, use and load",
    "peers": "the same programs elsewhere, side by side",
    "languages": "programs in other languages, and sessions in them",
    "fairness": "neighbours, and the order of a queue",
    "kernel": "kernel memory that a cell gets beyond its cap, object by object",
    "leaks": "what is left after ten thousands of calls",
    "soak": "many callers at once, hostile ones among them, and all there is in abundance",
    "chaos": "processes are killed and stopped at random while programs run",
    "replays": "whether runs with parallel calls are finished, and no call made twice, under kills",
    "audit": "what the audit trail costs",
    "daemon": "what it costs to share a pool through a daemon",
    "tools": "what a call of a tool costs",
    "mcp": "what a program costs a client of the MCP server",
    "validation": "what a source check costs",
    "search": "how much of what is asked for is found among tools, and what a query costs",
    "tokens": "what a model reads of tools, and what many tools cost a request",
    "workflows": "what passes through a model in whole pieces of work, both ways",
    "stream": "bytes of output a second, as they come",
}
_USUAL = ("latency", "throughput", "ladder", "density", "growth", "peers")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cellwright bench`."""
    told = "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
    parser.add_argument(
        "names",
        nargs="*",
        metavar="WHAT",
        help=f"{told}. All: all of them. Without: the first six",
    )
    parser.add_argument("--runs", type=int, metavar="N", help="how often to measure each")
    parser.add_argument(
        "--forks", type=int, metavar="N", help="how old a launcher grows (growth, leaks)"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="how long faults go on (chaos)")
    parser.add_argument("--smoke", action="store_true", help="little of everything, ratios only")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where peers-setup installed")
    parser.add_argument("--data", type=Path, metavar="DIR", help="for search and tokens")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a sentence encoder, for search")
    parser.add_argument("--plain", action="store_true", help="plain tables, even with rich")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="measure nothing")
    parser.add_argument(
        "--write-readme", action="store_true", help="write the results into a checkout's documents"
    )


def bench(options: argparse.Namespace, policy: Policy) -> int:
    """Measure, or read what was measured, and show it; raises PolicyError for what makes no sense."""
    if options.smoke and options.write_readme:
        raise PolicyError("--write-readme: what a smoke run finds is not for documents")
    settings = Settings(
        policy, options.runs, options.forks, options.minutes, options.smoke, options.peers,
        options.data, options.model,
    )  # fmt: skip
    with _ended_in_order():
        reports = _shown(options) if options.source else _measured_all(options, settings)
    if options.write_readme:
        write_documents(reports)
    holds = all(verdict.holds for report in reports for verdict in report.verdicts)
    return _HOLDS if holds else _FAILS


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM end us like Ctrl-C does, so that nothing is left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _shown(options: argparse.Namespace) -> list[Report]:
    reports = _read(options.source)
    for report in reports:
        show(report, plain=options.plain)
    _write(reports, options)
    return reports


def _measured_all(options: argparse.Namespace, settings: Settings) -> list[Report]:
    reports: list[Report] = []
    for name in _chosen(options.names):
        reports.append(_measured(name, settings, plain=options.plain))
        _write(reports, options)  # at once: what is measured must not be lost with what is not
    return reports


def _chosen(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if name not in (*BENCHMARKS, "all"):
            raise PolicyError(f"bench: {name!r} is none of {', '.join(BENCHMARKS)}")
    return tuple(BENCHMARKS) if "all" in names else tuple(names) or _USUAL


def _measured(name: str, settings: Settings, *, plain: bool) -> Report:
    """Measure one thing and show it at once: the next may take minutes."""
    print(f"bench: {name} ...", file=sys.stderr, flush=True)
    machine, busy = facts(), load()
    found: Report = importlib.import_module(f".{name}", __package__).measure(settings)
    report = msgspec.structs.replace(found, machine=machine, notes=(*found.notes, busy))
    show(report, plain=plain)
    return report


def _read(path: Path) -> list[Report]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Report])
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise PolicyError(f"{path} is none of our results: {error}") from None


def _write(reports: list[Report], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_bytes(msgspec.json.encode(reports) + b"\n")
    if options.html:
        options.html.write_text(as_page(reports))
