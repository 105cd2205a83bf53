"""`cellwright workspace`: lists named workspaces, and reads and changes their files from the host."""

import argparse
import os
import sys
from pathlib import Path

from ...policies.errors import PolicyError
from ..sandbox.workspaces.store import Workspaces
from ..text.terminal import StreamPrinter, harmless, print_header
from .options import SUCCEEDED, add_json, add_subcommands, print_json


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    listed = add_command("list", "list the workspaces with their sizes", _list)
    show = add_command("show", "list the files of a workspace", _show)
    get = add_command("get", "print a file of a workspace, or copy it to the host", _get)
    put = add_command("put", "copy a file of the host to a workspace", _put)
    remove = add_command("remove", "remove a workspace, or one of its files", _remove)
    for each in (listed, show):
        add_json(each)
    for each in (show, get, put, remove):
        each.add_argument("name", metavar="NAME", help="the workspace")
    get.add_argument("path", metavar="PATH", help="the file, relative to /workspace")
    get.add_argument("--output", metavar="FILE", help="the file to write; default standard output")
    get.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    put.add_argument(
        "file", metavar="HOST[:PATH]", help="the file, and its new path; default its own name"
    )
    remove.add_argument(
        "path", metavar="PATH", nargs="?", help="the file; default the whole workspace"
    )


def run(options: argparse.Namespace) -> int:
    directory = options.directory
    is_made = options.action is _put and directory and not os.path.exists(directory)
    if directory is not None and not os.path.isdir(directory) and not is_made:
        raise PolicyError(f"--directory: not a directory: {directory}")
    store = workspaces_at(directory)
    if options.action in (_show, _get, _remove) and options.name not in store.list():
        hint = "`cellwright workspace list` lists the workspaces"
        raise PolicyError(f"workspace {options.name!r} not found", hint)
    return int(options.action(options, store))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="the directory of workspaces; default in the user's state",
    )


def _list(options: argparse.Namespace, store: Workspaces) -> int:
    found = [(name, store.files(name)) for name in store.list()]
    rows = [
        {"name": name, "files": len(files), "size_bytes": sum(file.size_bytes for file in files)}
        for name, files in found
    ]
    if options.json:
        print_json(rows)
        return SUCCEEDED
    if not rows:
        print("cellwright: no workspaces", file=sys.stderr)
    print_header(f"{'BYTES':>12}  {'FILES':>12}  NAME")
    for row in rows:
        print(f"{row['size_bytes']:>12,}  {row['files']:>6,} files  {row['name']}")
    return SUCCEEDED


def _show(options: argparse.Namespace, store: Workspaces) -> int:
    files = store.files(options.name)
    if options.json:
        print_json([{"path": each.path, "size_bytes": each.size_bytes} for each in files])
        return SUCCEEDED
    print_header(f"{'BYTES':>12}  PATH")
    for each in files:
        print(f"{each.size_bytes:>12,}  {harmless(each.path)}")
    return SUCCEEDED


def _get(options: argparse.Namespace, store: Workspaces) -> int:
    content = store.read(options.name, options.path)
    if options.output is None:
        StreamPrinter()("stdout", content)
        return SUCCEEDED
    try:
        with open(options.output, "wb" if options.overwrite else "xb") as file:
            file.write(content)
    except OSError as error:
        raise PolicyError(f"cannot write {options.output}: {error.strerror}") from None
    return SUCCEEDED


def _put(options: argparse.Namespace, store: Workspaces) -> int:
    host, _, path = options.file.partition(":")
    try:
        content = Path(host).read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read {host}: {error.strerror}") from None
    store.write(options.name, path or os.path.basename(host), content)
    return SUCCEEDED


def _remove(options: argparse.Namespace, store: Workspaces) -> int:
    store.remove(options.name, options.path)
    return SUCCEEDED


def workspaces_at(directory: str | None) -> Workspaces:
    """Return the store in `directory`, default the user's; before it waits for a lock it
    prints a notice."""

    def notify(name: str) -> None:
        limit = f"{workspaces.wait_seconds:g} s"
        print(f"cellwright: workspace {name!r} is in use; waiting up to {limit}", file=sys.stderr)

    workspaces = Workspaces(directory, on_wait=notify)
    return workspaces
