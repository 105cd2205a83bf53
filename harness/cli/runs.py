"""`cellwright runs`: runs in a file, the approvals that they wait for, and a person's decisions."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ...policies.errors import PolicyError
from ...runner.result import SandboxStatus
from ..runs.durable_runs import CallState, RunAttempt, RunCall, Runs
from ..runs.store import Approval
from ..text.presentation import MOST_LISTED, present, presented_whole, shortened
from ..text.terminal import harmless, result_line
from .options import add_policy, policy_of

if TYPE_CHECKING:
    from ..sandbox.sandbox import Sandbox

_WELL, _NOT_DONE = 0, 1
Command = Callable[[Runs, argparse.Namespace], int]


def add_runs(runs: argparse.ArgumentParser) -> None:
    """Add the commands about runs."""
    commands = runs.add_subparsers(required=True, metavar="WHAT")

    def add(name: str, summary: str, command: Command) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=summary, description=summary)
        parser.add_argument("file", metavar="FILE", help="the file that keeps the runs")
        parser.set_defaults(command=_carry_out, carry_out=command)
        return parser

    def add_json(parser: argparse.ArgumentParser, what: str) -> None:
        parser.add_argument("--json", action="store_true", help=f"one JSON {what} on stdout")

    add_json(add("pending", "list the calls that wait for approval", _pending), "array")
    show = add("show", "show a run: what was done, what is unknown, what can be done", _show)
    show.add_argument("run", nargs="?", metavar="RUN", help="the run; default all, a line each")
    add_json(show, "object, or array of runs,")
    approve = add("approve", "let one call be made, with the arguments shown", _approve)
    reject = add("reject", "refuse one call: the program gets an exception", _reject)
    for decides in (approve, reject):
        decides.add_argument("approval", metavar="APPROVAL", help="its id, as `pending` lists it")
    reject.add_argument("why", nargs="?", default="", metavar="WHY", help="told to the program")
    resume = add("resume", "run a program again, with the answers on record", _resume)
    resume.add_argument("run", metavar="RUN")
    resume.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="Python that runs on the host: its functions marked @tool are offered; may be repeated",
    )  # fmt: skip
    resume.add_argument("--registry", metavar="FILE", help="offer the made tools in this registry")
    resume.add_argument(
        "--abandoned", action="store_true",
        help="the process in which the run last ran is gone, though the run is `running`",
    )  # fmt: skip
    resume.add_argument(
        "--allow-divergence", action="store_true",
        help="let the program make other calls than those on record in their place",
    )  # fmt: skip
    add_policy(resume)
    mark = add("mark", "decide a call whose outcome is unknown", _mark)
    mark.add_argument("run", metavar="RUN")
    mark.add_argument("call", type=int, metavar="CALL", help="its number, as `show` lists it")
    mark.add_argument(
        "outcome", choices=("made", "not-made"), help="not-made: it may be made again"
    )
    mark.add_argument(
        "value",
        nargs="?",
        default="null",
        metavar="JSON",
        help="the result of a made call; default null",
    )
    forget = add("forget", "remove a run, which then cannot be resumed", _forget)
    forget.add_argument(
        "run", nargs="?", metavar="RUN", help="default all completed and failed ones"
    )
    add("expire", "refuse the calls that have waited too long", _expire)


def _carry_out(options: argparse.Namespace) -> int:
    with Runs(options.file, must_exist=True) as runs:
        return int(options.carry_out(runs, options))


def _pending(runs: Runs, options: argparse.Namespace) -> int:
    waiting = runs.pending()
    if options.json:
        _write_json([each._asdict() for each in waiting])
        return _WELL
    for each in waiting:
        _print_approval(each)
    if not waiting:
        print("cellwright: no call waits for approval", file=sys.stderr)
    return _WELL


def _show(runs: Runs, options: argparse.Namespace) -> int:
    if options.run is None:
        kept = runs.kept()
        if options.json:
            _write_json([each._asdict() for each in kept])
        for each in () if options.json else kept:
            print(f"{each.run}  {each.state}  {harmless(each.ending)}".rstrip())
        return _WELL
    record = runs.show(options.run)
    if options.json:
        calls = [each._asdict() | {"state": each.state.value} for each in record.calls]
        approvals = [each._asdict() for each in record.approvals]
        about = {"calls": calls, "approvals": approvals, "actions": record.actions}
        _write_json(record.run._asdict() | about)
        return _WELL
    run = record.run
    print(f"run {run.run}: {run.state}" + (f", {harmless(run.ending)}" if run.ending else ""))
    for call in record.calls:
        _print_call(call)
    for approval in record.approvals:
        _print_approval(approval)
    print(f"can be done: {', '.join(record.actions)}")
    return _WELL


def _approve(runs: Runs, options: argparse.Namespace) -> int:
    waiting = {each.approval: each for each in runs.pending()}.get(options.approval)
    if waiting is None:
        return _does_not_wait(options.approval)
    shown = presented_whole(waiting.tool, waiting.arguments)
    if not runs.approve(options.approval):
        return _does_not_wait(options.approval)
    print(f"approved {harmless(waiting.tool)}, once: {shown}")
    _print_next(runs, waiting.run)
    return _WELL


def _reject(runs: Runs, options: argparse.Namespace) -> int:
    waiting = {each.approval: each for each in runs.pending()}.get(options.approval)
    if waiting is None or not runs.reject(options.approval, options.why):
        return _does_not_wait(options.approval)
    print(f"rejected {harmless(waiting.tool)}")
    _print_next(runs, waiting.run)
    return _WELL


def _resume(runs: Runs, options: argparse.Namespace) -> int:
    runs.show(options.run)  # raises for one that does not exist, before a cell is made
    with _sandbox(runs, options) as sandbox:
        attempt = runs.resume(
            sandbox, options.run, abandoned=options.abandoned,
            allow_divergence=options.allow_divergence,
        )  # fmt: skip
    sys.stdout.write(harmless(attempt.result.stdout))
    sys.stderr.write(harmless(attempt.result.stderr))
    print(result_line(attempt.result), file=sys.stderr)
    return _told(runs, attempt)


def _told(runs: Runs, attempt: RunAttempt) -> int:
    if attempt.result.status is SandboxStatus.PENDING:
        for each in runs.show(attempt.run).approvals:
            _print_approval(each)
    for unused in attempt.unused:
        print(f"cellwright: on record and not called again: {harmless(unused)}", file=sys.stderr)
    return _WELL if attempt.result.ok else _NOT_DONE


@contextlib.contextmanager
def _sandbox(runs: Runs, options: argparse.Namespace) -> Iterator["Sandbox"]:
    """Give a sandbox whose programs may call the tools that the options name."""
    from ..making.factory import ToolFactory
    from ..sandbox.sandbox import Sandbox
    from ..tools.registry import ToolRegistry
    from .marked_files import register_marked

    policy = policy_of(options)
    with (
        Sandbox(policy=policy, pool=0) as ceiling,
        ToolRegistry(options.registry, must_exist=options.registry is not None) as registry,
    ):
        for file in options.tools:
            register_marked(registry, file)
        with (
            ToolFactory(ceiling, registry, approve=runs.ask) as factory,
            Sandbox(policy=policy, pool=0, tools=factory.broker) as sandbox,
        ):
            yield sandbox


def _mark(runs: Runs, options: argparse.Namespace) -> int:
    try:
        value = msgspec.json.decode(options.value)
    except msgspec.DecodeError as error:
        raise PolicyError(f"JSON: {error}") from None
    made = options.outcome == "made"
    runs.mark(options.run, options.call, made=made, value=value)
    print(f"marked call {options.call} as {options.outcome}")
    return _WELL


def _forget(runs: Runs, options: argparse.Namespace) -> int:
    if options.run is not None:
        runs.show(options.run)
    before = len(runs.kept())
    runs.forget(options.run)
    print(f"forgot {before - len(runs.kept())} runs")
    return _WELL


def _expire(runs: Runs, _: argparse.Namespace) -> int:
    print(runs.expire())
    return _WELL


def _print_approval(waiting: Approval) -> None:
    minutes = max(0.0, waiting.expires - time.time()) / 60
    shown = present(waiting.arguments, MOST_LISTED)
    print(f"{waiting.approval}  {harmless(waiting.tool)}: {shown.text}")
    print(f"    {harmless(waiting.reason)}; run {waiting.run}; {minutes:.0f} minutes left")


def _print_call(call: RunCall) -> None:
    answer = f" -> {shortened(call.answer)}" if call.answer else ""
    unknown = "  (see `cellwright runs mark`)" if call.state is CallState.UNKNOWN else ""
    shown = present(call.arguments, MOST_LISTED).text
    print(f"{call.number}  {call.state.value}  {harmless(call.tool)}: {shown}{answer}{unknown}")


def _print_next(runs: Runs, run: str) -> None:
    left = len(runs.show(run).approvals)
    more = f"{left} more of its calls wait for approval" if left else "nothing else waits in it"
    print(f"run {run}: {more}; `cellwright runs resume` goes on with it")


def _write_json(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _does_not_wait(approval: str) -> int:
    print(f"cellwright: {harmless(approval)} does not wait for approval", file=sys.stderr)
    return _NOT_DONE
