"""A long run through a model's server: its requests do not grow with its steps."""

from pathlib import Path

import pytest

from cellwright.agent import Agent, AgentLimits, ModelClient
from cellwright.harness.agent.prompts import estimated_tokens
from tests.conftest import policy_named
from tests.model_server import ModelServer, Reply, said, serving

pytestmark = pytest.mark.needs("userns")
STEPS = 150


class Counting(ModelServer):
    """Replies with the next step, however much of the conversation it is sent."""

    def reply(self, request: object) -> Reply:
        number = len(self.requests)
        if number == STEPS:
            return said("```python\nfinal_answer(x)\n```")
        return said(f"```python\nx = {number}\n'{number} ' * 200\n```")


def test_the_conversation_keeps_its_size(tmp_path: Path) -> None:
    with serving([], server=Counting([])) as server:
        model = ModelClient(server.url, key="", context_tokens=8192)
        with (
            model,
            Agent(
                model,
                policy=policy_named("strict"),
                directory=tmp_path,
                limits=AgentLimits(steps=STEPS),
            ) as agent,
        ):
            result = agent.run("count")
            loop_keeps = agent.show(result.run_id)[1]
    assert (result.answer, len(loop_keeps)) == (STEPS - 1, STEPS)
    sizes = [
        sum(estimated_tokens(each["content"]) for each in request["messages"])
        for request in server.requests
    ]
    assert max(sizes) <= 0.7 * 8192 + 100  # the note that few steps are left
    assert max(sizes[100:]) < 1.05 * max(sizes[:100])
    heads = {request["messages"][1]["content"] for request in server.requests}
    assert len(heads) == 1
