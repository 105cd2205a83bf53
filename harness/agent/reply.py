"""`read_reply`: what a reply of a model asks for: a program, a final answer, or nothing usable.

Every action becomes Python, because there is one way of doing something: a program in the session's
cell.  A model that cannot write code may write `Action:` and `Action Input:`, or use tool calling.
"""

import re
from typing import Any, NamedTuple

import msgspec

from .messages import ModelReply, ToolRequest

RUN_PYTHON = (
    "run_python"  # the tool that a model with tool calling may call: its argument is `code`
)
_FENCE = "```"
_PYTHON = frozenset(("python", "py", "python3", "tool_code", ""))
_ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*`?([A-Za-z_][\w.]*)`?[ \t]*$", re.M)
_INPUT = re.compile(r"^[ \t]*Action[ \t]*Input[ \t]*:", re.M | re.I)
_ANSWER = re.compile(r"^[ \t]*Final[ \t]*Answer[ \t]*:[ \t]*", re.M | re.I)
# What models of several families write around a call, and servers sometimes leave in the text.
_CONTROL = re.compile(r"<\|[a-z_]{1,24}\|>|</?tool_call>")
_THINKING, _THOUGHT = "<think>", re.compile(r"^[ \t]*</think>[ \t]*$", re.M)
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


class Block(NamedTuple):
    """A fenced block: the word after its fence in lower case, and its text."""

    name: str
    text: str


class CodeAction(NamedTuple):
    """Run this program; `thought` is the text before it."""

    thought: str
    code: str


class FinalAnswer(NamedTuple):
    """The task is done, and this is the answer."""

    text: str


class Unusable(NamedTuple):
    """Nothing can be done; `why` is told to the model."""

    why: str


Action = CodeAction | FinalAnswer | Unusable


def read_reply(reply: ModelReply) -> Action:
    """Return the action that a reply asks for; a reply is never executed in part."""
    text = _CONTROL.sub("", _without_thinking(reply.text))
    if reply.requests:
        return _requested(text, reply.requests)
    blocks, is_open = fenced_blocks(text)
    if code := [each.text for each in blocks if each.name in _PYTHON]:
        return CodeAction(text.partition(_FENCE)[0].strip(), "\n".join(code))
    if reply.finish in ("length", "cut"):
        return Unusable("it ended in the middle: it was too long, or the server stopped")
    if blocks or is_open:
        return Unusable("it has a code block that does not end, or is not Python")
    if action := _ACTION.search(text):
        return _react(text, action)
    if answer := _ANSWER.search(text):
        return FinalAnswer(text[answer.end() :].strip())
    if not text.strip():
        return Unusable("it is empty")
    return Unusable("it has no code block, no Action and no Final Answer")


def _without_thinking(text: str) -> str:
    """Return what follows the thoughts that a reasoning model writes first: drafts of programs in them
    are not to be run.  Some servers leave out the tag that opens them."""
    if text.lstrip().startswith(_THINKING):
        return text.partition("</think>")[2]
    ended = _THOUGHT.search(text)
    return text[ended.end() :] if ended else text


def fenced_blocks(text: str) -> tuple[list[Block], bool]:
    """Return the blocks between fences, and whether the last fence is open."""
    blocks: list[Block] = []
    name: str | None = None
    held: list[str] = []
    for each in text.splitlines():
        word = each.strip()
        if name is None and word.startswith(_FENCE) and _FENCE not in word[3:]:
            name, held = word[3:].strip().partition(" ")[0].lower(), []
        elif name is not None and word == _FENCE:
            blocks.append(Block(name, "\n".join(held)))
            name = None
        elif name is not None:
            held.append(each)
    return blocks, name is not None


def _requested(text: str, requests: tuple[ToolRequest, ...]) -> Action:
    """Return the program of tool calls; several are made in order."""
    lines = []
    for each in requests:
        arguments = _object(each.arguments)
        if arguments is None:
            return Unusable(f"the arguments of {each.name[:64]!a} are not a JSON object")
        lines.append(_call(each.name, arguments))
    return CodeAction(text.strip(), "\n".join(lines))


def _react(text: str, action: "re.Match[str]") -> Action:
    given = _INPUT.search(text, action.end())
    arguments = _object(text[given.end() :].strip().strip("`")) if given else {}
    if arguments is None:
        return Unusable("its Action Input is not a JSON object")
    return CodeAction(text[: action.start()].strip(), _call(action[1], arguments))


def _call(name: str, arguments: dict[str, Any]) -> str:
    """Return Python that makes a call; names and values are literals, so nothing of them is code."""
    if name == RUN_PYTHON and isinstance(arguments.get("code"), str):
        return str(arguments["code"])
    if name in ("final_answer", "FinalResponse"):
        return f"final_answer({next(iter(arguments.values()), None)!r})"
    return f"execute_tool({name!r}, {arguments!r})"


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, also with a comma too many; None if it is not one."""
    for candidate in (text, _TRAILING_COMMA.sub(r"\1", text)):
        try:
            found = msgspec.json.decode(candidate.strip() or "{}")
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else None
    return None
