"""`cellwright env`: locks, builds, shows and removes sets of packages."""

import argparse
import sys
import time
from pathlib import Path

from ....policies.errors import PolicyError
from ...sandbox.packages.lock import Lock, pylock_text
from ...sandbox.packages.package_store import PackageSet, PackageStore, Requirements
from ...text.terminal_text import ProgressLine, print_header
from ..options import SUCCEEDED, add_json, add_optional, add_subcommands, print_json
from ..package_options import add_python, add_sources, requirements_of, store_of

_DAY = 24 * 60 * 60
_MIB = 1024 * 1024
_ID = "the set: its id, or the first characters of it"


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    lock = add_command("lock", "resolve requirements and print a lock file", _lock)
    build = add_command("build", "make a set, so that sandboxes start with it at once", _build)
    listed = add_command("list", "list the sets, the last used first", _list)
    show = add_command("show", "show the wheels of a set, and check its files", _show)
    remove = add_command("remove", "remove a set that no sandbox has open", _remove)
    prune = add_command("prune", "remove sets that were not used for long", _prune)
    for each in (lock, build):
        each.add_argument(
            "packages", nargs="+", metavar="PACKAGE",
            help="a requirement such as 'pandas==2.3.*', or the file pylock.toml or requirements.txt",
        )  # fmt: skip
        add_python(each, "make the set for this Python of the host")
        add_sources(each)
    add_optional(build)
    lock.add_argument(
        "-o", "--output", metavar="FILE", help="the file to write; default standard output"
    )
    lock.add_argument("--upgrade", action="store_true", help="do not use what was resolved before")
    for each in (show, remove):
        each.add_argument("id", metavar="ID", help=_ID)
    for each in (build, listed, show, prune):
        add_json(each)
    prune.add_argument(
        "--days", type=float, metavar="N", help="remove what was not used for N days"
    )
    prune.add_argument(
        "--mb", type=float, metavar="MB", help="then remove the longest unused beyond MB MiB in all"
    )


def run(options: argparse.Namespace) -> int:
    return int(options.action(options))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", metavar="DIR", help="the directory of sets; default in the user's state"
    )


def _store(options: argparse.Namespace) -> PackageStore:
    return store_of(options, options.directory)


def _wanted(options: argparse.Namespace) -> Requirements:
    return requirements_of("PACKAGE", options.packages)


def _lock(options: argparse.Namespace) -> int:
    with ProgressLine("resolving packages"):
        text = pylock_text(_store(options).lock(_wanted(options), again=options.upgrade))
    if options.output is None:
        sys.stdout.write(text)
        return SUCCEEDED
    try:
        Path(options.output).write_text(text)
    except OSError as error:
        raise PolicyError(f"cannot write {options.output}: {error.strerror}") from None
    return SUCCEEDED


def _build(options: argparse.Namespace) -> int:
    store = _store(options)
    with ProgressLine("resolving packages") as progress:
        lock = store.lock(_wanted(options))
        progress.say(f"building {len(lock.wheels)} packages")
        made = store.build(lock)
    if options.json:
        print_json(_facts(made))
    else:
        print(made.id)
    return SUCCEEDED


def _list(options: argparse.Namespace) -> int:
    found = _store(options).list()
    if options.json:
        print_json([_facts(each) for each in found])
        return SUCCEEDED
    print_header(f"{'ID':<12}  {'MIB':>8}  {'USED':<16}  {'PYTHON':<11}  PACKAGES")
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
        size, python = each.size_bytes / _MIB, each.lock.python
        print(f"{each.id[:12]}  {size:>8.1f}  {used:<16}  {python:<11}  {each.lock}")
    return SUCCEEDED


def _show(options: argparse.Namespace) -> int:
    store = _store(options)
    found = store.get(options.id)
    with ProgressLine("checking the files of the set"):
        store.check(found.id, contents=True)
    if options.json:
        print_json(_facts(found))
        return SUCCEEDED
    print(f"id         {found.id}")
    print(f"python     {found.lock.python}")
    print(f"directory  {found.directory}")
    print(f"bytes      {found.size_bytes:,}, all as they were when the set was made")
    for wheel in found.lock.wheels:
        print(f"wheel      {wheel.name} {wheel.version}  sha256 {wheel.sha256}")
    return SUCCEEDED


def _facts(made: PackageSet) -> dict[str, object]:
    return {
        "id": made.id, "python": made.lock.python, "directory": made.directory,
        "size_bytes": made.size_bytes, "used": made.used, "wheels": _wheels(made.lock),
    }  # fmt: skip


def _wheels(lock: Lock) -> list[dict[str, str]]:
    return [
        {"name": each.name, "version": each.version, "sha256": each.sha256} for each in lock.wheels
    ]


def _remove(options: argparse.Namespace) -> int:
    _store(options).remove(options.id)
    return SUCCEEDED


def _prune(options: argparse.Namespace) -> int:
    if options.days is None and options.mb is None:
        raise PolicyError("prune: needs --days or --mb", "such as: cellwright env prune --days 30")
    removed = _store(options).prune(
        max_age_seconds=None if options.days is None else options.days * _DAY,
        max_bytes=None if options.mb is None else options.mb * _MIB,
    )
    if options.json:
        print_json(removed)
    else:
        print(*removed, sep="\n", end="\n" if removed else "")
    return SUCCEEDED
