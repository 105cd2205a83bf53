"""`cellwright changes`: lists, shows, applies and discards what commands that ran with
`cellwright exec --review` would change in the project."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence

from ....policies.errors import PolicyError
from ...sandbox.projects.change_diff import described, harmless_name, leads_out
from ...sandbox.projects.project import find_project
from ...sandbox.projects.project_changes import ProjectChanges, open_changes
from ...sandbox.projects.upper import ProjectChange
from ...text.terminal_text import harmless, print_header
from ..options import FAILED, SUCCEEDED, add_json, print_json

_ACTIONS = ("list", "show", "apply", "discard")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=_ACTIONS, default="list",
        help="show the difference, apply it to the project, or discard it; default list the paths",
    )  # fmt: skip
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a file, or a directory with all in it; default all",
    )
    parser.add_argument(
        "--project", metavar="DIR", help="the project; default the work tree of git around this "
        "directory, or this directory",
    )  # fmt: skip
    parser.add_argument(
        "--unprotect", action="append", default=[], metavar="PATH",
        help="apply a path, too, that other programs obey; default none; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true",
        help="apply over what was changed in the project after the command started",
    )  # fmt: skip
    parser.add_argument(
        "--change",
        metavar="ID",
        help="apply only if the changes are still those that `show` named so",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    project = find_project(options.project or ".", whole=options.project is not None)
    changes = open_changes(project)
    paths = [_in_project(each, project.root) for each in options.paths] or None
    if options.action == "show":
        return _show(changes, paths)
    if options.action == "apply":
        unprotect = [_in_project(each, project.root) for each in options.unprotect]
        return _apply(changes, paths, unprotect, options)
    if options.action == "discard":
        return _done(changes.discard(paths), "discarded", options)
    return _list(changes, paths, options)


def _in_project(path: str, root: str) -> str:
    """Return a path, as given from this directory, relative to the root of the project."""
    above, name = os.path.split(os.path.abspath(path))
    full = os.path.join(os.path.realpath(above), name)
    if full != root and not full.startswith(f"{root}/"):
        raise PolicyError(f"{path}: does not lie in the project {root}")
    return os.path.relpath(full, root)


def _show(changes: ProjectChanges, paths: Sequence[str] | None) -> int:
    change = changes.id(paths)  # before the text: a change between the two is then refused
    sys.stdout.write(changes.show(paths))
    sys.stdout.flush()  # the hint comes after it
    if change:
        words = f"to apply exactly this: name the same paths, and --change {change}"
        print(f"cellwright: {words}", file=sys.stderr)
    return SUCCEEDED


def _list(changes: ProjectChanges, paths: Sequence[str] | None, options: argparse.Namespace) -> int:
    found = changes.list(paths)
    conflicts = changes.conflicts(paths)
    if options.json:
        print_json(
            {"changes": _plain(found), "conflicts": [each.path for each in _plain(conflicts)]}
        )
    elif found:
        print_header(f"{'KIND':<9} PATH")
        for each in found:
            print(_row(each))
        counts = Counter(each.kind for each in found)
        words = ", ".join(f"{number:,} {kind}" for kind, number in counts.items())
        sys.stdout.flush()  # the hint comes after it
        print(f"cellwright: {words}; `cellwright changes show` shows them", file=sys.stderr)
    else:
        print("cellwright: no changes wait for this project", file=sys.stderr)
    return _report(conflicts, [each for each in found if each.left_out])


def _apply(
    changes: ProjectChanges, paths: Sequence[str] | None, unprotect: Sequence[str],
    options: argparse.Namespace,
) -> int:  # fmt: skip
    asked = {each.path for each in changes.list(paths)}
    if not options.force and (conflicts := changes.conflicts(paths)):
        print("cellwright: nothing is applied", file=sys.stderr)
        return _report(conflicts, ())
    _done(
        changes.apply(paths, unprotect=unprotect, force=options.force, change=options.change),
        "applied",
        options,
    )
    return _report((), [each for each in changes.list() if each.left_out and each.path in asked])


def _report(conflicts: Sequence[ProjectChange], left_out: Sequence[ProjectChange]) -> int:
    for each in conflicts:
        name = harmless_name(each.path)
        print(f"cellwright: conflict: the project changed {name} meanwhile", file=sys.stderr)
    if conflicts:
        hint = "--force applies these nevertheless, `cellwright changes discard PATH` drops one"
        print(f"hint: {hint}", file=sys.stderr)
    for each in left_out:
        name = harmless_name(each.path)
        print(f"cellwright: left out: {name}: {harmless(each.left_out)}", file=sys.stderr)
    return FAILED if conflicts or left_out else SUCCEEDED


def _done(done: Sequence[ProjectChange], what: str, options: argparse.Namespace) -> int:
    if options.json:
        print_json(_plain(done))
    else:
        noun = "change" if len(done) == 1 else "changes"
        print(f"cellwright: {what} {len(done):,} {noun}", file=sys.stderr)
    return SUCCEEDED


def _row(change: ProjectChange) -> str:
    after, before = change.after, change.before
    words = described(after or before)
    if change.kind == "replaced":
        words = f"{described(before)}, now {words}"
    elif before and after and before.executable != after.executable:
        words += " now" if after.executable else ", no longer executable"
    out = ", which leads out of the project" if leads_out(change) else ""
    return f"{change.kind:<9} {harmless_name(change.path)}  ({words}{out})"


def _plain(changes: Sequence[ProjectChange]) -> list[ProjectChange]:
    """Return the changes with names that JSON can hold: bytes that are not UTF-8 as escapes."""
    from msgspec.structs import replace

    found = []
    for each in changes:
        after = each.after
        if after and after.target:
            after = replace(after, target=_text(after.target))
        before = each.before
        if before and before.target:
            before = replace(before, target=_text(before.target))
        found.append(replace(each, path=_text(each.path), before=before, after=after))
    return found


def _text(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()
