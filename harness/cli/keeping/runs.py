"""`cellwright runs`: lists durable runs, decides on their pending approvals, and resumes them."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ....policies.errors import PolicyError
from ....runner.requests.result import SandboxStatus
from ...runs.durable_runs import CallState, RunAttempt, RunCall, Runs
from ...runs.run_store import Approval
from ...text.terminal_text import (
    MOST_LISTED,
    ProgressLine,
    harmless,
    hint_lines,
    present,
    presented_whole,
    result_line,
    shortened,
)
from ..options import (
    FAILED,
    SUCCEEDED,
    add_json,
    add_policy,
    add_subcommands,
    policy_of,
    print_json,
)
from .marked_files import register_marked

if TYPE_CHECKING:
    from ...sandbox.sandbox import Sandbox


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    add_json(add_command("pending", "list the calls that wait for approval", _pending))
    show = add_command("show", "show the calls of a run and the possible actions", _show)
    show.add_argument("run", nargs="?", metavar="RUN", help="the run; default a list of all runs")
    add_json(show, "object, or an array of runs")
    approve = add_command("approve", "approve one call with its arguments", _approve)
    reject = add_command("reject", "reject one call: the program gets an exception", _reject)
    for each in (approve, reject):
        each.add_argument("approval", metavar="APPROVAL", help="the id, as `pending` lists it")
    reject.add_argument(
        "why",
        nargs="?",
        default="",
        metavar="WHY",
        help="the reason that the program gets; default none",
    )
    _add_resume(add_command("resume", "replay a run and continue it", _resume))
    mark = add_command("mark", "decide whether a call with unknown outcome was made", _mark)
    mark.add_argument("run", metavar="RUN", help="the run")
    mark.add_argument("call", type=int, metavar="CALL", help="the number, as `show` lists it")
    mark.add_argument(
        "outcome", choices=("made", "not-made"), help="not-made lets the call be made again"
    )
    mark.add_argument(
        "value",
        nargs="?",
        default="null",
        metavar="JSON",
        help="the result of a made call; default null",
    )
    forget = add_command("forget", "delete a run, which then cannot be resumed", _forget)
    forget.add_argument(
        "run", nargs="?", metavar="RUN", help="the run; default all completed and failed runs"
    )
    add_command("expire", "reject the calls whose time for approval is over", _expire)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file of the runs")


def _add_resume(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("run", metavar="RUN", help="the run")
    resume.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="offer the functions that this Python file marks @tool; it runs on the host; may be "
        "repeated",
    )  # fmt: skip
    resume.add_argument("--registry", metavar="FILE", help="offer the tools of this registry")
    resume.add_argument(
        "--abandoned", action="store_true",
        help="resume a run whose state is `running`, because its process has ended",
    )  # fmt: skip
    resume.add_argument(
        "--allow-divergence", action="store_true",
        help="continue if the program makes other calls than the recorded ones",
    )  # fmt: skip
    add_policy(resume)


def run(options: argparse.Namespace) -> int:
    with Runs(options.file, must_exist=True) as runs:
        return int(options.action(runs, options))


def _pending(runs: Runs, options: argparse.Namespace) -> int:
    waiting = runs.pending()
    if options.json:
        print_json([each._asdict() for each in waiting])
        return SUCCEEDED
    for each in waiting:
        _print_approval(each)
    if not waiting:
        print("cellwright: no call waits for approval", file=sys.stderr)
    return SUCCEEDED


def _show(runs: Runs, options: argparse.Namespace) -> int:
    if options.run is None:
        kept = runs.kept()
        if options.json:
            print_json([each._asdict() for each in kept])
        elif not kept:
            print("cellwright: no runs", file=sys.stderr)
        for each in () if options.json else kept:
            print(f"{each.run}  {each.state}  {harmless(each.ending)}".rstrip())
        return SUCCEEDED
    record = runs.show(options.run)
    if options.json:
        calls = [each._asdict() | {"state": each.state.value} for each in record.calls]
        approvals = [each._asdict() for each in record.approvals]
        about = {"calls": calls, "approvals": approvals, "actions": record.actions}
        print_json(record.run._asdict() | about)
        return SUCCEEDED
    shown = record.run
    ending = f", {harmless(shown.ending)}" if shown.ending else ""
    print(f"run {shown.run}: {shown.state}{ending}")
    for call in record.calls:
        _print_call(call)
    for approval in record.approvals:
        _print_approval(approval)
    print(f"possible actions: {', '.join(record.actions)}")
    return SUCCEEDED


def _approve(runs: Runs, options: argparse.Namespace) -> int:
    waiting = {each.approval: each for each in runs.pending()}.get(options.approval)
    if waiting is None:
        return _not_pending(options.approval)
    shown = presented_whole(waiting.tool, waiting.arguments)
    if not runs.approve(options.approval):
        return _not_pending(options.approval)
    print(f"approved {harmless(waiting.tool)}, once: {shown}")
    _print_next(runs, waiting.run)
    return SUCCEEDED


def _reject(runs: Runs, options: argparse.Namespace) -> int:
    waiting = {each.approval: each for each in runs.pending()}.get(options.approval)
    if waiting is None or not runs.reject(options.approval, options.why):
        return _not_pending(options.approval)
    print(f"rejected {harmless(waiting.tool)}")
    _print_next(runs, waiting.run)
    return SUCCEEDED


def _resume(runs: Runs, options: argparse.Namespace) -> int:
    runs.show(options.run)  # raises for an unknown run, before making a cell
    with ProgressLine("resuming the run"), _sandbox(runs, options) as sandbox:
        attempt = runs.resume(
            sandbox, options.run, abandoned=options.abandoned,
            allow_divergence=options.allow_divergence,
        )  # fmt: skip
    sys.stdout.write(harmless(attempt.result.stdout))
    sys.stderr.write(harmless(attempt.result.stderr))
    print(result_line(attempt.result), *hint_lines(attempt.result), sep="\n", file=sys.stderr)
    return _show_attempt(runs, attempt)


def _show_attempt(runs: Runs, attempt: RunAttempt) -> int:
    if attempt.result.status is SandboxStatus.PENDING:
        for each in runs.show(attempt.run).approvals:
            _print_approval(each)
    for unused in attempt.unused:
        print(f"cellwright: recorded but not called again: {harmless(unused)}", file=sys.stderr)
    return SUCCEEDED if attempt.result.ok else FAILED


@contextlib.contextmanager
def _sandbox(runs: Runs, options: argparse.Namespace) -> Iterator["Sandbox"]:
    """Open a sandbox whose programs may call the tools that the options name."""
    from ...making.factory import ToolFactory
    from ...sandbox.sandbox import Sandbox
    from ...tools.registry import ToolRegistry

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
    except ValueError as error:
        raise PolicyError(f"JSON: {error}", "give the result of the call as JSON") from None
    made = options.outcome == "made"
    runs.mark(options.run, options.call, made=made, value=value)
    print(f"marked call {options.call} as {options.outcome}")
    return SUCCEEDED


def _forget(runs: Runs, options: argparse.Namespace) -> int:
    if options.run is not None:
        runs.show(options.run)
    before = len(runs.kept())
    runs.forget(options.run)
    print(f"deleted {before - len(runs.kept())} runs")
    return SUCCEEDED


def _expire(runs: Runs, _: argparse.Namespace) -> int:
    print(f"rejected {runs.expire()} calls")
    return SUCCEEDED


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
    more = f"{left} more calls wait for approval" if left else "no other call waits for approval"
    print(f"run {run}: {more}; continue it with `cellwright runs resume`")


def _not_pending(approval: str) -> int:
    print(f"cellwright: {harmless(approval)} is not a pending approval", file=sys.stderr)
    return FAILED
