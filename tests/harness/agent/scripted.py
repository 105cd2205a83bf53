"""`ScriptedModel`: a model in this process that replies with a script."""

from collections.abc import Sequence
from typing import Any

from cellwright.harness.agent.prompts import USUAL, Message, ModelReply, OnText, Sampling

Script = Sequence[str | Exception]


class ScriptedModel:
    """Replies with a script, by the number of replies in the conversation."""

    name = "scripted"
    context_tokens = 16_384

    def __init__(self, script: Script, drafts: Script = ()) -> None:
        self.script, self.drafts = script, drafts
        self.asked: list[tuple[Sequence[Message], Sampling]] = []

    def ask(
        self, messages: Sequence[Message], sampling: Sampling = USUAL, *,
        schema: dict[str, Any] | None = None, on_text: OnText | None = None,
    ) -> ModelReply:  # fmt: skip
        self.asked.append((messages, sampling))
        is_draft = "You write one tool" in messages[0].text
        before = sum(each.role == "assistant" for each in messages)
        replies = self.drafts if is_draft else self.script
        reply = replies[min(before, len(replies) - 1)]
        if isinstance(reply, Exception):
            raise reply
        return ModelReply(text=reply, input_tokens=100, output_tokens=10)


def program(code: str) -> str:
    return f"```python\n{code}\n```"


def answer(code: str) -> str:
    return program(f"final_answer({code})")
