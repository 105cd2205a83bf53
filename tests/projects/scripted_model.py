"""`ScriptedModel`: a model that answers by a script, with the protocols of Anthropic's messages, OpenAI's
chat completions and responses, and Gemini, as streams or whole.

The next step is chosen by the number of results of tools in the request, so that a request which is
repeated gets the same answer.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.projects.stage import Answer

MARK = "(reply {})"  # in replies that are text, by which they are counted
Value = dict[str, Any]


class Call(NamedTuple):
    """A call of one of the agent's tools."""

    tool: str
    arguments: Value


class ScriptedModel:
    """The script of one run of an agent, and the results of tools that the agent sent.

    A step is a call, or a text for agents that use no tools; the last one ends the turn.
    """

    def __init__(self, steps: Sequence[Call | str]) -> None:
        self.steps = steps
        self.results: dict[int, str] = {}
        self.has_ended = False
        self.requests: list[str] = []

    def answer(self, name: str, path: str, body: bytes) -> Answer:
        self.requests.append(f"{name}{path}")
        try:
            request: Value = json.loads(body or b"{}")
        except ValueError:
            return 400, "text/plain", b"not JSON\n"
        if "count_tokens" in path or "countTokens" in path:
            return _whole({"input_tokens": 10, "totalTokens": 10})
        for part, reply in (
            ("/messages", _messages), ("/responses", _responses), ("/chat/completions", _completions),
            ("enerateContent", _gemini),
        ):  # fmt: skip
            if part in path and body:
                return reply(
                    request, self._next(request), "stream" in path or bool(request.get("stream"))
                )
        return 404, "application/json", b'{"error": {"message": "not in the script"}}'

    def _next(self, request: Value) -> Call | str:
        results = list(_results(request))
        self.results |= dict(enumerate(results))
        texts = [each for each in self.steps if isinstance(each, str)]
        if len(texts) == len(self.steps):  # an agent without tools
            said = json.dumps(request)
            if "Name the commit" in said:
                return "Mend add"
            done = sum(MARK.format(number) in said for number in range(len(texts)))
            return texts[min(done, len(texts) - 1)]
        if not request.get("tools"):  # a title, or another summary
            return "Mend the sum"
        self.has_ended = len(results) >= len(self.steps) - 1
        return self.steps[min(len(results), len(self.steps) - 1)]


def _results(request: Value) -> list[str]:
    """Return the results of tools in a request of any of the protocols."""
    found = []
    for message in [
        *request.get("messages", []),
        *request.get("input", []),
        *request.get("contents", []),
    ]:
        if not isinstance(message, dict):
            continue
        if message.get("role") == "tool" or str(message.get("type")).endswith("call_output"):
            found.append(_text(message.get("content", message.get("output"))))
        content = message.get("content")
        parts = [*(content if isinstance(content, list) else []), *message.get("parts", [])]
        for part in parts:
            if isinstance(part, dict) and part.get("type") == "tool_result":
                found.append(_text(part.get("content")))
            elif isinstance(part, dict) and "functionResponse" in part:
                found.append(_text(part["functionResponse"].get("response")))
    return found


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            _text(each.get("text") if isinstance(each, dict) else each) for each in content
        )
    return json.dumps(content)


def _whole(value: Value) -> Answer:
    return 200, "application/json", json.dumps(value).encode()


def _stream(events: Sequence[Value | str], *, named: bool = False) -> Answer:
    lines = []
    for event in events:
        head = f"event: {event['type']}\n" if named and isinstance(event, dict) else ""
        lines.append(f"{head}data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
    return 200, "text/event-stream", "".join(lines).encode()


def _messages(request: Value, step: Call | str, streams: bool) -> Answer:
    number = len(_results(request))
    if isinstance(step, Call):
        block: Value = {"type": "tool_use", "id": f"toolu_{number}", "name": step.tool, "input": {}}
        change: Value = {"type": "input_json_delta", "partial_json": json.dumps(step.arguments)}
        full, reason = {**block, "input": step.arguments}, "tool_use"
    else:
        block, change = {"type": "text", "text": ""}, {"type": "text_delta", "text": step}
        full, reason = {"type": "text", "text": step}, "end_turn"
    usage = {"input_tokens": 10, "output_tokens": 5}
    message: Value = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": request.get("model"),
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    if not streams:
        return _whole({**message, "content": [full], "stop_reason": reason})
    return _stream([
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": change},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ], named=True)  # fmt: skip


def _completions(request: Value, step: Call | str, streams: bool) -> Answer:
    message: Value = {"role": "assistant", "content": None}
    if isinstance(step, Call):
        function = {"name": step.tool, "arguments": json.dumps(step.arguments)}
        call = {
            "index": 0,
            "id": f"call_{len(_results(request))}",
            "type": "function",
            "function": function,
        }
        message["tool_calls"], reason = [call], "tool_calls"
    else:
        message["content"], reason = step, "stop"
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    head = {"id": "chatcmpl-1", "created": 1, "model": request.get("model")}
    if not streams:
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return _whole({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    head["object"] = "chat.completion.chunk"
    changes: list[tuple[Value, str | None]] = [(message, None), ({}, reason)]
    events = [
        {**head, "choices": [{"index": 0, "delta": part, "finish_reason": end}]}
        for part, end in changes
    ]
    return _stream([*events, {**head, "choices": [], "usage": usage}, "[DONE]"])


def _responses(request: Value, step: Call | str, streams: bool) -> Answer:
    number = len(_results(request))
    item: Value = {"id": f"item_{number}", "status": "completed"}
    if isinstance(step, Call):
        arguments = json.dumps(step.arguments)
        item |= {
            "type": "function_call",
            "call_id": f"call_{number}",
            "name": step.tool,
            "arguments": arguments,
        }
    else:
        part = {"type": "output_text", "text": step, "annotations": []}
        item |= {"type": "message", "role": "assistant", "content": [part]}
    usage = {
        "input_tokens": 10, "output_tokens": 5, "total_tokens": 15,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    response = {
        "id": f"resp_{number}", "object": "response", "created_at": 1, "status": "completed",
        "model": request.get("model"), "output": [item], "usage": usage,
    }  # fmt: skip
    if not streams:
        return _whole(response)
    started = {**response, "status": "in_progress", "output": []}
    return _stream([
        {"type": "response.created", "response": started},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ], named=True)  # fmt: skip


def _gemini(request: Value, step: Call | str, streams: bool) -> Answer:
    part: Value = {"text": step}
    if isinstance(step, Call):
        part = {"functionCall": {"name": step.tool, "args": step.arguments}}
    elif _wants_json(request):
        part = {
            "text": json.dumps({"reasoning": "", "model_choice": "flash", "complexity_score": 1})
        }
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    reply = {"candidates": [candidate], "usageMetadata": usage}
    return _stream([reply]) if streams else _whole(reply)


def _wants_json(request: Value) -> bool:
    return bool(re.search(r'"responseMimeType": *"application/json"', json.dumps(request)))
