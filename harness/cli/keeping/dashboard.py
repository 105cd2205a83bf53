"""The overview of files for `cellwright audit html`."""

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from ....policies.errors import PolicyError
from ....runner.audit.record import AuditEntry
from ....runner.audit.verification import find_trace, read, verify
from ...dashboard import overview as overview_sources
from ...dashboard.dashboard_page import Timeline
from ...dashboard.overview import Chain, Overview
from ...runs.durable_runs import Runs
from ...tools.registry import ToolRegistry
from ..options import skills_of

_SQLITE = b"SQLite format 3\0"  # sqlite.org/fileformat.html


def overview_of(options: argparse.Namespace, key: bytes | None) -> Overview:
    """Return the overview of the files; raises PolicyError if a file is no trail and has no runs."""
    path, only = options.path, options.id
    has_runs = _has_runs(path)
    overview = Overview(
        source="runs" if has_runs else "trail", name=Path(path).name, made=time.time()
    )
    if has_runs and options.runs:
        raise PolicyError("--runs: FILE has runs already; name the trail as FILE")
    runs_file = path if has_runs else options.runs
    if runs_file:
        _add_runs(overview, runs_file, only if has_runs else "")
    if not has_runs:
        _add_trail(overview, path, only, key)
    _add_library(overview, options)
    return overview


def _has_runs(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _add_runs(overview: Overview, path: str, only: str) -> None:
    overview.runs_file = Path(path).name
    with Runs(path, must_exist=True) as runs:
        overview_sources.add_runs(overview, runs, only)


def _add_trail(overview: Overview, path: str, only: str, key: bytes | None) -> None:
    verdict = verify(path, key)
    overview.chain = Chain(
        state="intact" if verdict.ok else "broken", records=verdict.records, first=verdict.first,
        head_seq=verdict.head[0], head_hash=verdict.head[1], broken=verdict.broken,
        has_key=key is not None,
    )  # fmt: skip
    Timeline().add_all(_chosen(path, only)).fill(overview)
    if not overview.counts and Path(path).stat().st_size:
        raise PolicyError(f"{path}: no line is a record of an audit trail")


def _chosen(path: str, only: str) -> Iterator[AuditEntry]:
    """Return the records of a trail; with `only`, those of one trace or session."""
    if not only:
        return read(path)
    try:
        trace_id = find_trace(read(path), only)
    except ValueError as error:
        raise PolicyError(f"{path}: {error}", "give more characters of the id") from None
    chosen = (
        entry for entry in read(path)
        if entry.details.get("session_id") == only or (trace_id and entry.trace_id == trace_id)
    )  # fmt: skip
    first = next(chosen, None)
    if first is None:
        hint = f'"cellwright audit tail {path}" lists records with their traces'
        raise PolicyError(f"no record of a trace, execution or session {only!r} in {path}", hint)
    return itertools.chain([first], chosen)


def _add_library(overview: Overview, options: argparse.Namespace) -> None:
    """Add the tools and skills that the options name."""
    if options.memory and not options.registry:
        raise PolicyError("--memory needs --registry, which has the tools that the agent made")
    if options.registry:
        with ToolRegistry(options.registry, must_exist=True) as registry:
            overview_sources.add_tools(overview, registry)
            if options.memory:
                _add_curve(overview, registry, options.memory)
    if skills := skills_of(options):
        overview_sources.add_skills(overview, skills)


def _add_curve(overview: Overview, registry: ToolRegistry, path: str) -> None:
    from ...agent.agent_memory import AgentMemory

    if not Path(path).is_file():
        raise PolicyError(f"--memory: {path} does not exist")
    with contextlib.closing(AgentMemory(path)) as memory:
        overview_sources.add_curve(overview, [(registry, memory)])
