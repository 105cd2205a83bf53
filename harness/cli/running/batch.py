"""`cellwright batch`: runs or judges the programs of a file, and goes on where it was stopped."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....policies.languages.table import language_table
from ....policies.policy import MIB
from ....runner.settings import PoolSettings
from ...batch.reports import junit_of, page_of, summary_lines
from ...batch.result_file import ResultFile
from ...batch.rows import BatchRow, rows_of, with_completions
from ...batch.running_rows import BatchProgress, run_batch
from ...sandbox.checks import check_language
from ...sandbox.judging.verdicts import JudgeLimits
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings
from ...text.terminal_text import ProgressLine
from ..options import (
    AUDIT_HELP,
    FAILED,
    SUCCEEDED,
    add_backend,
    add_image,
    add_policy,
    add_workers,
    audit_of,
    backend_of,
    image_of,
    mebibytes,
    policy_of,
    seconds,
)
from ..package_options import add_packages, packages_of, with_environment
from .sandbox_options import add_language

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog


def add(parser: argparse.ArgumentParser) -> None:
    limits = JudgeLimits()
    parser.add_argument(
        "programs", metavar="FILE",
        help="a JSON object a line: `code` and options of execute, or `cases`; rows of HumanEval and "
        "MBPP are known; may be compressed by gzip",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE", required=True,
        help="a JSON line for each result; a batch that was stopped goes on with the other rows",
    )  # fmt: skip
    parser.add_argument(
        "--completions", metavar="FILE",
        help="rows with `task_id` and `completion`, each a sample for that row of FILE; default "
        "none: rows have their own",
    )  # fmt: skip
    parser.add_argument(
        "--at-once", type=int, metavar="N",
        help="programs that run at once; default one a processor, and two",
    )  # fmt: skip
    parser.add_argument(
        "--pass-at", type=int, action="append", default=[], metavar="K",
        help="print pass@K; may be repeated; default 1",
    )  # fmt: skip
    parser.add_argument(
        "--time", type=seconds, default=limits.time_seconds, metavar="S",
        help=f"CPU time of each case in seconds; default {limits.time_seconds:g}",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=mebibytes, default=limits.memory_bytes / MIB, metavar="MB",
        help=f"memory of each case in MiB, or such as 2G; default {limits.memory_bytes // MIB}",
    )  # fmt: skip
    parser.add_argument(
        "--junit", metavar="FILE", help="write a report in the XML of JUnit; default none"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with every row; default none")
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_language(parser, "python, unless a row names its own", with_table=True)
    add_packages(parser)
    add_workers(parser)
    add_backend(parser)
    add_image(parser)
    add_policy(parser)


def run(options: argparse.Namespace) -> int:
    language = check_language(
        options.language or "python", "--language", table=language_table(options.languages)
    )
    limits = JudgeLimits(time_seconds=options.time, memory_bytes=round(options.memory * MIB))
    ks = tuple(options.pass_at) or (1,)
    if min(ks) < 1:
        raise PolicyError("--pass-at: must be at least 1")
    with ResultFile(options.output) as results, ProgressLine("reading the programs") as line:
        total = sum(1 for _ in _rows(options))  # read twice, so that any number fits
        line.say("starting cells")
        with audit_of(options) as audit, _sandbox(options, audit) as sandbox:
            told = _Reported(line)
            run_batch(
                sandbox, _rows(options), results, total, language=language, limits=limits,
                at_once=options.at_once, on_progress=told,
            )  # fmt: skip
        done = results.in_order()
    print("\n".join(summary_lines(done, ks)))
    name = os.path.basename(options.programs)
    _write(options.junit, junit_of(done, name))
    _write(options.html, page_of(done, name, ks))
    return SUCCEEDED if all(each.passed for each in done) else FAILED


class _Reported:
    """Shows progress on a terminal, and elsewhere a line each tenth of all."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line
        self._tenth = 0

    def __call__(self, progress: BatchProgress) -> None:
        self._line.say(str(progress))
        tenth = progress.done * 10 // max(progress.total, 1)
        if tenth != self._tenth and not sys.stderr.isatty():
            self._tenth = tenth
            print(progress, file=sys.stderr, flush=True)


def _sandbox(options: argparse.Namespace, audit: "AuditLog | None") -> Sandbox:
    policy = with_environment(policy_of(options), options)
    running = max(PoolSettings().running, 2 * (options.at_once or 1))
    packages, store = packages_of(options)
    return Sandbox(
        policy=policy, pool=PoolSettings(running=running), audit=audit or False, packages=packages,
        workers=options.workers,
        host=HostSettings(
            python=options.python, package_store=store, languages=options.languages,
            **backend_of(options),
        ),
        **image_of(options),
    )  # fmt: skip


def _rows(options: argparse.Namespace) -> Iterator[BatchRow]:
    if options.completions is None:
        return rows_of(options.programs)
    return with_completions(options.programs, options.completions)


def _write(path: str | None, lines: Iterable[str]) -> None:
    if path is None:
        return
    try:
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise PolicyError(f"cannot write {path}: {error.strerror}") from None
