"""Tokens that pass through a model in whole pieces of work over real MCP servers, done twice: by calls
of their tools, one after the other, and by one program that makes those calls in a cell.

The model is scripted: it makes the calls that the work needs, and no others.  Both ways give the same
answer, or the benchmark fails.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .chores import CHORES, Chore
from .mcp import StdioClient, served
from .report import Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .servers import configured, installed, open_up
from .settings import Settings
from .tokens import count_tokens, tokenizer

_LEAST, _PIECES = 90.0, 5  # percent fewer, of so many pieces of work
_HOW = (
    "Six servers are connected in each: their definitions are in the context of a model that calls "
    "their tools itself. By a program: the nine tools of `cellwright mcp`, its instructions, what was "
    "found and described, the program, and its answer."
)


class Context:
    """All that a model reads and writes, turn by turn."""

    def __init__(self, *known: str) -> None:
        self.turns: list[list[str]] = [list(known)]

    def call(self, peer: StdioClient, name: str, arguments: Mapping[str, Any]) -> Any:
        """Make a call as a model does; its words and those of the answer are in the context then."""
        said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        result = peer.ask("tools/call", {"name": name, "arguments": arguments})
        texts = [each.get("text", "") for each in result["content"]]
        self.turns.append([said, *texts])
        if result.get("isError"):
            raise RuntimeError(f"{name}: {texts}")
        return "\n".join(texts)


class Cost(NamedTuple):
    once: int  # tokens, each counted when it comes
    read: int  # and again in every turn that follows, as a model without a cache reads them
    turns: int


def measure(settings: Settings) -> Report:
    """Return what each piece of work costs, both ways; nothing where the servers are not installed."""
    if not installed():
        return _report((), ("The servers are not installed: scripts/servers does it.",))
    chores = CHORES[:1] if settings.smoke else CHORES
    return _report(tuple(map(_done, chores)), ())


def _done(chore: Chore) -> tuple[Chore, Cost, Cost]:
    with scratch_directory() as folder:
        folder.chmod(0o777)  # servers in cells are an ordinary user's
        subprocess.run(("git", "init", "-q", "-b", "main", folder / "repository"), check=True)
        chore.prepare(folder)
        open_up(folder)
        direct, said = _by_calls(chore, folder)
        program, found = _by_program(chore, folder)
    if said != found:
        raise RuntimeError(f"{chore.name}: {said!r} by calls, {found!r} by a program")
    return chore, _cost(direct), _cost(program)


def _by_calls(chore: Chore, folder: Path) -> tuple[Context, Any]:
    """Do it with every server at the model's own hand, as a client without us has them."""
    with contextlib.ExitStack() as stack:
        peers = {
            name: stack.enter_context(_started(each)) for name, each in configured(folder).items()
        }
        context = Context(*(_definitions(peer) for peer in peers.values()))

        def call(name: str, **arguments: Any) -> Any:
            server, _, tool = name.partition(".")
            return context.call(peers[server], tool, arguments)

        return context, chore.by_calls(folder, call)


def _by_program(chore: Chore, folder: Path) -> tuple[Context, Any]:
    """Do it with our server alone, behind which the others are: find, describe, run."""
    servers = configured(folder)
    servers["files"]["approved"] = ["write_file"]  # nobody is there to be asked
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    files = ("--servers", f"{folder}/servers.json", "--pins", f"{folder}/pins.json")
    with served(sys.executable, "-m", "cellwright", "mcp", *files) as peer:
        context = Context(peer.instructions, _definitions(peer))
        for query in chore.queries:
            context.call(peer, "search_tools", {"query": query})
        context.call(peer, "describe_tools", {"names": list(chore.tools)})
        program = chore.program.format(folder=folder)
        answer = context.call(peer, "run_code", {"code": program})
    return context, json.loads(answer)["value"]


@contextlib.contextmanager
def _started(server: dict[str, Any]) -> Iterator[StdioClient]:
    with served(server["command"], *server["args"], env=server.get("env")) as peer:
        yield peer


def _definitions(peer: StdioClient) -> str:
    """Return what a client shows a model of a server's tools."""
    tools = peer.ask("tools/list", {})["tools"]
    shown = ("name", "description", "inputSchema")
    kept = [{key: each[key] for key in shown if key in each} for each in tools]
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False)


def _cost(context: Context) -> Cost:
    counts = [sum(count_tokens(turn)) for turn in context.turns]
    read = sum(sum(counts[: turn + 1]) for turn in range(len(counts)))
    return Cost(sum(counts), read, len(counts) - 1)


def _report(done: tuple[tuple[Chore, Cost, Cost], ...], notes: tuple[str, ...]) -> Report:
    rows: list[tuple[Value, ...]] = [
        (chore.name, calls.once, program.once, _fewer(calls.once, program.once), calls.turns,
         program.turns, _fewer(calls.read, program.read))
        for chore, calls, program in done
    ]  # fmt: skip
    table = ReportTable(
        title=f"Tokens that pass through a model, {tokenizer()}",
        columns=(Column("work"), Column("by calls", 0), Column("by a program", 0),
                 Column("% fewer", 1), Column("calls", 0), Column("calls around a program", 0),
                 Column("% fewer, read again in each turn", 1)),
        rows=tuple(rows),
    )  # fmt: skip
    return Report(
        name="workflows", title="What passes through a model", tables=(table,) if rows else (),
        verdicts=(_verdict(done),) if done else (),
        notes=(_HOW, *notes),
    )  # fmt: skip


def _fewer(before: int, after: int) -> float:
    return (1 - after / before) * 100


def _verdict(done: Sequence[tuple[Chore, Cost, Cost]]) -> Criterion:
    """Ask it of five: work whose calls say little is in the table beside them."""
    fewer = sorted((_fewer(calls.once, program.once) for _, calls, program in done), reverse=True)
    return Criterion(
        f"{_LEAST:g} % fewer tokens by a program, in {min(_PIECES, len(done))} pieces of work",
        all(each >= _LEAST for each in fewer[:_PIECES]),
        ", ".join(f"{each:.1f} %" for each in fewer),
    )
