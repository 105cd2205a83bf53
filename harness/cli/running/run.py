"""`cellwright run`: runs one program in a fresh cell, and shows its output and its result."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ....policies.errors import InternalError, PolicyError
from ....policies.languages import PYTHON, language_of_file, language_of_script
from ....runner.requests.request import OnOutput
from ....runner.requests.result import SandboxResult
from ...sandbox.checks import check_language
from ...text.output_streams import EventPrinter, StreamPrinter, shown_value
from ..options import FAILED, SUCCEEDED, add_privacy, print_json, seconds
from ..package_options import packages_of_calls
from ..parsing import Parser
from .sandbox_options import (
    OUTPUT,
    add_language,
    add_sandbox,
    print_staged,
    sandbox_of,
)

if TYPE_CHECKING:
    from pathlib import Path


_NAMED = 3  # lost files named one by one


def add(parser: Parser) -> None:
    parser.takes_arguments = True
    parser.usage = "%(prog)s [OPTION]... (FILE | -c CODE) [-- ARGUMENT...]"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "file", nargs="?", metavar="FILE", help="the program; - reads standard input"
    )
    source.add_argument("-c", dest="code", metavar="CODE", help="the source of the program")
    add_language(parser, "by the file's name or #! line, else python", with_table=True)
    parser.add_argument(
        "--file", dest="files", action="append", default=[], metavar="HOST[:NAME]",
        help="copy this file or folder of the host to /workspace; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--input", dest="inputs", action="append", default=[], metavar="NAME=JSON",
        help="a variable of the program; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", dest="inputs_file", metavar="FILE",
        help="variables of the program: a file with a JSON object; - reads standard input",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="an environment variable of the program; without =VALUE with the value that it has "
        "here; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--clean", action="store_true", help="remove the workspace once the program completes"
    )
    parser.add_argument(
        "--stdin", metavar="FILE",
        help="standard input of the program; - passes that of this command on; default empty",
    )  # fmt: skip
    parser.add_argument(
        "--collect", action="append", default=[], metavar="GLOB",
        help="copy matching files of /workspace to --output; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="DIR",
        help=f"the directory for pictures and collected files; default {OUTPUT}",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true",
        help="replace existing files in --output; default is to add a number to the new name",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the result as one JSON object")
    form.add_argument(
        "--json-lines", action="store_true",
        help="print output as it comes, one JSON object a line, and the result last",
    )  # fmt: skip
    parser.add_argument(
        "--servers", metavar="FILE", help="MCP servers whose tools the program may call"
    )
    parser.add_argument(
        "--pins", metavar="FILE", help="the pins of those tools; default in the user's state"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true",
        help="print refused attempts and a line about the result even after success, and connections",
    )  # fmt: skip
    parser.add_argument(
        "--compile-timeout", type=seconds, metavar="S",
        help="seconds for the compiler of a compiled language; default those of the language",
    )  # fmt: skip
    add_privacy(parser)
    add_sandbox(parser, "wall-clock limit")


def run(options: argparse.Namespace) -> int:
    _refuse_second_reader(options)
    source = _read(options.file) if options.code is None else options.code
    language = _language(options, source)
    printer = _printer(options)
    with sandbox_of(options, language, is_for_one_cell=True) as sandbox:
        result = sandbox.execute(
            source,
            language,
            stdin=_read(options.stdin) if options.stdin else None,
            inputs=_inputs(options),
            files=dict(map(_file, options.files)),
            arguments=options.arguments,
            filename=_filename(options.file),
            env=dict(map(_variable, options.env)),
            timeout=options.timeout,
            compile_timeout=options.compile_timeout,
            collect=options.collect,
            workspace=options.workspace,
            clean=options.clean,
            packages=packages_of_calls(options),
            on_output=printer,
        )
    if isinstance(printer, EventPrinter):
        printer.finish()
    return _show(result.for_model(), options, language)


def show_reply(arguments: Sequence[str], frame: bytes) -> int:
    """Show the reply to a program that a quick client (daemon_run.py) sent to a daemon; return the exit
    status.  Raises what `execute` does."""
    from ...sandbox.remote.call_frames import error_of, result_of
    from ...sandbox.remote.connections import reply_of
    from ...sandbox.remote.frames import Executed, Failure
    from ..commands import parser_of

    options = parser_of("run").parse_args(["run", *arguments])
    reply = reply_of(frame, f"the daemon at {options.connect}")
    if isinstance(reply, Failure):
        raise error_of(reply)
    if not isinstance(reply, Executed):
        raise InternalError(f"the daemon answered with {type(reply).__name__}")
    return _show(result_of(reply), options, options.language or PYTHON)


def _language(options: argparse.Namespace, source: bytes | str) -> str:
    """Return the language by --language, else by the file's name or by the first line of `source`."""
    if options.language:
        from ....policies.languages.table import language_table  # seldom needed

        table = language_table(options.languages)
        return check_language(options.language, "--language", table=table)
    if isinstance(source, str) or options.file == "-":
        return PYTHON
    found = language_of_file(options.file) or language_of_script(source) or _of_table(options)
    if not found and "." in os.path.basename(options.file):
        raise PolicyError(
            f"{options.file}: no language has the suffix of its name",
            "name the language with --language",
        )
    return found or PYTHON


def _of_table(options: argparse.Namespace) -> str | None:
    if "." not in os.path.basename(options.file):
        return None
    from ....policies.languages.table import language_table  # seldom needed

    entry = language_table(options.languages).of_file(options.file)
    return entry.name if entry else None


def _filename(file: str | None) -> str | None:
    """Return the name of the program in its cell; None if it is no file."""
    return os.path.basename(file) if file and os.path.isfile(file) else None


def _printer(options: argparse.Namespace) -> OnOutput | None:
    if options.json_lines:
        return EventPrinter()
    return None if options.json else StreamPrinter()


def _show(result: SandboxResult, options: argparse.Namespace, language: str) -> int:
    as_json = options.json or options.json_lines
    if not as_json and result.notices:
        from ...text.terminal_text import notice_lines  # this and the others: most runs need none

        print(*notice_lines(result), sep="\n", file=sys.stderr)
    if not as_json and result.ok and _has_only_a_value(result):
        text = shown_value(result.value, language)
        if sys.stdout.isatty():
            from ...text.terminal_text import harmless

            text = harmless(text)
        print(text)
        result = msgspec.structs.replace(result, value=None)
    if as_json:
        print_json(result.to_dict())
    elif options.verbose or not result.ok:
        from ...text.terminal_text import connection_lines, result_line, violation_lines

        connections = connection_lines(result) if options.verbose else ()
        lines = (*connections, *violation_lines(result), result_line(result))
        print(*lines, *_hint_lines(result, options), sep="\n", file=sys.stderr)
    else:
        _say_what_is_missing(result)
    if options.output or not as_json:  # JSON has the content of the artifacts
        _write_artifacts(result, options)
    if result.ok and not (as_json or options.workspace):
        _name_lost_files(result)
    is_complete = not options.collect or (result.artifacts and not result.uncollected)
    is_saved = _is_workspace_saved(result)
    return SUCCEEDED if result.ok and is_saved and is_complete else FAILED


def _hint_lines(result: SandboxResult, options: argparse.Namespace) -> list[str]:
    """Return the hints of a result, one a line; a module beside FILE is a file to pass, and never the
    name of a stranger's package."""
    from ....policies.advice.hints import missed_module, missing_module
    from ...text.terminal_text import harmless, hint_lines

    lines, missed = hint_lines(result), missed_module(result.error or "")
    beside = os.path.join(os.path.dirname(options.file or "") or ".", missed.partition(".")[0])
    places = [each for each in (f"{beside}.py", beside) if missed and os.path.exists(each)]
    if not (options.file and places):
        return lines
    import shlex  # seldom needed

    about = f"hint: {harmless(missing_module(missed))}"
    pass_it = f"--file {harmless(shlex.quote(os.path.normpath(places[0])))}"
    return [
        f"hint: {harmless(missed)} lies beside {harmless(options.file)}: pass it with {pass_it}"
        if each == about else each
        for each in lines
    ]  # fmt: skip


def _name_lost_files(result: SandboxResult) -> None:
    """Name the files that are gone with the cell, since no --collect matches them."""
    told = {each.name for each in result.artifacts} | {each.path for each in result.uncollected}
    lost = [
        each for each in result.files
        if each.path not in told and not any(map(_is_by_the_way, each.path.split("/")))
    ]  # fmt: skip
    if not lost:
        return
    from ...text.terminal_text import harmless, harmless_line

    shown = [f"{harmless_line(each.path)} ({each.size_bytes:,} bytes)" for each in lost[:_NAMED]]
    more = f" and {len(lost) - _NAMED:,} more" if len(lost) > _NAMED else ""
    import shlex  # seldom needed

    pattern = harmless(shlex.quote(lost[0].path)) if len(lost) == 1 else "GLOB"
    print(
        f"cellwright: not kept: {', '.join(shown)}{more}; --collect {pattern} copies files to --output",
        file=sys.stderr,
    )


def _is_by_the_way(part: str) -> bool:
    """Tell whether a part of a path is one that programs leave without being asked to."""
    return part.startswith(".") or part == "__pycache__"


def _say_what_is_missing(result: SandboxResult) -> None:
    if result.truncated:
        from ...text.terminal_text import dropped

        for each in dropped(result):
            print(f"cellwright: {each}", file=sys.stderr)
    if result.violations:
        count = sum(each.count for each in result.violations)
        attempts = f"{count:,} attempts were" if count > 1 else "1 attempt was"
        print(f"cellwright: {attempts} refused; use -v to list", file=sys.stderr)


def _has_only_a_value(result: SandboxResult) -> bool:
    """Tell whether the program printed nothing, so that only its value can be shown."""
    return result.value is not None and not (result.stdout or result.stderr)


def _is_workspace_saved(result: SandboxResult) -> bool:
    """Tell whether the named workspace, if any, was saved; print why it was not."""
    workspace = result.workspace
    print_staged(workspace)
    if workspace is None or workspace.state != "refused":
        return True
    from ...text.terminal_text import harmless

    print(f"cellwright: workspace not saved: {harmless(workspace.why)}", file=sys.stderr)
    return False


def _write_artifacts(result: SandboxResult, options: argparse.Namespace) -> None:
    if not (result.artifacts or result.uncollected or options.collect):
        return
    from ...text.terminal_text import harmless, harmless_line

    for each in result.uncollected:
        name = f"{each.path}, {each.size_bytes:,} bytes" if each.path else "files"
        print(
            f"cellwright: not collected: {harmless_line(name)}: {harmless(each.why)}",
            file=sys.stderr,
        )
    if not result.artifacts:
        if options.collect and not result.uncollected:
            patterns = " ".join(options.collect)
            print(
                f"cellwright: not collected: no new or changed file matches {harmless(patterns)}",
                file=sys.stderr,
            )
        return
    from .artifacts import without_text_forms, write_artifacts

    wants_all = options.output or options.collect
    artifacts = result.artifacts if wants_all else without_text_forms(result.artifacts)
    for path in write_artifacts(artifacts, options.output or OUTPUT, overwrite=options.overwrite):
        print(f"cellwright: wrote {harmless(path)}", file=sys.stderr)


def _refuse_second_reader(options: argparse.Namespace) -> None:
    """Raise PolicyError if two options read the standard input, which can be read once."""
    given = {"FILE": options.file, "--stdin": options.stdin, "--inputs": options.inputs_file}
    readers = [name for name, value in given.items() if value == "-"]
    if len(readers) > 1:
        raise PolicyError(f"{' and '.join(readers)}: only one of them can be -")


def _inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the variables of --inputs and --input; the latter win."""
    found: dict[str, Any] = {}
    if options.inputs_file is not None:
        value = _json("--inputs", _read(options.inputs_file), "the file must have a JSON object")
        if not isinstance(value, dict):
            raise PolicyError(f"--inputs: must be a JSON object, got {type(value).__name__}")
        found = value
    for argument in options.inputs:
        name, equals, value = argument.partition("=")
        if not equals:
            raise PolicyError(f"--input: must be NAME=JSON, got {argument!r}")
        found[name] = _json(f"--input {name}", value, f"quote text: --input '{name}=\"...\"'")
    return found


def _variable(argument: str) -> tuple[str, str]:
    """Return name and value of a variable of --env."""
    name, equals, value = argument.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise PolicyError(f"--env: {name} is not set here", f"give its value: --env {name}=VALUE")
    return name, os.environ[name]


def _json(where: str, text: str | bytes, hint: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{where}: not JSON: {error}", hint) from None


def _file(argument: str) -> "tuple[str, bytes | Path]":
    host, _, name = argument.partition(":")
    name = name or os.path.basename(host.rstrip("/"))
    if not (os.path.isdir(host) or os.path.isfile(host)):
        return name, _read(host)  # standard input, a pipe
    from pathlib import Path  # seldom needed

    return name, Path(host)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None
