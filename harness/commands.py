"""The commands behind the command line: their arguments and what they do."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..policies.errors import CellwrightError, PolicyError
from ..policies.languages import PYTHON, language_called, language_of_file
from ..policies.policy import MIB, OPTIONAL_LAYERS, Policy
from ..runner.capture import OnOutput
from ..runner.result import SandboxResult
from ..runner.spawn import Spawned, interpreter
from .sandbox import Sandbox
from .terminal import EventPrinter, StreamPrinter, harmless, result_line

if TYPE_CHECKING:
    from ..runner.audit.log import AuditLog

RAN, GUEST_FAILED, USAGE, OURS = 0, 1, 2, 70
_OUTPUT = "cellwright-output"  # made where the command was called, once there is something to write
_CGROUP = tuple(layer for layer in OPTIONAL_LAYERS if layer.startswith("cgroup"))


def carry_out(arguments: Sequence[str], spawned: Spawned | None) -> int:
    """Run one command, with the launcher that was started ahead for it; return its exit status."""
    options = _parser(next(iter(arguments), None)).parse_args(arguments)
    options.spawned = spawned
    try:
        return int(options.command(options))
    except CellwrightError as error:
        print(f"cellwright: {error}", file=sys.stderr)
        return USAGE if isinstance(error, PolicyError) else OURS


def _parser(wanted: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cellwright", description="a kernel-isolated cell for every call"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a program in a cell of its own"))
    _add_repl(commands.add_parser("repl", help="type into a session"))
    explain = commands.add_parser("explain", help="say what a policy does on this host")
    explain.set_defaults(command=_explain)
    _add_policy(explain)
    explain.add_argument(
        "--diff", metavar="P", help="say instead what this policy allows more or less"
    )
    explain.add_argument("--json", action="store_true", help="one JSON value on stdout")
    learn = commands.add_parser("learn", help="run a program and write the policy that it needs")
    learn.set_defaults(command=_learn)
    learn.add_argument(
        "file", metavar="FILE", help="a Python program that you trust to look around"
    )
    learn.add_argument(
        "-o", "--output", metavar="TOML", help="where to write the policy, else stdout"
    )
    _add_policy(learn)
    workspace = commands.add_parser("workspace", help="look at named workspaces and change them")
    if wanted == "workspace":
        from .workspace_commands import add_workspace

        add_workspace(workspace)
    audit = commands.add_parser("audit", help="look at an audit trail and check it")
    if wanted == "audit":
        from .audit_commands import add_audit

        add_audit(audit)
    runs = commands.add_parser("runs", help="see what waits for approval, and decide")
    if wanted == "runs":
        from .tools.run_commands import add_runs

        add_runs(runs)
    tools = commands.add_parser("tools", help="make tools, call them, and look at them")
    tools.set_defaults(command=_tools)
    if wanted == "tools":
        from .tools.commands import add_tools

        options = argparse.ArgumentParser(add_help=False)
        _add_policy(options)
        add_tools(tools, options)
    serve = commands.add_parser("serve", help="share one pool of cells among processes")
    serve.set_defaults(command=_serve)
    _add_policy(serve, several=True)
    if wanted == "serve":
        from .daemon.commands import add_serve

        add_serve(serve)
    bench = commands.add_parser("bench", help="measure on this machine what cells cost")
    bench.set_defaults(command=_bench)
    _add_policy(bench)
    if wanted == "bench":
        from ..benchmarks.commands import add_bench

        add_bench(bench)
    doctor = commands.add_parser("doctor", help="try every layer and say how to repair what fails")
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON array on stdout")
    doctor.add_argument(
        "--apparmor",
        action="store_true",
        help="print an AppArmor profile that permits user namespaces to this Python, and try nothing",
    )
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.set_defaults(command=_run)
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", metavar="FILE", help="the program; - for standard input")
    source.add_argument("-c", dest="code", metavar="CODE", help="the program itself")
    run.add_argument("--language", metavar="L", help="by the file's name unless told, else python")
    run.add_argument("--timeout", type=float, metavar="S", help="wall time, seconds")
    run.add_argument("--memory", type=float, metavar="MB", help="memory cap, MiB")
    run.add_argument(
        "--file", dest="files", action="append", default=[], metavar="HOST[:NAME]",
        help="put a file into /workspace",
    )  # fmt: skip
    run.add_argument(
        "--workspace", metavar="NAME", help="have the files of that name, and keep them after"
    )
    run.add_argument("--clean", action="store_true", help="remove it once the program completes")
    run.add_argument("--stdin", metavar="FILE", help="what the program reads; - passes ours on")
    run.add_argument(
        "--collect", action="append", default=[], metavar="GLOB", help="bring these files back"
    )
    run.add_argument(
        "--output", metavar="DIR",
        help=f"where to write what the program made: pictures, --collect; else {_OUTPUT}",
    )  # fmt: skip
    run.add_argument("--overwrite", action="store_true", help="files there too")
    form = run.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the result as one JSON object on stdout")
    form.add_argument(
        "--json-lines", action="store_true", help="output as it comes too, an object a line"
    )
    run.add_argument("--audit", metavar="FILE", help="append what happens to this trail")
    run.add_argument(
        "--connect", metavar="PATH", help="use the daemon that listens there, and its policy P"
    )
    run.add_argument("-v", "--verbose", action="store_true", help="a result line on success too")
    _add_policy(run)


def _add_repl(repl: argparse.ArgumentParser) -> None:
    repl.set_defaults(command=_repl, file="")
    repl.add_argument("--language", metavar="L", default=PYTHON, help="python unless told")
    repl.add_argument("--timeout", type=float, metavar="S", help="wall time of a call, seconds")
    repl.add_argument("--memory", type=float, metavar="MB", help="memory cap, MiB")
    repl.add_argument("--workspace", metavar="NAME", help="have its files, and keep them after")
    repl.add_argument(
        "--output", metavar="DIR", default=_OUTPUT, help=f"where to write pictures, else {_OUTPUT}"
    )
    repl.add_argument("--audit", metavar="FILE", help="append what happens to this trail")
    repl.add_argument("--connect", metavar="PATH", help="use the daemon that listens there")
    _add_policy(repl)


def _add_policy(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    once = "a shipped profile or a TOML file"
    if several:
        more = f"{once}; may be repeated, and clients choose by name; the first unless they do"
        parser.add_argument("--policy", action="append", metavar="P", help=more)
    else:
        parser.add_argument("--policy", metavar="P", help=once)
    optional = "go on without this layer where the host lacks it; cgroup means its three"
    parser.add_argument("--optional", action="append", default=[], metavar="LAYER", help=optional)


def _policy(options: argparse.Namespace) -> Policy:
    return _policy_named(options.policy, options)


def _policy_named(name: str | None, options: argparse.Namespace) -> Policy:
    policy = Policy(name="strict")
    if name:
        from ..policies.loading import load_policy

        policy = load_policy(name)
    layers = [_CGROUP if each == "cgroup" else (each,) for each in options.optional]
    chosen = tuple(layer for group in layers for layer in group)
    return msgspec.structs.replace(policy, optional_layers=(*policy.optional_layers, *chosen))


def _run(options: argparse.Namespace) -> int:
    code = _read(options.file) if options.code is None else options.code
    printer = _printer(options)
    with _sandbox(options) as sandbox:
        result = sandbox.execute(
            code,
            _language(options),
            stdin=_read(options.stdin) if options.stdin else None,
            files=dict(map(_file, options.files)),
            timeout=options.timeout,
            collect=options.collect,
            workspace=options.workspace,
            clean=options.clean,
            on_output=printer,
        )
    if isinstance(printer, EventPrinter):
        printer.finish()
    return _show(result, options)


def _language(options: argparse.Namespace) -> str:
    return str(options.language or language_of_file(options.file or ""))


@contextlib.contextmanager
def _sandbox(options: argparse.Namespace) -> Iterator[Sandbox]:
    """Give the sandbox for one run, of our own cells or a daemon's."""
    if options.connect is not None:
        if options.memory is not None or options.optional or options.audit:
            raise PolicyError("--connect: --memory, --optional and --audit are the daemon's to say")
        with Sandbox(connect=options.connect, policy=options.policy) as sandbox:
            yield sandbox
        return
    policy = _policy(options)
    if options.memory is not None:
        limits = msgspec.structs.replace(policy.limits, memory_bytes=int(options.memory * MIB))
        policy = msgspec.structs.replace(policy, limits=limits)
    with (
        _audit(options) as audit,
        Sandbox(
            policy=policy,
            spawned=options.spawned,
            pool=0,
            audit=audit,
            language=language_called(_language(options)) or PYTHON,  # no other launcher is needed
        ) as sandbox,
    ):
        yield sandbox


def _printer(options: argparse.Namespace) -> OnOutput | None:
    if options.json_lines:
        return EventPrinter()
    return None if options.json else StreamPrinter()


@contextlib.contextmanager
def _audit(options: argparse.Namespace) -> Iterator["AuditLog | bool"]:
    """Open the trail that was asked for; without one nothing of it is imported."""
    if options.audit is None:
        yield False
        return
    from ..runner.audit.log import AuditLog

    with AuditLog(path=options.audit) as log:
        yield log


def _show(result: SandboxResult, options: argparse.Namespace) -> int:
    as_json = options.json or options.json_lines
    if as_json:
        sys.stdout.write(msgspec.json.encode(result.to_dict()).decode() + "\n")
    elif options.verbose or not result.ok:
        print(result_line(result), file=sys.stderr)
    if result.artifacts and (options.output or not as_json):  # JSON has their content
        _keep(result, options)
    return RAN if result.ok and _is_kept(result) else GUEST_FAILED


def _is_kept(result: SandboxResult) -> bool:
    """Tell whether the workspace, if one was named, was kept, and say it where it was not."""
    kept = result.workspace
    if kept is None or kept.state != "refused":
        return True
    print(f"cellwright: not saved: {harmless(kept.why)}", file=sys.stderr)
    return False


def _keep(result: SandboxResult, options: argparse.Namespace) -> None:
    from .keepsakes import keep

    directory = options.output or _OUTPUT
    for path in keep(result.artifacts, directory, overwrite=options.overwrite):
        print(f"cellwright: wrote {harmless(path)}", file=sys.stderr)


def _file(argument: str) -> tuple[str, bytes]:
    host, _, name = argument.partition(":")
    return name or os.path.basename(host), _read(host)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None


def _repl(options: argparse.Namespace) -> int:
    from .repl import Repl
    from .state import state_directory
    from .typed import lines_of_stdin

    if not (language := language_called(options.language)):
        raise PolicyError(f"language: there is no {options.language!r}")
    lines = lines_of_stdin(state_directory() / "history")
    with contextlib.closing(lines), _sandbox(options) as sandbox:
        open_session = partial(sandbox.session, language=language, workspace=options.workspace)
        repl = Repl(lines, open_session, language, options.output, options.timeout)
        with contextlib.closing(repl):
            if lines.interactive:
                print(
                    f"cellwright: {language}, {sandbox.policy.name}. :help tells more",
                    file=sys.stderr,
                )
            status = repl.converse()
    return status or (GUEST_FAILED if repl.failed and not lines.interactive else RAN)


def _explain(options: argparse.Namespace) -> int:
    from ..policies.explain import explain

    if options.diff:
        return _diff(_policy(options), options)
    with Sandbox(policy=_policy(options), pool=0) as sandbox:
        lines = explain(sandbox.plan)
    print(msgspec.json.encode(lines).decode() if options.json else "\n".join(lines))
    return RAN


def _diff(policy: Policy, options: argparse.Namespace) -> int:
    from ..policies.loading import load_policy
    from ..policies.narrowing import exceeds

    other = load_policy(options.diff)
    more, less = exceeds(other, policy), exceeds(policy, other)
    if options.json:
        sys.stdout.write(msgspec.json.encode({"more": more, "less": less}).decode() + "\n")
    else:
        print(*(f"+ {line}" for line in more), *(f"- {line}" for line in less), sep="\n")
    return RAN


def _learn(options: argparse.Namespace) -> int:
    from .learning import learn

    text, result = learn(Path(options.file), _policy(options))
    print(result_line(result), file=sys.stderr)
    if options.output:
        Path(options.output).write_text(text)
    else:
        sys.stdout.write(text)
    return RAN if result.ok else GUEST_FAILED


def _serve(options: argparse.Namespace) -> int:
    from .daemon.commands import serve

    serve(options, [_policy_named(name, options) for name in options.policy or [None]])
    return RAN


def _tools(options: argparse.Namespace) -> int:
    from .tools.commands import carry_out

    return carry_out(options, _policy(options))


def _bench(options: argparse.Namespace) -> int:
    from ..benchmarks.commands import bench

    return bench(options, _policy(options))


def _doctor(options: argparse.Namespace) -> int:
    if options.apparmor:
        from .apparmor import profile

        print(profile(interpreter()), end="")
        return 0
    from .doctor import examine, report

    findings = examine()
    report(findings, as_json=options.json)
    return OURS if any(finding.verdict == "FAIL" for finding in findings) else RAN
