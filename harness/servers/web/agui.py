"""AG-UI 1.0: a run of an agent as events, with interrupts for the calls that wait for approval.

Each program is a call of the tool `run_program`, and its observation the result.  A run that waits for
a person ends with the outcome `interrupt`, and goes on by a request with `resume`.
"""

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...agent.outcome import AgentEvent, AgentResult
from ...agent.transcript import COMPLETED, PAUSED
from ...runs.store import Approval
from ...text.terminal import harmless
from .approval_endpoints import approval_answer
from .problems import Problem

VERSION = "1.0"
PROGRAM = "run_program"
_YES = "approve"
_SCHEMA = {"type": "object", "properties": {_YES: {"type": "boolean"}}, "required": [_YES]}


class AguiEvents:
    """Translates what an agent tells; `tell` gets each event of the protocol."""

    def __init__(self, thread: str, run: str, tell: Callable[[dict[str, Any]], None]) -> None:
        self._ids = {"threadId": thread, "runId": run}
        self._run = run
        self._tell_event = tell
        self._messages = 0
        self._message = ""  # that is open
        self._program = ""  # whose result did not come yet

    def started(self) -> None:
        """Tell that the run has begun."""
        self._tell("RUN_STARTED", **self._ids, protocolVersion=VERSION)

    def on_text(self, text: str) -> None:
        """Tell a piece of the model's reply."""
        if not text:
            return
        if not self._message:
            self._message = self._next_message()
            self._tell("TEXT_MESSAGE_START", messageId=self._message, role="assistant")
        self._tell("TEXT_MESSAGE_CONTENT", messageId=self._message, delta=text)

    def on_event(self, event: AgentEvent) -> None:
        """Tell what happened in the run."""
        self._end_message()
        match event.kind:
            case "program":
                self._program = call = f"{self._run}-{event.step}"
                code = msgspec.json.encode({"code": event.text}).decode()
                self._tell("TOOL_CALL_START", toolCallId=call, toolCallName=PROGRAM)
                self._tell("TOOL_CALL_ARGS", toolCallId=call, delta=code)
                self._tell("TOOL_CALL_END", toolCallId=call)
            case "observation":
                self._end_program(event.text)
            case "unusable" | "tool":
                self._tell("CUSTOM", name=f"cellwright.{event.kind}", value=event.text)

    def ended(self, result: AgentResult) -> None:
        """Tell how the run ended."""
        self._end_message()
        if result.status == PAUSED:
            interrupts = [self._interrupt(each) for each in result.pending]
            self._finish({"type": "interrupt", "interrupts": interrupts}, {"task": result.run_id})
            return
        self._end_program("")  # without a result it would be one that the client has to make
        if result.status == COMPLETED:
            self.on_text(_text_of(result.answer))
            self._end_message()
            self._finish({"type": "success"}, {"task": result.run_id, "answer": result.answer})
        else:
            self._tell("RUN_ERROR", message=result.reason or result.status, code=result.status)

    def failed(self, problem: Problem) -> None:
        """Tell that the server could not go on."""
        self._end_message()
        self._tell("RUN_ERROR", message=problem.detail, code=problem.title)

    def _interrupt(self, waiting: Approval) -> dict[str, Any]:
        about = approval_answer(waiting)
        expires = datetime.datetime.fromtimestamp(waiting.expires, datetime.UTC)
        metadata = {"tool": about.tool, "arguments": about.arguments, "digest": about.digest}
        return {
            "id": waiting.approval, "reason": "approval", "toolCallId": self._program,
            "message": f"Call the tool {harmless(about.tool)!r}, once?\n{about.shown}",
            "responseSchema": _SCHEMA, "expiresAt": expires.isoformat(), "metadata": metadata,
        }  # fmt: skip

    def _finish(self, outcome: dict[str, Any], result: dict[str, Any]) -> None:
        self._tell("RUN_FINISHED", **self._ids, outcome=outcome, result=result)

    def _end_program(self, observation: str) -> None:
        call, self._program = self._program, ""
        if call:
            message = self._next_message()
            about = {"messageId": message, "toolCallId": call, "role": "tool"}
            self._tell("TOOL_CALL_RESULT", **about, content=observation)

    def _end_message(self) -> None:
        message, self._message = self._message, ""
        if message:
            self._tell("TEXT_MESSAGE_END", messageId=message)

    def _next_message(self) -> str:
        self._messages += 1
        return f"{self._run}-message-{self._messages}"

    def _tell(self, type: str, **fields: Any) -> None:
        self._tell_event({"type": type, **fields})


def task_of(messages: Iterable[dict[str, Any]]) -> str:
    """Return the text of the last message of the user, empty without one."""
    texts = [_content(each.get("content")) for each in messages if each.get("role") == "user"]
    return texts[-1] if texts else ""


def is_yes(status: str, payload: object) -> bool:
    """Tell whether the answer to an interrupt approves the call."""
    return status == "resolved" and isinstance(payload, dict) and payload.get(_YES) is True


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(each.get("text", "")) for each in parts if isinstance(each, dict))


def _text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()
