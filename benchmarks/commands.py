"""The benchmarks by name, and their results: shown, and written to files.

The exit status is 1 if a criterion of a benchmark does not hold.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..policies.argument_checks import did_you_mean
from ..policies.errors import PolicyError
from ..policies.policy import Policy
from .documents import write_documents
from .interference import (
    Interference,
    adopted_orphans,
    between,
    take_reading,
    wait_for_quiet,
)
from .machine import facts, load
from .page import as_page
from .report import Criterion, Report
from .scratch import remove_stale
from .settings import Settings
from .tables import show

_HOLDS, _FAILS = 0, 1
# name: summary; each is a module of this package with a function `measure`
BENCHMARKS = {
    "latency": "latency of one call",
    "throughput": "fresh cells a second, and CPU time a call",
    "parallel": "what limits parallel callers, by process",
    "workers": "one sandbox, one in each of several processes, and one with workers",
    "scale": "fresh cells a second by processes and threads, and what limits each",
    "reach": "the goals of speed, beside what is measured",
    "profile": "CPU time, page faults, system calls and Python calls of a run, by process",
    "ladder": "cost of each layer, one by one",
    "density": "memory of ready cells and of sessions",
    "growth": "latency and memory with age, use and load",
    "peers": "the same programs in other sandboxes",
    "languages": "programs in other languages, and sessions in them",
    "judging": "verdicts under load, and judged cases a second beside a process a case",
    "fairness": "order of a queue, and latency beside busy neighbours",
    "kernel": "kernel memory beyond the cap of a cell, by kind of object",
    "leaks": "resources left after ten thousand calls",
    "soak": "many callers at once, hostile ones among them, and many sessions",
    "chaos": "programs while processes are killed and stopped at random",
    "replays": "durable runs that are killed at random: each completes, no call is made twice",
    "audit": "cost of the audit trail",
    "daemon": "cost of sharing a pool through a daemon",
    "fleet": "programs on the nodes of a fleet, and what Ray costs a call (extra fleet)",
    "tools": "cost of a tool call",
    "mcp": "cost of a program for a client of the MCP server",
    "web": "cost of a program for a client of the web server",
    "validation": "cost of a source check",
    "search": "recall of the search over tools, and cost of a query",
    "tokens": "tokens that a model reads of a catalogue, and cost of many tools for a request",
    "packages": "packages: to lock, to build, and calls with them, beside uv and pip",
    "workflows": "tokens that pass through a model, by tool calls and by programs",
    "image_cells": "cells of an image, beside runc, crun, podman and bubblewrap with the same root",
    "branch": "branches of sessions, beside replays, fresh sessions and CRIU",
    "branch_leaks": "resources left after ten thousand branches",
    "stream": "output in bytes a second",
    "network": "connections to hosts by name, and their bytes, beside a CONNECT proxy",
    "agent": "cost of a step of an agent, a long run, and tools made against tasks done",
    "privacy": "personal data: what is found, what reaches a model, and text in MB a second",
}
_COUNTS = (
    "kernel",
    "leaks",
    "branch_leaks",
    "soak",
    "chaos",
    "replays",
    "workflows",
    "privacy",
)  # waits for things; load is no error
_PATIENCE_SECONDS = 120.0  # with --quiet, for others to leave the machine alone
_USUAL = ("latency", "throughput", "reach", "ladder", "density", "growth", "peers")


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cellwright bench`."""
    summaries = "; ".join(f"{name}: {summary}" for name, summary in BENCHMARKS.items())
    parser.add_argument(
        "names",
        nargs="*",
        metavar="WHAT",
        help=f"{summaries}; all: all of them. Default: {', '.join(_USUAL)}",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help="number of measurements of each; default that of the benchmark",
    )
    parser.add_argument(
        "--forks",
        type=int,
        metavar="N",
        help="number of cells that one launcher forks (growth, leaks); default that of the benchmark",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="duration of the faults (chaos, soak); default that of the benchmark",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="measure only while others leave the machine alone; default is to mark the results",
    )
    parser.add_argument("--smoke", action="store_true", help="measure little, for ratios only")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="the directory in which peers-setup installed other sandboxes",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="questions and catalogues of tools (search, tokens)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a sentence encoder (search)")
    parser.add_argument(
        "--plain", action="store_true", help="print plain tables even if rich is installed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with charts to this file"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="measure nothing; show the results that --json wrote",
    )
    parser.add_argument(
        "--write-readme",
        action="store_true",
        help="write the results into the documents of a checkout",
    )


def bench(options: argparse.Namespace, policy: Policy) -> int:
    """Measure, or read results from a file, and print them; raises PolicyError for invalid options."""
    if options.smoke and options.write_readme:
        raise PolicyError(
            "--write-readme: cannot be combined with --smoke, whose numbers mean nothing"
        )
    settings = Settings(
        policy, options.runs, options.forks, options.minutes, options.smoke, options.peers,
        options.data, options.model,
    )  # fmt: skip
    with _ended_in_order():
        reports = _shown(options) if options.source else _measured_all(options, settings)
    if options.write_readme:
        write_documents([each for each in reports if each.quiet or not options.quiet])
    holds = all(verdict.holds for report in reports for verdict in report.verdicts)
    return _HOLDS if holds else _FAILS


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, so that cells are cleaned up."""
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
    remove_stale()
    chosen = _chosen(options.names)
    for number, name in enumerate(chosen, 1):
        # a line for each, and no ProgressLine: its thread would be measured
        print(f"bench: {name} ({number} of {len(chosen)}) ...", file=sys.stderr, flush=True)
        report = _measured(name, settings, quiet=options.quiet)
        show(report, plain=options.plain)
        reports.append(report)
        _write(reports, options)  # at once: a later failure must not lose this result
    return reports


def _chosen(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if name not in (*BENCHMARKS, "all"):
            hint = did_you_mean(name, BENCHMARKS, f"use all or {', '.join(BENCHMARKS)}")
            raise PolicyError(f"unknown benchmark {name!r}", hint)
    return tuple(BENCHMARKS) if "all" in names else tuple(names) or _USUAL


def _measured(name: str, settings: Settings, *, quiet: bool) -> Report:
    """Return the results of one benchmark; with `quiet` a verdict says whether others interfered."""
    machine = facts()
    if name in _COUNTS:
        busy = load()
        found = _results(name, settings)
        return msgspec.structs.replace(found, machine=machine, notes=(*found.notes, busy))
    with adopted_orphans():
        if quiet and not (waited := wait_for_quiet(_PATIENCE_SECONDS)).is_low:
            return Report(
                name=name, title=f"{name}: not measured", machine=machine, quiet=False,
                verdicts=(_quietness(waited),),
            )  # fmt: skip
        before, began = take_reading(), time.monotonic()
        found = _results(name, settings)
        seen = between(before, take_reading(), os.cpu_count() or 1)
    took = f"Measured in {time.monotonic() - began:.0f} s."
    return msgspec.structs.replace(
        found, machine=machine, quiet=seen.is_low, notes=(*found.notes, took, str(seen)),
        verdicts=(*found.verdicts, *([_quietness(seen)] if quiet else [])),
    )  # fmt: skip


def _results(name: str, settings: Settings) -> Report:
    report: Report = importlib.import_module(f".{name}", __package__).measure(settings)
    return report


def _quietness(seen: Interference) -> Criterion:
    return Criterion("others left the machine alone", seen.is_low, str(seen))


def _read(path: Path) -> list[Report]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Report])
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise PolicyError(f"--from: {path} is not a file of results: {error}") from None


def _write(reports: list[Report], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_bytes(msgspec.json.encode(reports) + b"\n")
    if options.html:
        options.html.write_text(as_page(reports))
