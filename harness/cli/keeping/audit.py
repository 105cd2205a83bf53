"""`cellwright audit`: prints the records of an audit trail, verifies it, and writes it as a page."""

import argparse
import collections
import os
import sys
import time

import msgspec

from ....policies.errors import PolicyError
from ....runner.audit.record import TRACE_ID_LIMIT, AuditEntry, plain
from ....runner.audit.verification import (
    as_html,
    as_svg,
    as_text,
    find_trace,
    lines_of,
    parsed,
    read,
    summary_of_file,
    tree_of,
    verify,
)
from ...text.terminal_text import ProgressLine, print_header
from ..options import FAILED, SUCCEEDED, add_skills, add_subcommands, print_json

_LAST = "last"


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    tail = add_command("tail", "print the last records", _tail)
    tail.add_argument("-n", type=int, default=20, metavar="N", help="number of records; default 20")
    tail.add_argument(
        "-f", "--follow", action="store_true", help="then print new records until Ctrl-C"
    )
    check = add_command("verify", "check that no record was changed or removed", _verify)
    check.add_argument("--key-file", metavar="FILE", help="the key of the chain, if it has one")
    check.add_argument(
        "--expect",
        metavar="SEQ:HASH",
        help="what verify printed earlier; the trail must still have that record",
    )
    add_command("summary", "count the records by kind", _summary)
    trace = add_command("trace", "print the tree of events that one request caused", _trace)
    trace.add_argument(
        "id", metavar="ID",
        help="the id of a trace, an execution or a session, or its beginning; last: the last trace",
    )  # fmt: skip
    trace.add_argument("--svg", action="store_true", help="print an SVG picture")
    trace.add_argument("--html", action="store_true", help="print an HTML page")
    _add_html(add_command("html", "write a page that shows a trail or durable runs", _html))


def _add_html(html: argparse.ArgumentParser) -> None:
    html.add_argument(
        "id", nargs="?", default="", metavar="ID",
        help="show one trace, execution, session or durable run; default all",
    )  # fmt: skip
    html.add_argument(
        "-o",
        "--output",
        metavar="PAGE",
        help="write the page to this file; default standard output",
    )
    html.add_argument("--runs", metavar="FILE", help="also show the durable runs of this file")
    html.add_argument("--registry", metavar="FILE", help="also show the tools of this registry")
    html.add_argument(
        "--memory", metavar="FILE",
        help="the memory of an agent: with --registry, also show tools made against tasks done",
    )  # fmt: skip
    html.add_argument("--key-file", metavar="FILE", help="the key of the chain, if it has one")
    add_skills(html, "also show")


def run(options: argparse.Namespace) -> int:
    try:
        if options.action not in (_verify, _html):
            _require_record(options.path)
        return int(options.action(options))
    except OSError as error:
        raise PolicyError(f"cannot read {error.filename}: {error.strerror}") from None


def _require_record(path: str) -> None:
    """Raise PolicyError for a file that is not empty and has no record: it is no trail."""
    if os.path.isfile(path) and os.path.getsize(path) and next(read(path), None) is None:
        raise PolicyError(f"{path}: no line is a record of an audit trail")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="FILE", help="the file of the trail; of html also a file of durable runs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _tail(options: argparse.Namespace) -> int:
    if not options.json:
        print_header(f"{'SEQ':>5} {'TIME':19} {'LEVEL':8} RECORD")
    last = collections.deque(read(options.path), maxlen=max(options.n, 0))
    for entry in last:
        _print(entry, as_json=options.json)
    if options.follow:
        sys.stdout.flush()
        _follow(options, after=last[-1].seq if last else 0)
    return SUCCEEDED


def _follow(options: argparse.Namespace, after: int) -> None:
    """Print new records until Ctrl-C; tail(1) waits for them and follows the name after a rotation."""
    import subprocess  # only for --follow

    command = ["tail", "-n", "+1", "-F", "--", options.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        try:
            assert tail.stdout is not None  # noqa: S101 - it is a pipe
            for entry in parsed(lines_of(tail.stdout)):
                if entry.seq > after:
                    _print(entry, as_json=options.json)
                    sys.stdout.flush()
        finally:
            tail.kill()


def _print(entry: AuditEntry, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
        return
    refused = "" if entry.allowed else "REFUSED "
    details = " ".join(f"{name}={value}" for name, value in entry.details.items())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    event = f"{entry.seq:>5} {when} {entry.level.name:8} {entry.category}.{entry.action}"
    trace = f" trace={entry.trace_id}" if entry.trace_id else ""
    print(
        plain(f"{event} {refused}{entry.target} {details}{trace}", 4096)
    )  # the file may be forged


def _verify(options: argparse.Namespace) -> int:
    key = _key(options.key_file)
    with ProgressLine("verifying the trail"):
        verdict = verify(options.path, key, _head(options.expect))
    if options.json:
        print_json({**verdict._asdict(), "ok": verdict.ok})
    elif verdict.ok:
        print(f"intact: {verdict.records} records, head {verdict.head[0]}:{verdict.head[1]}")
        if verdict.first > 1:
            print(f"it begins with record {verdict.first}: earlier records are not in this file")
    else:
        print(f"BROKEN after {verdict.records} records: {verdict.broken}")
    return SUCCEEDED if verdict.ok else FAILED


def _key(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read().removesuffix(b"\n")


def _head(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    number, _, hashed = text.partition(":")
    if not number.isdigit() or len(hashed) != 64:
        raise PolicyError(f"--expect: must be SEQ:HASH as verify prints it, got {text!r}")
    return int(number), hashed


def _summary(options: argparse.Namespace) -> int:
    summary = summary_of_file(options.path)
    if options.json:
        print_json(summary)
        return SUCCEEDED
    for name, value in summary.items():
        print(f"{name:14} {_counts(value)}")
    return SUCCEEDED


def _counts(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


def _trace(options: argparse.Namespace) -> int:
    name = "" if options.id == _LAST else plain(options.id, TRACE_ID_LIMIT)
    try:
        trace_id = find_trace(read(options.path), name)
    except ValueError as error:
        raise PolicyError(f"{options.path}: {error}", "give more characters of the id") from None
    roots = tree_of(read(options.path), trace_id) if trace_id else []
    if not roots:
        wanted = f"a trace, execution or session {options.id!r}" if name else "any trace"
        hint = f'"cellwright audit tail {options.path}" lists records with their traces'
        raise PolicyError(f"no record of {wanted} in {options.path}", hint)
    if options.html:
        print(as_html(roots, trace_id))
    else:
        print(as_svg(roots) if options.svg else as_text(roots))
    return SUCCEEDED


def _html(options: argparse.Namespace) -> int:
    from ...dashboard.dashboard_page import encoded, static_page
    from .dashboard import overview_of

    overview = overview_of(options, _key(options.key_file))
    page = encoded(overview) + b"\n" if options.json else static_page(overview)
    if options.output is None:
        sys.stdout.buffer.write(page)
    else:
        _write(options.output, page)
    return SUCCEEDED


def _write(path: str, page: bytes) -> None:
    """Write the page with mode 0600, because it shows the activity of programs and tools."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(page)
