"""`cellwright network`: shows names that running sandboxes refused, and allows or denies hosts there.

Each sandbox that has network rules listens for this command; records of living sandboxes name its
socket.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...policies.errors import CellwrightError, ClosedError, PolicyError
from ...policies.loading import load_policy
from ...policies.network.rule import SCHEMES, NetworkDenial, NetworkRule
from ...policies.remembering import text_with_rule
from ...runner.living import list_living
from ..sandbox.network_control import AllowHost, DenyHost, RulesShown, ShowRules, ask
from ..text.terminal import harmless, print_header
from .options import FAILED, SUCCEEDED, add_json, add_subcommands, print_json


class _RunningSandbox(NamedTuple):
    """A sandbox that can be asked: its id in `cellwright ps`, its process, its socket."""

    id: str
    pid: int
    path: str


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    pending = add_command(
        "pending", "list names that programs asked for and no rule names", _pending
    )
    rules = add_command("rules", "list the rules in force", _rules)
    allow = add_command("allow", "allow connections to hosts, until their sandbox ends", _allow)
    deny = add_command("deny", "deny hosts, and end their connections", _deny)
    for each in (pending, rules):
        add_json(each)
    for each in (allow, deny):
        each.add_argument(
            "host", metavar="HOST", nargs="+", help="a name, such as files.example.org"
        )
        each.add_argument(
            "--all", action="store_true", help="in every sandbox that has network rules"
        )
        each.add_argument(
            "--remember", metavar="FILE", help="add the rule to this policy file, too"
        )
    allow.add_argument(
        "--port", type=int, action="append", metavar="N", help="default 443; may be repeated"
    )
    allow.add_argument(
        "--scheme", choices=SCHEMES, action="append",
        help="default http on port 80, https on others; tcp is any bytes; may be repeated",
    )  # fmt: skip
    allow.add_argument("--for", type=float, dest="lifetime", metavar="S", help="for S seconds only")
    deny.add_argument(
        "--port", type=int, action="append", metavar="N", help="default all; may be repeated"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--id", metavar="ID",
        help="an ID of `cellwright ps`, or the pid of a process, for all of its sandboxes; "
        "default all of this user",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    return int(options.action(options))


def _pending(options: argparse.Namespace) -> int:
    rows = [
        {"id": sandbox.id, **msgspec.to_builtins(each), "policy": shown.policy}
        for sandbox, shown in _shown(options)
        for each in shown.pending
    ]
    if options.json:
        print_json(rows)
        return SUCCEEDED
    if not rows:
        print("cellwright: no refused name waits for a decision", file=sys.stderr)
        return SUCCEEDED
    print_header(f"{'ID':<14} {'TIMES':>6} {'PORT':>5}  NAME  POLICY  REASON")
    for row in rows:
        words = "  ".join(harmless(str(row[name])) for name in ("name", "policy", "reason"))
        print(f"{row['id']:<14} {row['count']:>6} {row['port'] or '-':>5}  {words}")
    return SUCCEEDED


def _rules(options: argparse.Namespace) -> int:
    rows = [
        {"id": sandbox.id, "policy": shown.policy, "rules": shown.rules}
        for sandbox, shown in _shown(options)
    ]
    if options.json:
        print_json(rows)
        return SUCCEEDED
    for sandbox, shown in _shown(options):
        for rule in shown.rules:
            print(f"{sandbox.id:<14} {harmless(rule)}")
    return SUCCEEDED


def _shown(options: argparse.Namespace) -> Iterator[tuple[_RunningSandbox, RulesShown]]:
    """Yield what each sandbox tells; one that does not answer is named on stderr."""
    for sandbox in _named(options):
        try:
            yield sandbox, ask(sandbox.path, ShowRules())
        except ClosedError:  # it ended meanwhile
            continue
        except CellwrightError as error:
            print(f"cellwright: {sandbox.id}: {harmless(str(error))}", file=sys.stderr)


def _allow(options: argparse.Namespace) -> int:
    if options.lifetime is not None and options.remember:
        raise PolicyError(
            "--for: cannot be combined with --remember", "a policy is for more than one sandbox"
        )
    ports = tuple(options.port) if options.port else None
    schemes = tuple(options.scheme) if options.scheme else None
    return _change(options, [
        NetworkRule(host=host, ports=ports, schemes=schemes, lifetime_seconds=options.lifetime)
        for host in options.host
    ])  # fmt: skip


def _deny(options: argparse.Namespace) -> int:
    ports = tuple(options.port) if options.port else None
    return _change(options, [NetworkDenial(host=host, ports=ports) for host in options.host])


def _change(options: argparse.Namespace, rules: list[NetworkRule] | list[NetworkDenial]) -> int:
    """Change the rules of the chosen sandboxes, then those of the file of --remember."""
    allowed = {each.host for each in rules if isinstance(each, NetworkRule)}
    chosen = _chosen(options, allowed)
    text = _remembering(options.remember, rules) if options.remember else ""
    failed = 0
    for sandbox in chosen:
        for rule in rules:
            request = AllowHost(rule) if isinstance(rule, NetworkRule) else DenyHost(rule)
            try:
                ask(sandbox.path, request)
                print(f"{sandbox.id:<14} {harmless(str(rule))}")
            except CellwrightError as error:
                if len(chosen) == 1:
                    raise
                failed += 1
                print(f"cellwright: {sandbox.id}: {harmless(str(error))}", file=sys.stderr)
    if text and not failed:
        _replace(os.path.realpath(options.remember), text)
    return FAILED if failed else SUCCEEDED


def _chosen(options: argparse.Namespace, hosts: set[str]) -> list[_RunningSandbox]:
    """Return the sandboxes that a change is for: those that the options name, the only one that lives,
    or the only one that refused all of `hosts`; raises PolicyError if that is not clear.

    A process can have several, as `cellwright mcp` has one for tools that were made.
    """
    if options.all and options.id:
        raise PolicyError("--all: cannot be combined with --id")
    found = _named(options)
    if not found:
        raise PolicyError(
            "no sandbox that lives has network rules",
            "the policy of a sandbox needs at least one host in [[network.allow]]",
        )
    if len(found) == 1 or options.all or options.id:
        return found
    refusing = [each for each in found if hosts and hosts <= _refused_by(each)]
    if len(refusing) == 1:
        return refusing
    ids = ", ".join(each.id for each in found)
    raise PolicyError(f"--id: several sandboxes have network rules: {ids}", "name one, or --all")


def _refused_by(sandbox: _RunningSandbox) -> set[str]:
    try:
        return {each.name for each in ask(sandbox.path, ShowRules()).pending}
    except CellwrightError:
        return set()


def _named(options: argparse.Namespace) -> list[_RunningSandbox]:
    """Return the sandboxes with network rules that --id names, default all, each once."""
    found: dict[str, _RunningSandbox] = {}
    ids: set[str] = set()
    for living in list_living():
        if living.control and living.record.supervisor.is_alive():
            pid = living.record.supervisor.pid
            found.setdefault(living.control, _RunningSandbox(living.id, pid, living.control))
            if options.id in (living.id, str(pid)):
                ids.add(living.control)
    if options.id is None:
        return list(found.values())
    if not ids:
        raise PolicyError(
            f"--id: no sandbox with network rules has the id {options.id!r}", "see `cellwright ps`"
        )
    return [each for path, each in found.items() if path in ids]


def _remembering(path: str, rules: "list[NetworkRule] | list[NetworkDenial]") -> str:
    """Return the text of a policy file with more rules; raises PolicyError."""
    policy = load_policy(path)
    if not os.path.isfile(path):
        raise PolicyError(f"--remember: {path!r} is a profile that is shipped", "name a file")
    text = Path(path).read_text()
    for rule in rules:
        text = text_with_rule(text, policy, rule)
    return text


def _replace(path: str, text: str) -> None:
    """Replace a file at once, with the mode that it has."""
    directory, name = os.path.split(path)
    descriptor, new = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
    try:
        with open(descriptor, "w") as file:
            os.fchmod(file.fileno(), os.stat(path).st_mode & 0o7777)
            file.write(text)
        os.rename(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
