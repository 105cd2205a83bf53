"""The commands behind the command line: their arguments and what they do."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...policies.policy import Policy
from ...runner.spawn import Spawned, interpreter
from ..sandbox.sandbox import Sandbox
from ..text.terminal import result_line
from ..version import NAME, installed_version
from .options import GUEST_FAILED, OURS, RAN, add_policy, policy_named, policy_of
from .parsing import Parser
from .run import add_repl, add_run


def carry_out(arguments: Sequence[str], spawned: Spawned | None) -> int:
    """Run one command, with the launcher that was started ahead for it; return its exit status.

    `main` tells what an exception means.
    """
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    wanted = next(iter(arguments), None)
    parser = _parser(wanted)
    if wanted is None:
        parser.print_help()
        return RAN
    options = parser.parse_args(arguments)
    options.spawned = spawned
    return int(options.command(options))


class _Version(argparse.Action):
    """Looks the version up when it is asked for, and not before: that takes as long as a call."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        version = installed_version() or "(not installed)"
        print(f"{NAME} {version}")
        parser.exit(RAN)


def _parser(wanted: str | None = None, *, every: bool = False) -> Parser:
    """Return a parser that knows every command, and the arguments of the one that is wanted, or of
    every command whose packages are installed."""
    parser = Parser(
        prog="cellwright",
        description="runs programs that nobody has to trust, each in a kernel-isolated cell",
    )
    parser.add_argument("--version", action=_Version, help="print the version and leave")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_run(commands.add_parser("run", help="run a program in a cell of its own"))
    add_repl(commands.add_parser("repl", help="type into a session"))
    _add_explain(commands.add_parser("explain", help="say what a policy does on this host"))
    _add_learn(commands.add_parser("learn", help="run a program and write the policy it needs"))
    _add_doctor(commands.add_parser("doctor", help="try every layer; say how to repair what fails"))
    for name, (summary, add) in _ROOMS.items():
        room = commands.add_parser(name, help=summary)
        if wanted == name:  # each imports what the others do not need
            add(room)
        elif every:
            with contextlib.suppress(ImportError):
                add(room)
    return parser


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.set_defaults(command=_explain)
    add_policy(explain)
    explain.add_argument(
        "--diff", metavar="P", help="say instead what this policy allows more or less"
    )
    explain.add_argument("--json", action="store_true", help="one JSON value on stdout")


def _add_learn(learn: argparse.ArgumentParser) -> None:
    learn.set_defaults(command=_learn)
    learn.add_argument(
        "file", metavar="FILE", help="a Python program that you trust to look around"
    )
    learn.add_argument(
        "-o", "--output", metavar="TOML", help="where to write the policy, else stdout"
    )
    add_policy(learn)


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.set_defaults(command=_doctor)
    add_policy(doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON array on stdout")
    doctor.add_argument("--servers", metavar="FILE", help="look at these MCP servers too")
    doctor.add_argument(
        "--apparmor",
        action="store_true",
        help="print an AppArmor profile that permits user namespaces to this Python, and try nothing",
    )


def _add_workspace(workspace: argparse.ArgumentParser) -> None:
    from .workspace import add_workspace

    add_workspace(workspace)


def _add_audit(audit: argparse.ArgumentParser) -> None:
    from .audit import add_audit

    add_audit(audit)


def _add_runs(runs: argparse.ArgumentParser) -> None:
    from .runs import add_runs

    add_runs(runs)


def _add_tools(tools: argparse.ArgumentParser) -> None:
    from .tools import add_tools

    tools.set_defaults(command=_tools)
    options = argparse.ArgumentParser(add_help=False)
    add_policy(options)
    add_tools(tools, options)


def _add_servers(servers: argparse.ArgumentParser) -> None:
    from .servers import add_servers

    add_servers(servers)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    from .serve import add_serve

    serve.set_defaults(command=_serve)
    add_policy(serve, several=True)
    add_serve(serve)


def _add_mcp(mcp: argparse.ArgumentParser) -> None:
    from .mcp import add_mcp

    mcp.set_defaults(command=_mcp)
    add_policy(mcp)
    add_mcp(mcp)


def _add_bench(bench: argparse.ArgumentParser) -> None:
    from ...benchmarks.commands import add_bench

    bench.set_defaults(command=_bench)
    add_policy(bench)
    add_bench(bench)


def _add_completion(completion: argparse.ArgumentParser) -> None:
    from .completion import SHELLS

    completion.set_defaults(command=_completion)
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _add_man(man: argparse.ArgumentParser) -> None:
    man.set_defaults(command=_man)


def _add_help(help_: argparse.ArgumentParser) -> None:
    help_.add_argument("of", nargs="*", metavar="COMMAND", help="the command; default all")


_ROOMS = {
    "workspace": ("look at named workspaces and change them", _add_workspace),
    "audit": ("look at an audit trail and check it", _add_audit),
    "runs": ("see what waits for approval, and decide", _add_runs),
    "tools": ("make tools, call them, and look at them", _add_tools),
    "servers": ("look at MCP servers, and pin their tools", _add_servers),
    "serve": ("share one pool of cells among processes", _add_serve),
    "mcp": ("serve a model's tools by the Model Context Protocol", _add_mcp),
    "bench": ("measure on this machine what cells cost", _add_bench),
    "help": ("say what a command takes", _add_help),
    "completion": ("print a script by which a shell completes commands", _add_completion),
    "man": ("print the manual page", _add_man),
}


def _explain(options: argparse.Namespace) -> int:
    from ...policies.explain import explain

    if options.diff:
        return _diff(policy_of(options), options)
    with Sandbox(policy=policy_of(options), pool=0) as sandbox:
        lines = explain(sandbox.plan, sandbox.policy.limits)
    print(msgspec.json.encode(lines).decode() if options.json else "\n".join(lines))
    return RAN


def _diff(policy: Policy, options: argparse.Namespace) -> int:
    from ...policies.loading import load_policy
    from ...policies.narrowing import exceeds

    other = load_policy(options.diff)
    more, less = exceeds(other, policy), exceeds(policy, other)
    if options.json:
        sys.stdout.write(msgspec.json.encode({"more": more, "less": less}).decode() + "\n")
    else:
        print(*(f"+ {line}" for line in more), *(f"- {line}" for line in less), sep="\n")
    return RAN


def _learn(options: argparse.Namespace) -> int:
    from .learning import learn

    text, result = learn(Path(options.file), policy_of(options))
    print(result_line(result), file=sys.stderr)
    if options.output:
        Path(options.output).write_text(text)
    else:
        sys.stdout.write(text)
    return RAN if result.ok else GUEST_FAILED


def _serve(options: argparse.Namespace) -> int:
    from .serve import serve

    serve(options, [policy_named(name, options) for name in options.policy or [None]])
    return RAN


def _mcp(options: argparse.Namespace) -> int:
    from .mcp import serve

    return serve(options, policy_of(options))


def _tools(options: argparse.Namespace) -> int:
    from .tools import carry_out

    return carry_out(options, policy_of(options))


def _bench(options: argparse.Namespace) -> int:
    from ...benchmarks.commands import bench

    return bench(options, policy_of(options))


def _completion(options: argparse.Namespace) -> int:
    from .completion import completion

    print(completion(options.shell, _parser(every=True)), end="")
    return RAN


def _man(_: argparse.Namespace) -> int:
    from .manual import manual

    print(manual(_parser(every=True)), end="")
    return RAN


def _doctor(options: argparse.Namespace) -> int:
    if options.apparmor:
        from .apparmor import profile

        print(profile(interpreter()), end="")
        return 0
    from .doctor import examine, report

    *findings, verdict = examine(policy_of(options))
    if options.servers:
        from .server_findings import findings_of

        findings += findings_of(options.servers)
    findings.append(verdict)
    report(findings, as_json=options.json)
    return OURS if any(finding.verdict == "FAIL" for finding in findings) else RAN
