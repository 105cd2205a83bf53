"""An agent with approvals: a model solves a task by programs, and waits until a person decides.

Needs the extra `agent`.  MODEL_URL is the address of a model's server, such as
http://127.0.0.1:8080/v1; without it a script takes the place of the model, and the rest is real.
"""

import os
from collections.abc import Sequence
from typing import Any

from cellwright import tool
from cellwright.agent import Agent, Message, ModelReply

TASK = "Refund order 17, and tell me what was paid."
SCRIPT = (  # replies of the model; each is a program
    "```python\nimport tools\norder = tools.find_order(number=17)\norder\n```",
    "```python\nsaid = tools.refund(number=17, amount=order['paid'])\nfinal_answer(said)\n```",
    "```python\nfinal_answer('The refund was refused.')\n```",
)


class ScriptedModel:
    """Says one line of the script after the other."""

    name, context_tokens = "scripted", 16_384

    def ask(self, messages: Sequence[Message], *_: Any, **__: Any) -> ModelReply:
        return ModelReply(text=SCRIPT[sum(each.role == "assistant" for each in messages)])


@tool
def find_order(number: int) -> dict[str, int]:
    """Find an order."""
    return {"number": number, "paid": 25}


@tool(risky=True)
def refund(number: int, amount: int) -> str:
    """Pay the money of an order back."""
    return f"paid {amount} for order {number}"


def main() -> None:
    model = os.environ.get("MODEL_URL") or ScriptedModel()
    with Agent(model, tools=[find_order, refund]) as agent:
        result = agent.run(TASK)
        while result.status == "paused":
            for waiting in agent.pending():
                print(f"{waiting.tool} {waiting.arguments}: approve? ", end="")
                is_approved = input() == "yes"
                decide = agent.calls.approve if is_approved else agent.calls.reject
                decide(waiting.approval)
                print("approved" if is_approved else "refused")
            result = agent.resume(result.run_id)
        print(result.status, result.answer or result.reason)


if __name__ == "__main__":
    main()
