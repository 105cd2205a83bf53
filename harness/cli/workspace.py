"""`cellwright workspace`: looking at named workspaces, and changing them from the host."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...policies.errors import PolicyError
from ..sandbox.workspaces.store import Workspaces
from ..text.terminal import StreamPrinter, harmless, print_header

_DONE = 0
Command = Callable[[argparse.Namespace, Workspaces], int]


def add_workspace(workspace: argparse.ArgumentParser) -> None:
    """Add the five commands about workspaces."""
    commands = workspace.add_subparsers(required=True, metavar="WHAT")
    _add(commands, "list", "their names and sizes", _list, "--json")
    show = _add(commands, "show", "the files of one", _show, "--json")
    get = _add(commands, "get", "bring a file to the host, or print it", _get)
    put = _add(commands, "put", "put a file of the host there", _put)
    remove = _add(commands, "remove", "remove a file, or all", _remove)
    for each in (show, get, put, remove):
        each.add_argument("name", metavar="NAME", help="the workspace")
    get.add_argument("path", metavar="PATH", help="below /workspace")
    get.add_argument("--output", metavar="FILE", help="where to write it, else stdout")
    get.add_argument("--overwrite", action="store_true", help="a file that exists too")
    put.add_argument("file", metavar="HOST[:PATH]", help="the file, and where to put it")
    remove.add_argument("path", metavar="PATH", nargs="?", help="only this file")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    command: Command,
    *flags: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary)
    parser.set_defaults(command=lambda options: command(options, workspaces_at(options.directory)))
    parser.add_argument("--directory", metavar="DIR", help="where they are, else in your state")
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="one JSON array on stdout")
    return parser


def _list(options: argparse.Namespace, store: Workspaces) -> int:
    found = [(name, store.files(name)) for name in store.list()]
    rows = [
        {"name": name, "files": len(files), "size_bytes": sum(file.size_bytes for file in files)}
        for name, files in found
    ]
    if options.json:
        return _print_json(rows)
    print_header(f"{'BYTES':>12}  {'FILES':>12}  NAME")
    for row in rows:
        print(f"{row['size_bytes']:>12,}  {row['files']:>6,} files  {row['name']}")
    return _DONE


def _show(options: argparse.Namespace, store: Workspaces) -> int:
    files = store.files(options.name)
    if options.json:
        return _print_json([{"path": each.path, "size_bytes": each.size_bytes} for each in files])
    print_header(f"{'BYTES':>12}  PATH")
    for each in files:
        print(f"{each.size_bytes:>12,}  {harmless(each.path)}")
    return _DONE


def _print_json(value: object) -> int:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    return _DONE


def _get(options: argparse.Namespace, store: Workspaces) -> int:
    content = store.read(options.name, options.path)
    if options.output is None:
        StreamPrinter()("stdout", content)
        return _DONE
    try:
        with open(options.output, "wb" if options.overwrite else "xb") as file:
            file.write(content)
    except OSError as error:
        raise PolicyError(f"cannot write {options.output}: {error.strerror}") from None
    return _DONE


def _put(options: argparse.Namespace, store: Workspaces) -> int:
    host, _, path = options.file.partition(":")
    try:
        content = Path(host).read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read {host}: {error.strerror}") from None
    store.write(options.name, path or os.path.basename(host), content)
    return _DONE


def _remove(options: argparse.Namespace, store: Workspaces) -> int:
    store.remove(options.name, options.path)
    return _DONE


def workspaces_at(directory: str | None) -> Workspaces:
    """Return the workspaces of a directory, default the user's; they say so where one has to be waited
    for."""

    def tell(name: str) -> None:
        most = f"waiting up to {workspaces.wait_seconds:g} s"
        print(f"cellwright: workspace {name!r} is in use; {most}", file=sys.stderr)

    workspaces = Workspaces(directory, on_wait=tell)
    return workspaces
