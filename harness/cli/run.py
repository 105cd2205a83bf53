"""`cellwright run` and `cellwright repl`: their arguments and what they do."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import (
    PYTHON,
    language_called,
    language_names,
    language_of_file,
    language_of_first_line,
    suffixes,
)
from ...policies.policy import MIB, Limits
from ...runner.capture import OnOutput
from ...runner.result import SandboxResult
from ..sandbox.config import with_memory, with_timeout
from ..sandbox.sandbox import Sandbox
from ..text.terminal import (
    EventPrinter,
    StreamPrinter,
    harmless,
    result_line,
    shown_value,
    violation_lines,
)
from .options import GUEST_FAILED, RAN, add_policy, audit_of, policy_of

if TYPE_CHECKING:
    from ...runner.audit.log import AuditLog
    from ..sandbox.workspaces.store import Workspaces
    from ..tools.broker import Broker

_OUTPUT = "cellwright-output"  # made where the command was called, once there is something to write
_LINE = 256  # bytes of a first line that names an interpreter (execve(2))


def add_run(run: argparse.ArgumentParser) -> None:
    run.set_defaults(command=_run)
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", metavar="FILE", help="the program; - for standard input")
    source.add_argument("-c", dest="code", metavar="CODE", help="the program itself")
    run.add_argument(
        "--language",
        metavar="L",
        help=f"one of {', '.join(language_names())}; default by name or #! line, else python",
    )
    _add_limits(run, "wall time")
    run.add_argument(
        "--file", dest="files", action="append", default=[], metavar="HOST[:NAME]",
        help="put a file into /workspace; may be repeated",
    )  # fmt: skip
    run.add_argument(
        "--workspace",
        metavar="NAME",
        help="a named workspace, whose files are there, and are kept after",
    )
    run.add_argument(
        "--clean", action="store_true", help="remove that workspace once the program completes"
    )
    run.add_argument(
        "--stdin",
        metavar="FILE",
        help="what the program reads; - for standard input; default nothing",
    )
    run.add_argument(
        "--collect",
        action="append",
        default=[],
        metavar="GLOB",
        help="bring these files of /workspace back; may be repeated",
    )
    run.add_argument(
        "--output", metavar="DIR",
        help=f"where to write what the program made: pictures, --collect; default {_OUTPUT}",
    )  # fmt: skip
    run.add_argument(
        "--overwrite",
        action="store_true",
        help="overwrite files there; default a number is added to the name",
    )
    form = run.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the result as one JSON object on stdout")
    form.add_argument(
        "--json-lines",
        action="store_true",
        help="output as it comes, a JSON object a line, and the result as the last",
    )
    run.add_argument("--audit", metavar="FILE", help="append what happens to this audit trail")
    run.add_argument(
        "--connect", metavar="PATH", help="use the daemon that listens there, and its policy P"
    )
    run.add_argument("--servers", metavar="FILE", help="MCP servers whose tools it may call")
    run.add_argument("--pins", metavar="FILE", help="where those tools are pinned")
    run.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show what was refused, and a result line, on success too",
    )
    add_policy(run)


def add_repl(repl: argparse.ArgumentParser) -> None:
    repl.set_defaults(command=_repl, code=None, file="", servers=None)
    repl.add_argument(
        "--language",
        metavar="L",
        default=PYTHON,
        help=f"one of {', '.join(language_names())}; default python",
    )
    _add_limits(repl, "wall time of a call")
    repl.add_argument(
        "--workspace",
        metavar="NAME",
        help="a named workspace, whose files are there, and are kept after",
    )
    repl.add_argument(
        "--output",
        metavar="DIR",
        default=_OUTPUT,
        help=f"where to write pictures; default {_OUTPUT}",
    )
    repl.add_argument("--audit", metavar="FILE", help="append what happens to this audit trail")
    repl.add_argument("--connect", metavar="PATH", help="use the daemon that listens there")
    add_policy(repl)


def _add_limits(parser: argparse.ArgumentParser, wall_time: str) -> None:
    limits, most = Limits(), "at most the policy's, which is the default"
    seconds, mib = f"{limits.wall_seconds:g}", limits.memory_bytes // MIB
    parser.add_argument(
        "--timeout", type=float, metavar="S",
        help=f"{wall_time}, seconds; {most}: {seconds} under strict",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=float, metavar="MB",
        help=f"memory cap, MiB; {most}: {mib} under strict",
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    language = _language(options)
    code = _read(options.file) if options.code is None else options.code
    printer = _printer(options)
    with _sandbox(options) as sandbox:
        result = sandbox.execute(
            code,
            language,
            stdin=_read(options.stdin) if options.stdin else None,
            files=dict(map(_file, options.files)),
            timeout=options.timeout,
            collect=options.collect,
            workspace=options.workspace,
            clean=options.clean,
            on_output=printer,
        )
    if isinstance(printer, EventPrinter):
        printer.finish()
    return _show(result, options)


def _repl(options: argparse.Namespace) -> int:
    from ..state import state_directory
    from .repl import Repl
    from .typed import lines_of_stdin

    language = check_language(options.language)
    lines = lines_of_stdin(state_directory() / "history")
    with contextlib.closing(lines), _sandbox(options) as sandbox:
        open_session = partial(sandbox.session, language=language, workspace=options.workspace)
        repl = Repl(lines, open_session, language, options.output, options.timeout)
        with contextlib.closing(repl):
            if lines.interactive:
                print(
                    f"cellwright: {language}, {sandbox.policy.name}. :help tells more",
                    file=sys.stderr,
                )
            status = repl.converse()
    return status or (GUEST_FAILED if repl.failed and not lines.interactive else RAN)


def _language(options: argparse.Namespace) -> str:
    """Return the language that --language names, or else the file's name or first line."""
    if options.language:
        return check_language(options.language)
    if options.code is not None or options.file in ("", "-"):
        return PYTHON
    found = language_of_file(options.file) or language_of_first_line(_first_line(options.file))
    if not found and "." in os.path.basename(options.file):
        known = ", ".join(suffixes())
        raise PolicyError(
            f"{options.file}: its name tells no language: {known} do", "--language names it"
        )
    return found or PYTHON


def _first_line(path: str) -> str:
    return _read(path)[:_LINE].partition(b"\n")[0].decode(errors="replace")


def check_language(name: str) -> str:
    """Return the language that is meant; raises PolicyError if there is none of that name."""
    if found := language_called(name):
        return found
    raise PolicyError(f"--language: unknown language {name!r}: {', '.join(language_names())}")


@contextlib.contextmanager
def _sandbox(options: argparse.Namespace) -> Iterator[Sandbox]:
    """Give the sandbox for one run, of our own cells or a daemon's."""
    if options.connect is not None:
        if options.memory is not None or options.optional or options.audit or options.servers:
            words = "--connect: --memory, --optional, --audit and --servers are the daemon's to say"
            raise PolicyError(words)
        with Sandbox(connect=options.connect, policy=options.policy) as sandbox:
            yield sandbox
        return
    policy = policy_of(options)
    limits = with_timeout(policy.limits, options.timeout, "--timeout")
    limits = with_memory(limits, options.memory, "--memory")
    policy = msgspec.structs.replace(policy, limits=limits)
    with (
        audit_of(options) as audit,
        _tools(options, audit) as tools,
        Sandbox(
            policy=policy,
            spawned=options.spawned,
            pool=0,
            audit=audit or False,
            tools=tools,
            language=_language(options),  # no other launcher is needed
            workspaces=_workspaces(options),
        ) as sandbox,
    ):
        yield sandbox


def _workspaces(options: argparse.Namespace) -> "Workspaces | None":
    """Return workspaces that say so where one has to be waited for, if one is named."""
    if options.workspace is None:
        return None
    from .workspace import workspaces_at

    return workspaces_at(None)


@contextlib.contextmanager
def _tools(options: argparse.Namespace, audit: "AuditLog | None") -> Iterator["Broker | None"]:
    """Give a broker for the tools of servers, if there are any; else nothing of it is imported."""
    if options.servers is None:
        yield None
        return
    from ..tools.broker import Broker
    from .servers import asking, opened

    with opened(options) as servers:
        yield Broker(servers, audit=audit, approve=asking())


def _printer(options: argparse.Namespace) -> OnOutput | None:
    if options.json_lines:
        return EventPrinter()
    return None if options.json else StreamPrinter()


def _show(result: SandboxResult, options: argparse.Namespace) -> int:
    as_json = options.json or options.json_lines
    if not as_json and result.ok and _has_only_a_value(result):
        text = shown_value(result.value, _language(options))
        print(harmless(text) if sys.stdout.isatty() else text)
        result = msgspec.structs.replace(result, value=None)
    if as_json:
        sys.stdout.write(msgspec.json.encode(result.to_dict()).decode() + "\n")
    elif options.verbose or not result.ok:
        print(*violation_lines(result), result_line(result), sep="\n", file=sys.stderr)
    elif result.violations:
        count = sum(each.count for each in result.violations)
        attempts = f"{count:,} attempts were" if count > 1 else "1 attempt was"
        print(f"cellwright: {attempts} refused; -v shows which", file=sys.stderr)
    if options.output or not as_json:  # JSON has their content
        _keep(result, options)
    return RAN if result.ok and _is_kept(result) else GUEST_FAILED


def _has_only_a_value(result: SandboxResult) -> bool:
    """Tell whether the program printed nothing, so that its value is all that there is to show."""
    return result.value is not None and not (result.stdout or result.stderr or result.truncated)


def _is_kept(result: SandboxResult) -> bool:
    """Tell whether the workspace, if one was named, was kept, and say it where it was not."""
    kept = result.workspace
    if kept is None or kept.state != "refused":
        return True
    print(f"cellwright: not saved: {harmless(kept.why)}", file=sys.stderr)
    return False


def _keep(result: SandboxResult, options: argparse.Namespace) -> None:
    for each in result.uncollected:
        what = f"{each.path}, {each.size_bytes:,} bytes" if each.path else "files"
        print(f"cellwright: not collected: {harmless(what)}: {harmless(each.why)}", file=sys.stderr)
    if not result.artifacts:
        return
    from .keepsakes import images, keep

    directory = options.output or _OUTPUT
    made = result.artifacts if options.output or options.collect else images(result.artifacts)
    for path in keep(made, directory, overwrite=options.overwrite):
        print(f"cellwright: wrote {harmless(path)}", file=sys.stderr)


def _file(argument: str) -> tuple[str, bytes]:
    host, _, name = argument.partition(":")
    return name or os.path.basename(host), _read(host)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None
