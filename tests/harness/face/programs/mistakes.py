# ruff: noqa: B018, F401, I001
"""A user's program with mistakes, each of which a type checker must find."""

import asyncio

from cellwright import Policy, Sandbox, SandboxConfig, create_sandbox
from cellwright import Sandbx  # an unknown name

with Sandbox(polcy="strict") as sandbox:  # a wrong keyword
    sandbox.execute("1", time_out=5)  # a wrong keyword
    sandbox.execute("1", timeout="5")  # a wrong type
    sandbox.execute(1)  # a wrong type
    sandbox.start("1", on_output=print)  # a wrong keyword
    sandbox.execute("1").output  # an unknown attribute
    sandbox.session(langauge="bash")  # a wrong keyword
    sandbox.session().download(5)  # a wrong type
    sandbox.program("cat", envs={})  # a wrong keyword
    asyncio.run(sandbox.aexecute("1", inputs=["a"]))  # a wrong type
    asyncio.run(Sandbox.create(pool="8"))  # a wrong type
    sandbox.plan.layer  # an unknown attribute
    sandbox.open()  # an unknown attribute

create_sandbox(timeout_seconds=5)  # a wrong keyword
SandboxConfig(max_memory="1")  # a wrong keyword
Policy(limit=None)  # a wrong keyword
