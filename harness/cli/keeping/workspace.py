"""`cellwright workspace`: lists named workspaces, reads and changes their files from the host, and
decides on changes that wait for review."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from ....policies.argument_checks import did_you_mean
from ....policies.errors import PolicyError
from ...sandbox.workspaces.workspace_files import FileChange, FileVersion, WorkspaceDiff
from ...sandbox.workspaces.workspace_store import Workspaces
from ...text.output_streams import StreamPrinter
from ...text.terminal_text import harmless_line, print_header
from ..options import AUDIT_HELP, SUCCEEDED, add_json, add_subcommands, audit_of, print_json

_DAY = 24 * 60 * 60
_DIGITS = 12  # shown digits of a digest
_PENDING = "change pending"


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    listed = add_command("list", "list the workspaces with their sizes", _list)
    show = add_command("show", "list the files of a workspace", _show)
    get = add_command("get", "print a file of a workspace, or copy it to the host", _get)
    put = add_command("put", "copy a file of the host to a workspace", _put)
    remove = add_command("remove", "remove a workspace, or one of its files", _remove)
    diff = add_command("diff", "show the change that waits for review", _diff)
    commit = add_command("commit", "make that change the files of the workspace", _commit)
    discard = add_command("discard", "drop that change", _discard)
    prune = add_command("prune", "remove workspaces that were not used for long", _prune)
    for each in (listed, show, diff, commit, discard, prune):
        add_json(each)
    for each in (show, get, put, remove, diff, commit, discard):
        each.add_argument("name", metavar="NAME", help="the workspace")
    for each in (show, get):
        each.add_argument(
            "--pending", action="store_true", help="with the change that waits for review"
        )
    for each in (commit, discard):
        each.add_argument(
            "--change", metavar="ID", help="fail if another change is pending by now; see diff"
        )
        each.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    prune.add_argument(
        "--days", type=float, metavar="N", required=True,
        help="remove what was not used for N days",
    )  # fmt: skip
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
    store = workspaces_at(directory, review=getattr(options, "pending", False))
    if (
        getattr(options, "name", None)
        and options.action is not _put
        and options.name not in store.list()
    ):
        listed = "`cellwright workspace list` lists the workspaces"
        hint = did_you_mean(options.name, store.list(), listed)
        raise PolicyError(f"workspace {options.name!r} not found", hint)
    return int(options.action(options, store))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="the directory of workspaces; default in the user's state",
    )


def _list(options: argparse.Namespace, store: Workspaces) -> int:
    rows = [_row(store, name) for name in store.list()]
    if options.json:
        print_json(rows)
        return SUCCEEDED
    if not rows:
        print("cellwright: no workspaces", file=sys.stderr)
    print_header(f"{'BYTES':>12}  {'FILES':>12}  {'USED':<16}  NAME")
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        note = f"  ({_PENDING})" if row["pending"] else ""
        noun = "file " if row["files"] == 1 else "files"
        print(
            f"{row['size_bytes']:>12,}  {row['files']:>6,} {noun}  {used:<16}  {row['name']}{note}"
        )
    return SUCCEEDED


def _row(store: Workspaces, name: str) -> dict[str, Any]:
    files = store.files(name)
    return {
        "name": name, "files": len(files), "size_bytes": sum(file.size_bytes for file in files),
        "used": store.used(name), "pending": store.is_pending(name),
    }  # fmt: skip


def _show(options: argparse.Namespace, store: Workspaces) -> int:
    files = store.files(options.name)
    if options.json:
        print_json([{"path": each.path, "size_bytes": each.size_bytes} for each in files])
        return SUCCEEDED
    print_header(f"{'BYTES':>12}  PATH")
    for each in files:
        print(f"{each.size_bytes:>12,}  {harmless_line(each.path)}")
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


def _diff(options: argparse.Namespace, store: Workspaces) -> int:
    diff = store.diff(options.name)
    _print_diff(diff, options)
    if not diff.id:
        print(f"cellwright: workspace {diff.name!r} has no pending change", file=sys.stderr)
    elif not options.json:
        sys.stdout.flush()  # the hint comes after it
        hint = f"cellwright workspace commit {diff.name} --change {diff.id}"
        print(f"cellwright: to commit exactly this: {hint}", file=sys.stderr)
    return SUCCEEDED


def _commit(options: argparse.Namespace, store: Workspaces) -> int:
    with audit_of(options) as store.audit:
        return _decided(store.commit(options.name, options.change), "committed", options)


def _discard(options: argparse.Namespace, store: Workspaces) -> int:
    with audit_of(options) as store.audit:
        return _decided(store.discard(options.name, options.change), "discarded", options)


def _decided(diff: WorkspaceDiff, done: str, options: argparse.Namespace) -> int:
    if options.json:
        print_json(diff)
        return SUCCEEDED
    counts = [
        f"{len(found):,} {kind}"
        for kind, found in (
            ("added", diff.added), ("changed", diff.changed), ("removed", diff.removed),
        )
    ]  # fmt: skip
    print(f"cellwright: {done} in {diff.name!r}: {', '.join(counts)}", file=sys.stderr)
    return SUCCEEDED


def _print_diff(diff: WorkspaceDiff, options: argparse.Namespace) -> None:
    if options.json:
        print_json(diff)
        return
    if diff.changes:
        print_header(f"{'KIND':<8}{'BEFORE':>13}{'AFTER':>13}  {'SHA256':<{_DIGITS}}  PATH")
    for each in diff.changes:
        digest = each.after.sha256[:_DIGITS] if each.after else ""
        sizes = f"{_size(each.before):>13}{_size(each.after):>13}"
        print(
            f"{each.kind:<8}{sizes}  {digest:<{_DIGITS}}  {harmless_line(each.path)}{_mode(each)}"
        )


def _size(version: FileVersion | None) -> str:
    return f"{version.size_bytes:,}" if version else "-"


def _mode(change: FileChange) -> str:
    """Return a note about the executable bit of a file, if it has one or had."""
    before = change.before is not None and change.before.executable
    if change.after is None or before == change.after.executable:
        return "  (executable)" if before else ""
    return "  (no longer executable)" if before else "  (now executable)"


def _prune(options: argparse.Namespace, store: Workspaces) -> int:
    removed = store.prune(max_age_seconds=options.days * _DAY)
    if options.json:
        print_json(removed)
    else:
        print(*removed, sep="\n", end="\n" if removed else "")
    return SUCCEEDED


def workspaces_at(directory: str | None, *, review: bool = False) -> Workspaces:
    """Return the store in `directory`, default the user's; before it waits for a lock it
    prints a notice."""

    def notify(name: str) -> None:
        limit = f"{workspaces.wait_seconds:g} s"
        print(f"cellwright: workspace {name!r} is in use; waiting up to {limit}", file=sys.stderr)

    workspaces = Workspaces(directory, review=review, on_wait=notify)
    return workspaces
