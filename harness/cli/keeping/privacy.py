"""`cellwright privacy`: finds personal data in files, and shows them as a model would see them."""

import argparse
import sys
from collections import Counter

from ....policies.errors import PolicyError
from ....policies.privacy_rules import KINDS
from ...privacy.privacy import Privacy
from ...privacy.scope import PrivacyScope
from ...text.terminal_text import ProgressLine, harmless_line, print_header
from ..options import FAILED, SUCCEEDED, add_subcommands, policy_of, print_json
from ..options import add_policy as add_policy_option


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    scan = add_command(
        "scan", "find personal data in files; the status is 1 if there is any", _scan
    )
    scan.add_argument(
        "--show", action="store_true", help="print the values; default is where and of which kind"
    )
    scan.add_argument("--json", action="store_true", help="print JSON")
    add_command("redact", "print files with tokens in place of values", _redact)


def run(options: argparse.Namespace) -> int:
    return int(options.action(options))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="text; - reads standard input")
    parser.add_argument(
        "--kind", action="append", default=[], choices=KINDS, metavar="KIND", dest="kinds",
        help=f"look for this kind only: {', '.join(KINDS)}; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--region", action="append", default=[], metavar="CODE", dest="regions",
        help="a country whose national phone numbers are found, such as US; may be repeated",
    )  # fmt: skip
    add_policy_option(parser)


def privacy_of(options: argparse.Namespace) -> Privacy:
    """Return the policy's rules for personal data, with the kinds and regions of the options."""
    rules = policy_of(options).privacy
    if options.kinds or options.regions or not rules.enabled:
        return Privacy(
            kinds=options.kinds, regions=options.regions or rules.regions, names=rules.names
        )
    return Privacy(rules=rules)


def _scan(options: argparse.Namespace) -> int:
    scope = privacy_of(options).scope()
    with ProgressLine("searching the files"):
        rows = [row for file in options.files for row in _rows(file, scope, show=options.show)]
    if options.json:
        print_json(rows)
        return FAILED if rows else SUCCEEDED
    if rows:
        print_header(f"{'LINE':>6} {'COLUMN':>6} {'LENGTH':>6}  {'KIND':<12}  FILE")
    for row in rows:
        where = f"{row['line']:>6} {row['column']:>6} {row['length']:>6}  {row['kind']:<12}"
        value = f"  {harmless_line(str(row['value']))}" if options.show else ""
        print(f"{where}  {harmless_line(str(row['file']))}{value}")
    counts = Counter(str(row["kind"]) for row in rows)
    said = ", ".join(f"{kind} {count}" for kind, count in counts.most_common()) or "nothing found"
    print(f"cellwright: {said}", file=sys.stderr)
    return FAILED if rows else SUCCEEDED


def _rows(file: str, scope: PrivacyScope, *, show: bool) -> list[dict[str, str | int]]:
    text = _text_of(file)
    rows = []
    for each in scope.find(text):
        begins = text.rfind("\n", 0, each.start) + 1
        row: dict[str, str | int] = {
            "file": file, "line": text.count("\n", 0, each.start) + 1,
            "column": each.start - begins + 1, "length": each.end - each.start, "kind": each.kind,
        }  # fmt: skip
        rows.append(row | ({"value": text[each.start : each.end]} if show else {}))
    return rows


def _redact(options: argparse.Namespace) -> int:
    scope = privacy_of(options).scope()
    for file in options.files:
        print(scope.text(_text_of(file)), end="")
    return SUCCEEDED


def _text_of(file: str) -> str:
    """Return the text of a file; raises PolicyError if it cannot be read, or is no text."""
    try:
        if file == "-":
            return sys.stdin.read()
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read()
    except OSError as error:
        raise PolicyError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PolicyError(f"{file}: must be UTF-8 text") from None
