"""The files of an agent's tools as files of its programs: this module's text runs in the cell.

A file that file_write wrote can be opened below /workspace; file_read and csv_process see a file that a
program wrote there. It imports no module of cellwright; its calls are recorded as those of the program.
"""

import os
from collections.abc import Awaitable, Callable, Generator
from typing import Any

_READING = ("file_read", "csv_process")
Steps = Generator[tuple[str, dict[str, Any]], Any, Any]


def share(tools: Any, place: str = "/workspace") -> None:
    """Replace the file tools in the module `tools`, and its `call_tool`, by ones that share files."""
    call: Callable[..., Any] = tools.call_tool
    known: dict[str, object] = {}  # path -> the text that the tools know

    def steps(name: str, given: dict[str, Any]) -> Steps:
        path = given.get("filepath")
        if name in _READING and isinstance(path, str):
            text = _text(place, path)
            if text is not None and known.get(path) != text:
                yield "file_write", {"filepath": path, "content": text}
                known[path] = text
        answer = yield name, given
        if name == "file_write":
            _keep(place, known, path, given.get("content"))
        elif name == "file_read":
            _keep(place, known, path, answer.get("content"))
        return answer

    def call_tool(name: str, args: Any = None) -> Any:
        """Call a tool by its name; in a coroutine, await it."""
        if name not in (*_READING, "file_write") or not isinstance(args, dict):
            return call(name, args)
        path = args.get("filepath")
        if isinstance(path, str):  # normalised, because programs name a file in several ways
            args = {**args, "filepath": path.removeprefix(f"{place}/")}
        work = steps(name, args)
        return _answers(call, work, call(*next(work)))

    def file_read(filepath: str) -> Any:
        """Read a text file of the workspace."""
        return call_tool("file_read", {"filepath": filepath})

    def file_write(filepath: str, content: str) -> Any:
        """Write a text file of the workspace, which can be opened too."""
        return call_tool("file_write", {"filepath": filepath, "content": content})

    def csv_process(filepath: str, **given: Any) -> Any:
        """Read a CSV file of the workspace, choosing columns and rows."""
        return call_tool("csv_process", {"filepath": filepath, **given})

    tools.__dict__.update(
        call_tool=call_tool, file_read=file_read, file_write=file_write, csv_process=csv_process
    )


def _answers(call: Callable[..., Any], work: Steps, answer: Any) -> Any:
    if isinstance(answer, Awaitable):
        return _answers_later(call, work, answer)
    while True:
        try:
            answer = call(*work.send(answer))
        except StopIteration as end:
            return end.value


async def _answers_later(call: Callable[..., Any], work: Steps, answer: Any) -> Any:
    while True:
        given = await answer  # outside of `try`, because its exceptions belong to the program
        try:
            answer = call(*work.send(given))
        except StopIteration as end:
            return end.value


def _text(place: str, path: str) -> str | None:
    """Return the text of a program's file; None if it has no such file, or one that is not text."""
    try:
        with open(os.path.join(place, path), encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def _keep(place: str, known: dict[str, object], path: Any, text: Any) -> None:
    """Write a file of the tools for the program; without room for it, only the tools have it."""
    target = os.path.join(place, path)
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        known[path] = text
    except (OSError, ValueError, TypeError):
        known.pop(path, None)
