"""`cellwright agent`: gives a task to a model that works in cells, and looks after its runs."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....policies.errors import ModelError, PolicyError
from ...agent.agent import MAKER, Agent
from ...agent.agent_memory import AgentMemory
from ...agent.planner import Planner
from ...agent.prompts import AgentLimits
from ...agent.research import Research
from ...agent.transcript import FAILED as AGENT_FAILED
from ...agent.transcript import PAUSED, AgentEvent, AgentResult, Transcripts
from ...making.factory import ToolFactory
from ...runs.durable_runs import Runs
from ...sandbox.sandbox import Sandbox
from ...text.terminal_text import ProgressLine, harmless, present, presented_whole, shortened
from ...tools.registry import ToolRegistry
from ...user_data import make_private_directory, state_directory
from ..keeping.marked_files import register_marked
from ..options import (
    FAILED,
    SUCCEEDED,
    add_json,
    add_policy,
    add_skills,
    add_subcommands,
    policy_of,
    print_json,
    skills_of,
)
from ..package_options import add_sources, store_of
from ..serving.serving_options import CONTEXT_TOKENS, add_model_server, model_client

if TYPE_CHECKING:
    from ...agent.prompts import ChatModel
    from ...runs.run_store import Approval

_RESUME = "cellwright agent resume"
_SHOWN = 1200  # characters of a program or an observation on a terminal


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    run = add_command("run", "work on a task", _run)
    run.add_argument("task", nargs="?", metavar="TASK", help="what to do, in words")
    run.add_argument(
        "--demo", action="store_true",
        help="show two tasks without a model: a tool is missing, is made, and is found again",
    )  # fmt: skip
    _add_work(run)
    resume = add_command(
        "resume", "go on with a run that was interrupted, paused or failed", _resume
    )
    resume.add_argument("run", metavar="RUN", help="the run")
    _add_work(resume)
    add_json(add_command("runs", "list the runs", _runs))
    show = add_command("show", "show the steps of a run", _show)
    show.add_argument("run", metavar="RUN", help="the run")
    add_json(show, "object")
    add_json(add_command("facts", "list what a person had the agent remember", _facts))
    merge = add_command("merge", "merge made tools that do the same, and keep their tests", _merge)
    add_policy(merge)
    remember = add_command(
        "remember", "keep a fact, which the agent is told where it helps", _remember
    )
    remember.add_argument("text", metavar="TEXT", help="a statement, at most 1,000 characters")
    forget = add_command("forget", "remove a fact", _forget)
    forget.add_argument("id", type=int, metavar="ID", help="the number, as `facts` lists it")
    approve = add_command("approve", "approve the calls that a run waits for, each once", _approve)
    reject = add_command("reject", "refuse them: the program gets an exception", _reject)
    for each in (approve, reject):
        each.add_argument("run", metavar="RUN", help="the run")
        each.add_argument(
            "approval", nargs="?", metavar="APPROVAL", help="one of its calls; default all"
        )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", metavar="DIR", type=Path,
        help="where runs and made tools are kept; default agent in the state directory",
    )  # fmt: skip


def _add_work(parser: argparse.ArgumentParser) -> None:
    limits = AgentLimits()
    parser.add_argument(
        "--model", metavar="URL", help="the model's server, such as http://127.0.0.1:8080/v1"
    )
    add_model_server(parser)
    parser.add_argument(
        "--context", type=int, default=CONTEXT_TOKENS, metavar="N",
        help=f"tokens of the model's context; default {CONTEXT_TOKENS}",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=limits.steps, metavar="N",
        help=f"most replies of the model; default {limits.steps}",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=limits.tokens, metavar="N",
        help=f"most tokens, read and written; default {limits.tokens}",
    )  # fmt: skip
    parser.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="offer the functions that this Python file marks @tool; it runs on the host; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--documents", action="append", default=[], metavar="DIR",
        help="let programs search the .md, .rst and .txt files below this folder; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--workspace", default="", metavar="NAME",
        help="let programs keep files in this workspace, by file_read, file_write and csv_process",
    )  # fmt: skip
    parser.add_argument(
        "--tool-packages", action="append", default=[], metavar="NAME",
        help="a package that made tools may have, dependencies too; may be repeated; default none",
    )  # fmt: skip
    add_sources(parser)
    parser.add_argument(
        "--plans", type=int, default=0, metavar="N",
        help="have the model propose N plans first, and choose one; default 0, none",
    )  # fmt: skip
    parser.add_argument(
        "--json-lines", action="store_true",
        help="print each event as a line of JSON, and the outcome as the last one",
    )  # fmt: skip
    add_skills(parser, "offer")
    add_policy(parser)


def run(options: argparse.Namespace) -> int:
    return int(options.action(options))


def _run(options: argparse.Namespace) -> int:
    if options.demo:
        return _demo(options)
    if not options.task:
        raise PolicyError("TASK: what should the agent do?", "or try cellwright agent run --demo")
    with _agent(options, _model(options)) as agent:
        return _printed(options, partial(_on_task, agent, options.task))


def _demo(options: argparse.Namespace) -> int:
    from ...agent.demo import TASKS, DemoModel

    status = SUCCEEDED
    with Agent(DemoModel(), **_packages(options)) as agent:
        for task in TASKS:
            print(f"task: {task}", file=sys.stderr)
            status |= _printed(options, partial(_on_task, agent, task))
    return status


def _on_task(agent: Agent, task: str, show: Callable[[AgentEvent], None]) -> AgentResult:
    return agent.run(task, on_event=show)


def _resume(options: argparse.Namespace) -> int:
    with _agent(options, _model(options)) as agent:
        return _printed(options, lambda show: agent.resume(options.run, on_event=show))


@contextlib.contextmanager
def _agent(options: argparse.Namespace, model: "ChatModel") -> Iterator[Agent]:
    limits = AgentLimits(steps=options.steps, tokens=options.tokens)
    offered = ToolRegistry()
    for file in options.tools:
        register_marked(offered, file)
    tools = [found for spec in offered.list_tools() if (found := offered.developers(spec.name))]
    with Agent(
        model, tools=tools, directory=_directory(options), limits=limits,
        workspace=options.workspace, **_packages(options),
        research=Research(folders=options.documents) if options.documents else None,
        planner=Planner(options.plans) if options.plans else None, skills=skills_of(options),
    ) as agent:  # fmt: skip
        yield agent


def _packages(options: argparse.Namespace) -> dict[str, Any]:
    """Return the policy, with the packages that made tools may have, and where these come from."""
    policy = policy_of(options)
    if not options.tool_packages:
        return {"policy": policy}
    allow = (*policy.packages.allow, *options.tool_packages)
    packages = msgspec.structs.replace(policy.packages, allow=allow)
    policy = msgspec.structs.replace(policy, packages=packages)
    return {"policy": policy, "package_store": store_of(options)}


def _model(options: argparse.Namespace) -> "ChatModel":
    if not options.model:
        raise PolicyError(
            "--model: where is the model?", "give the URL of its server, or try --demo"
        )
    return model_client(options, options.context)


def _directory(options: argparse.Namespace) -> Path:
    return options.directory or state_directory() / "agent"


def _printed(
    options: argparse.Namespace, work: "Callable[[Callable[[AgentEvent], None]], AgentResult]"
) -> int:
    """Work on a run, print what happens, and return the exit status."""
    print_one = _print_json_event if options.json_lines else _print_event
    begun: list[str] = []

    def show(event: AgentEvent) -> None:
        if event.kind == "started":
            begun.append(event.text)
        with progress.hidden():
            print_one(event)

    try:
        with ProgressLine("working on the task") as progress:
            result = work(show)
    except ModelError:  # the outermost caller prints it
        for run in begun:
            print(f"cellwright: `{_RESUME} {run}` goes on with the run", file=sys.stderr)
        raise
    if options.json_lines:
        print_json({"kind": "outcome"} | _outcome(result))
    elif result.ok:
        print(harmless(_text(result.answer)))
    for each in () if options.json_lines else result.pending:
        _print_approval(each)
    if result.status == PAUSED and not options.json_lines:
        print(
            f"cellwright: decide with `cellwright agent approve {result.run_id}` or `reject`, then "
            f"`cellwright agent resume {result.run_id}`, with the same options", file=sys.stderr,
        )  # fmt: skip
    return SUCCEEDED if result.ok else FAILED


def _print_json_event(event: AgentEvent) -> None:
    print_json(event._asdict())
    sys.stdout.flush()


def _print_event(event: AgentEvent) -> None:
    """Print an event to stderr: stdout is for the answer."""
    match event.kind:
        case "started":
            text = f"run {event.text}"
        case "program" | "observation" | "unusable" | "tool":
            cut = event.text if len(event.text) <= _SHOWN else f"{event.text[:_SHOWN]}\n..."
            text = f"step {event.step}: {event.kind}\n" + _indented(harmless(cut))
        case kind:
            text = f"{kind}{': ' if event.text else ''}{harmless(event.text)}"
    print(text, file=sys.stderr, flush=True)


def _indented(text: str) -> str:
    return "\n".join(f"    {each}" for each in text.splitlines())


def _print_approval(waiting: "Approval") -> None:
    shown = present(waiting.arguments)
    cut = "" if shown.is_whole else "  (too long to be shown whole, so it can be rejected only)"
    words = f"{harmless(waiting.tool)}  {shown.text}{cut}"
    print(f"waits: {waiting.approval}  {words}", file=sys.stderr)


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _outcome(result: AgentResult) -> dict[str, Any]:
    told = result._asdict() | {"pending": [each._asdict() for each in result.pending]}
    return told | {"usage": msgspec.structs.asdict(result.usage)}


# runs


@contextlib.contextmanager
def _records(options: argparse.Namespace) -> Iterator[tuple[Transcripts, Runs]]:
    """Open the files of the runs; raises PolicyError if there are none."""
    place = _directory(options)
    if not (place / "agents.db").exists():
        raise PolicyError(f"there are no runs in {place}", "name another place by --directory")
    transcripts = Transcripts(place / "agents.db", must_exist=True)
    with contextlib.closing(transcripts), Runs(place / "calls.db") as calls:
        yield transcripts, calls


def _runs(options: argparse.Namespace) -> int:
    with _records(options) as (transcripts, _):
        runs = transcripts.runs()
    if options.json:
        print_json([each._asdict() for each in runs])
        return SUCCEEDED
    for each in runs:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.began))
        reason = f" ({harmless(shortened(each.reason))})" if each.reason else ""
        print(f"{each.run}  {began}  {each.state}{reason}  {harmless(shortened(each.task))}")
    return SUCCEEDED


def _show(options: argparse.Namespace) -> int:
    with _records(options) as (transcripts, calls):
        found, steps = transcripts.get(options.run), transcripts.steps(options.run)
        waiting = [each for each in calls.pending() if each.run.startswith(f"{found.run}-")]
    if options.json:
        told = {"steps": steps_of(steps), "pending": [each._asdict() for each in waiting]}
        print_json(found._asdict() | told)
        return SUCCEEDED
    print(f"run {found.run}: {found.state} {harmless(found.reason)}".rstrip())
    print(f"task: {harmless(found.task)}")
    for each in steps:
        print(f"step {each.number}: {each.outcome or 'not finished'}")
        print(_indented(harmless(each.reply.text[:_SHOWN])))
        print(_indented(harmless((each.observation or "")[:_SHOWN])))
    for approval in waiting:
        _print_approval(approval)
    if found.state != AGENT_FAILED:
        print(f"answer: {harmless(bytes(found.answer).decode())}")
    return SUCCEEDED


def steps_of(steps: list[Any]) -> list[dict[str, Any]]:
    """Return steps as JSON has them."""
    return [
        {"number": each.number, "reply": each.reply.text, "observation": each.observation,
         "outcome": each.outcome}
        for each in steps
    ]  # fmt: skip


def _memory(options: argparse.Namespace) -> AgentMemory:
    place = _directory(options)
    make_private_directory(place, PolicyError)
    return AgentMemory(place / "memory.db")


def _facts(options: argparse.Namespace) -> int:
    with _memory(options) as memory:
        facts = memory.facts()
    if options.json:
        print_json([each._asdict() for each in facts])
    for each in () if options.json else facts:
        print(f"{each.id}  {harmless(each.text)}")
    return SUCCEEDED


def _merge(options: argparse.Namespace) -> int:
    place = _directory(options)
    with (
        Sandbox(policy=policy_of(options), pool=0) as sandbox,
        ToolRegistry(place / "tools.db", must_exist=True) as registry,
        ToolFactory(sandbox, registry, maker=MAKER, pool=1) as factory,
        _memory(options) as memory,
    ):
        merged = factory.merge_similar()
        for kept, retired in merged:
            memory.replace_tool(retired.name, kept.name)
            print(f"{retired.reference} is retired: {kept.reference} does the same")
    if not merged:
        print("cellwright: no two tools do the same", file=sys.stderr)
    return SUCCEEDED


def _remember(options: argparse.Namespace) -> int:
    with _memory(options) as memory:
        print(memory.keep_fact(options.text).id)
    return SUCCEEDED


def _forget(options: argparse.Namespace) -> int:
    with _memory(options) as memory:
        if memory.forget_fact(options.id):
            return SUCCEEDED
    print(f"cellwright: there is no fact {options.id}", file=sys.stderr)
    return FAILED


def _approve(options: argparse.Namespace) -> int:
    return _decide(options, Runs.approve, "approved")


def _reject(options: argparse.Namespace) -> int:
    return _decide(options, Runs.reject, "rejected")


def _decide(options: argparse.Namespace, decide: Callable[[Runs, str], bool], word: str) -> int:
    """Print each call of a run, and decide on it.

    Raises ApprovalRequired, and approves none, if one of them is too long to be printed whole.
    """
    with _records(options) as (transcripts, calls):
        run = transcripts.get(options.run).run
        waiting = [each for each in calls.pending() if each.run.startswith(f"{run}-")]
        waiting = [each for each in waiting if options.approval in (None, each.approval)]
        for each in waiting if decide is Runs.approve else ():
            presented_whole(each.tool, each.arguments)
        for each in waiting:
            _print_approval(each)
            if decide(calls, each.approval):
                print(f"{word} {harmless(each.tool)}{', once' if word == 'approved' else ''}")
    if not waiting:
        print(f"cellwright: no such call of run {run} waits for approval", file=sys.stderr)
        return FAILED
    print(f"go on with `{_RESUME} {run}` and the options of the run", file=sys.stderr)
    return SUCCEEDED
