"""Ten tasks with the replies of a model to each, for tests and for a process that is killed.

`python -m tests.harness.agent.stories URL DIRECTORY TASK` works on one of them, and kills itself with
SIGKILL at each event that DIRECTORY does not know yet.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cellwright.agent import Agent, AgentEvent, ModelClient
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.tool import Caller, Tool
from tests.conftest import policy_named
from tests.harness.agent.scripted import answer, program
from tests.model_server import ModelServer, Reply, calling

TO = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
UNUSABLE = "(a reply that could not be used)"
BAD_DRAFT = "```python\ndef is_address(text: str) -> bool:\n    return '@' in text\n```\n```tests\nassert not is_address('@')\n```"
GOOD_DRAFT = BAD_DRAFT.replace("'@' in text", "len(text) > 1 and '@' in text")


class Story(NamedTuple):
    """A task: the replies that solve it, its answer, and whom it sends to."""

    replies: Sequence[Reply]
    answer: Any
    sent: Sequence[str] = ()


def _send(to: str) -> str:
    return f"execute_tool('send', {{'to': {to!r}}})"


STORIES = (
    Story(  # the seed's: a gap is found, and the tool is built, repaired and used
        [program("find_tool('tells whether a text is an address')"),
         program("build_tool('is_address', 'Tells whether a text is an e-mail address')['name']"),
         answer("execute_tool('is_address', {'text': 'a@b.c'})")], True,
    ),
    Story(  # the same tool again, which is found or made
        [program("known = find_tool('is_address') or [build_tool('is_address', 'Tells whether a text "
                 "is an e-mail address')]\nlen(known)"),
         answer("[execute_tool('is_address', {'text': each}) for each in ('@', 'x@y')]")],
        [False, True],
    ),
    Story(  # a model that writes no code
        ["Thought: I send it.\nAction: send\nAction Input: {\"to\": \"ann\"}", "Final Answer: sent"],
        "sent", ["ann"],
    ),
    Story(  # tool calling
        [calling(("send", '{"to": "bob"}'), ("send", '{"to": "cid"}')),
         calling(("final_answer", '{"answer": "both"}'))], "both", ["bob", "cid"],
    ),
    Story(  # files of a workspace
        [program("execute_tool('file_write', {'filepath': 'a.csv', 'content': 'n,m\\n1,2\\n3,4\\n'})"),
         program("rows = execute_tool('csv_process', {'filepath': 'a.csv', 'columns': ['m']})['rows']"),
         answer("[each['m'] for each in rows]")], ["2", "4"],
    ),
    Story(  # the model as a tool
        [program("short = execute_tool('text_summarize', {'text': 'long ' * 99})['summary']"),
         answer("short")], "a summary",
    ),
    Story(  # state from step to step, and effects in each
        [program(f"n = 1\none = {_send('dan')}"), program(f"n += 1\ntwo = {_send('eve')}"),
         program("n += 1"), answer("[n, one, two]")],
        [3, "sent to dan", "sent to eve"], ["dan", "eve"],
    ),
    Story(  # an error on the way, behind an effect
        [program(f"x = 20\n{_send('fay')}\n1 / 0"), program("x += 1"), answer("2 * x")], 42, ["fay"],
    ),
    Story(  # the session is lost, behind an effect
        [program(f"{_send('gus')}\nimport os\nos._exit(3)"), program("x = 'y' in globals()"),
         answer("x")], False, ["gus"],
    ),
    Story(  # many effects of one program
        [program("done = [execute_tool('send', {'to': f'p{n}'}) for n in range(5)]\nlen(done)"),
         answer("done[-1]")], "sent to p4", [f"p{n}" for n in range(5)],
    ),
)  # fmt: skip


class StoryServer(ModelServer):
    """Tells the stories; each reply comes after the next of `faults`, once."""

    def __init__(self, faults: Sequence[Reply] = ()) -> None:
        super().__init__(())
        self._faults = faults
        self._given: set[tuple[str, int]] = set()

    def reply(self, request: dict[str, Any]) -> Reply:
        system, task, *rest = (each["content"] for each in request["messages"])
        if "Summarise" in system:
            return "a summary"
        is_draft = "You write one tool" in system
        said = [each["content"] for each in request["messages"] if each["role"] == "assistant"]
        number = sum(each != UNUSABLE for each in said)
        place = task.partition("\n")[0], number
        if self._faults and place not in self._given:
            self._given.add(place)
            return self._faults[len(self._given) % len(self._faults)]
        if is_draft:
            return BAD_DRAFT if "This failed" not in (rest or [""])[-1] else GOOD_DRAFT
        return STORIES[int(task.split()[2])].replies[number]


def agent_of(url: str, directory: Path) -> Agent:
    """Return an agent that keeps everything in a directory, and appends to the file `sent` there."""

    def send(arguments: dict[str, Any], caller: Caller) -> str:
        with open(directory / "sent", "a") as log:
            log.write(f"{arguments['to']}\n")
        return f"sent to {arguments['to']}"

    spec = ToolSpec(name="send", owner=ToolOwner.DEVELOPER, parameters=TO)
    return Agent(
        ModelClient(url, retries=3, first_wait=0.01), policy=policy_named("strict"),
        tools=[Tool(spec, send)], directory=directory / "agent", workspace="w",
        workspaces=directory / "workspaces",
    )  # fmt: skip


def sent_in(directory: Path) -> list[str]:
    path = directory / "sent"
    return path.read_text().split() if path.exists() else []


def _work_and_be_killed(url: str, directory: Path, task: str) -> None:
    known = directory / "events"
    seen = set(known.read_text().splitlines()) if known.exists() else set()

    def on_event(event: AgentEvent) -> None:
        if event.kind != "started" and (key := f"{event.kind} {event.step}") not in seen:
            with open(known, "a") as log:
                log.write(f"{key}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    with agent_of(url, directory) as agent:
        runs = agent.runs()
        if not runs:
            agent.run(task, on_event=on_event)
        elif runs[0].state != "completed":
            agent.resume(runs[0].run, on_event=on_event)
        print(json.loads(bytes(agent.runs()[0].answer)).__repr__())


if __name__ == "__main__":
    _work_and_be_killed(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
