"""`cellwright languages`: lists the languages of programs on this host."""

import argparse
import os
import subprocess

from ....policies.languages.table import language_table
from ....runner.host.interpreters import PLACES, HostLanguage, host_languages
from ....runner.host.runtime import find_runtime
from ....runner.launching.spawn import interpreter
from ..options import SUCCEEDED, add_json, print_json

_SECONDS = 20  # for a version, of a JVM on a slow machine


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the languages that `run` and `execute` know, with the version of each that this host "
        "has, and the package that brings the others."
    )
    parser.add_argument(
        "--languages", metavar="FILE", help="a TOML file of further languages; default none"
    )
    add_json(parser, "list")


def run(options: argparse.Namespace) -> int:
    table = language_table(options.languages)
    rows = [*map(_row, host_languages(table, find_runtime(interpreter())))]
    if options.json:
        print_json(rows)
        return SUCCEEDED
    for row in rows:
        here = row["version"] or f"not here; {row['missing']}"
        print(f"{row['name']:<12}{row['kind']:<13}{here}")
    return SUCCEEDED


def _row(language: HostLanguage) -> dict[str, str]:
    version = "" if language.missing else version_of(language) or "yes"
    return {
        "name": language.name, "kind": language.kind, "version": version,
        "package": language.package, "title": language.title, "missing": language.missing,
    }  # fmt: skip


def version_of(language: HostLanguage) -> str:
    """Return what the host's own program says of its version; empty if it says nothing."""
    if not language.version:
        return ""
    try:
        done = subprocess.run(
            language.version, capture_output=True, text=True, timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL, env=os.environ | {"PATH": PLACES},  # where cells find it
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout or done.stderr).strip().splitlines()
    return next((line[:60] for line in lines if "warning:" not in line), "")
