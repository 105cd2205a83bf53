"""`cellwright audit`: looking at a trail and checking it."""

import argparse
import collections
import sys
import time
from collections.abc import Callable

import msgspec

from ...policies.errors import PolicyError
from ...runner.audit.log import summary_of_file
from ...runner.audit.record import TRACE_ID_LIMIT, AuditEntry, plain
from ...runner.audit.trace import as_html, as_svg, as_text, find_trace, tree_of
from ...runner.audit.verification import lines_of, parsed, read, verify
from ..text.terminal import print_header

_INTACT, _BROKEN = 0, 1
_LAST = "last"
Command = Callable[[argparse.Namespace], int]


def add_audit(audit: argparse.ArgumentParser) -> None:
    """Add the four commands about a trail."""
    commands = audit.add_subparsers(required=True, metavar="WHAT")
    tail = _add(commands, "tail", "the last records", _tail)
    tail.add_argument("-n", type=int, default=20, metavar="N", help="how many; default 20")
    tail.add_argument("-f", "--follow", action="store_true", help="and those to come, until Ctrl-C")
    check = _add(commands, "verify", "check that nothing was changed or taken out", _verify)
    check.add_argument("--key-file", metavar="FILE", help="the key of the chain, if it has one")
    check.add_argument("--expect", metavar="SEQ:HASH", help="a head that was seen before")
    _add(commands, "summary", "how many records there are, by kind", _summary)
    trace = _add(commands, "trace", "the tree of one request: what caused what", _trace)
    trace.add_argument(
        "id", metavar="ID",
        help="the id of a trace, an execution or a session, or how it begins; last: the last trace",
    )  # fmt: skip
    trace.add_argument("--svg", action="store_true", help="as a picture")
    trace.add_argument("--html", action="store_true", help="as a page")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    command: Command,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary)
    parser.set_defaults(command=_readable(command))
    parser.add_argument("path", metavar="FILE", help="the trail")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    return parser


def _readable(command: Command) -> Command:
    def guarded(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except OSError as error:
            raise PolicyError(f"cannot read {error.filename}: {error.strerror}") from None

    return guarded


def _tail(options: argparse.Namespace) -> int:
    if not options.json:
        print_header(f"{'SEQ':>5} {'TIME':19} {'LEVEL':8} RECORD")
    last = collections.deque(read(options.path), maxlen=max(options.n, 0))
    for entry in last:
        _print(entry, as_json=options.json)
    if options.follow:
        sys.stdout.flush()
        _follow(options, after=last[-1].seq if last else 0)
    return _INTACT


def _follow(options: argparse.Namespace, after: int) -> None:
    """Print what is appended, until Ctrl-C: tail(1) waits for it, and knows a file put aside."""
    import subprocess  # seldom wanted

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
    what = f"{entry.seq:>5} {when} {entry.level.name:8} {entry.category}.{entry.action}"
    trace = f" trace={entry.trace_id}" if entry.trace_id else ""
    print(plain(f"{what} {refused}{entry.target} {details}{trace}", 4096))  # the file may be forged


def _verify(options: argparse.Namespace) -> int:
    key = _key(options.key_file)
    verdict = verify(options.path, key, _head(options.expect))
    if options.json:
        sys.stdout.write(
            msgspec.json.encode({**verdict._asdict(), "ok": verdict.ok}).decode() + "\n"
        )
    elif verdict.ok:
        print(f"intact: {verdict.records} records, head {verdict.head[0]}:{verdict.head[1]}")
        if verdict.first > 1:
            print(f"it begins with record {verdict.first}: what was before is not here")
    else:
        print(f"BROKEN after {verdict.records} records: {verdict.broken}")
    return _INTACT if verdict.ok else _BROKEN


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
        raise PolicyError(f"--expect: {text!r} is not SEQ:HASH, as verify prints it")
    return int(number), hashed


def _summary(options: argparse.Namespace) -> int:
    summary = summary_of_file(options.path)
    if options.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        return _INTACT
    for name, value in summary.items():
        print(f"{name:14} {_counts(value)}")
    return _INTACT


def _counts(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


def _trace(options: argparse.Namespace) -> int:
    name = "" if options.id == _LAST else plain(options.id, TRACE_ID_LIMIT)
    try:
        trace_id = find_trace(read(options.path), name)
    except ValueError as error:
        raise PolicyError(f"{options.path}: {error}", "give more of it") from None
    roots = tree_of(read(options.path), trace_id) if trace_id else []
    if not roots:
        what = f"trace, execution or session {options.id!r}" if name else "trace"
        hint = f'"cellwright audit tail {options.path}" shows which there are'
        raise PolicyError(f"no record of a {what} in {options.path}", hint)
    if options.html:
        print(as_html(roots, trace_id))
    else:
        print(as_svg(roots) if options.svg else as_text(roots))
    return _INTACT
