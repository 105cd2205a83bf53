# ruff: noqa: B018, F401, I001
"""A user's program with mistakes, each of which a type checker must find."""

import asyncio

from cellwright import (
    Broker,
    Policy,
    Runs,
    Sandbox,
    SandboxConfig,
    ToolFactory,
    ToolRegistry,
    create_sandbox,
)
from cellwright import Sandbx  # an unknown name


async def show(stream: str, data: bytes) -> None:
    print(stream, data)


with Sandbox(polcy="strict") as sandbox:  # a wrong keyword
    sandbox.execute("1", time_out=5)  # a wrong keyword
    sandbox.execute("1", timeout="5")  # a wrong type
    sandbox.execute(1)  # a wrong type
    sandbox.execute("1", on_output=len)  # a wrong type
    sandbox.execute("1", on_output=show)  # a wrong type
    sandbox.start("1", on_output=print)  # a wrong keyword
    sandbox.execute("1").output  # an unknown attribute
    sandbox.session(langauge="bash")  # a wrong keyword
    sandbox.session().download(5)  # a wrong type
    sandbox.program("cat", envs={})  # a wrong keyword
    asyncio.run(sandbox.aexecute("1", inputs=["a"]))  # a wrong type
    asyncio.run(Sandbox.create(pool="8"))  # a wrong type
    sandbox.plan.layer  # an unknown attribute
    sandbox.open()  # an unknown attribute

Sandbox(policy=5)  # a wrong type
Sandbox(tools=ToolRegistry())  # a wrong type
Broker(ToolRegistry())  # a wrong type
ToolFactory("tools.sqlite")  # a wrong type
Runs().start("1")  # a wrong type
create_sandbox(timeout_seconds=5)  # a wrong keyword
SandboxConfig(max_memory="1")  # a wrong keyword
Policy(limit=None)  # a wrong keyword
