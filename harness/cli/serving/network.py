"""`cellwright network`: shows names that running sandboxes refused, and allows or denies hosts there.

Each sandbox that has network rules listens for this command; records of living sandboxes name its
socket.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....policies.advice.learning import text_with_rule
from ....policies.errors import CellwrightError, ClosedError, PolicyError
from ....policies.network.rule import SCHEMES, NetworkDenial, NetworkRule
from ....policies.profiles.loading import load_policy
from ....runner.launching.living import Living, list_living
from ...sandbox.network.network_control import AllowHost, DenyHost, RulesShown, ShowRules, ask
from ...text.terminal_text import harmless, print_header
from ...user_data import replace_file
from ..options import FAILED, SUCCEEDED, add_json, add_subcommands, print_json


class RunningSandbox(NamedTuple):
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


def _shown(options: argparse.Namespace) -> Iterator[tuple[RunningSandbox, RulesShown]]:
    """Yield each sandbox's answer; one that does not answer is named on stderr."""
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
        path = Path(options.remember).resolve()
        replace_file(path, text.encode(), path.stat().st_mode & 0o7777)
    return FAILED if failed else SUCCEEDED


def _chosen(options: argparse.Namespace, hosts: set[str]) -> list[RunningSandbox]:
    """Return the sandboxes to change: those that the options name, the only living one, or the only one
    that refused all of `hosts`. Raises PolicyError if that is ambiguous.

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


def _refused_by(sandbox: RunningSandbox) -> set[str]:
    try:
        return {each.name for each in ask(sandbox.path, ShowRules()).pending}
    except CellwrightError:
        return set()


def _named(options: argparse.Namespace) -> list[RunningSandbox]:
    """Return the sandboxes with network rules that --id names, default all, each once."""
    living = _with_rules()
    found = sandboxes_with_rules(living)
    if options.id is None:
        return found
    ids = {
        each.control for each in living if options.id in (each.id, str(each.record.supervisor.pid))
    }
    if not ids:
        raise PolicyError(
            f"--id: no sandbox with network rules has the id {options.id!r}", "see `cellwright ps`"
        )
    return [each for each in found if each.path in ids]


def sandboxes_with_rules(living: list[Living] | None = None) -> list[RunningSandbox]:
    """Return the sandboxes of this user that have network rules, each once."""
    found: dict[str, RunningSandbox] = {}
    for each in _with_rules() if living is None else living:
        sandbox = RunningSandbox(each.id, each.record.supervisor.pid, each.control)
        found.setdefault(each.control, sandbox)
    return list(found.values())


def _with_rules() -> list[Living]:
    return [each for each in list_living() if each.control and each.record.supervisor.is_alive()]


def _remembering(path: str, rules: "list[NetworkRule] | list[NetworkDenial]") -> str:
    """Return the text of a policy file with more rules; raises PolicyError."""
    policy = load_policy(path)
    if not os.path.isfile(path):
        raise PolicyError(f"--remember: {path!r} is a profile that is shipped", "name a file")
    text = Path(path).read_text()
    for rule in rules:
        text = text_with_rule(text, policy, rule)
    return text
