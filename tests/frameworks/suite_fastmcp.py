"""Programs of FastMCP's code mode in cells: values, functions of the host, errors, limits."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fastmcp.exceptions import ToolError
from fastmcp.experimental.transforms.code_mode import CodeMode

from cellwright import PolicyError
from cellwright.harness.adapters.fastmcp import CellSandboxProvider


@pytest_asyncio.fixture(scope="module")
async def provider() -> AsyncIterator[CellSandboxProvider]:
    made = CellSandboxProvider(pool=0)
    CodeMode(sandbox_provider=made)
    yield made
    await made.aclose()


async def test_a_program_returns_or_ends_with_a_value(provider: CellSandboxProvider) -> None:
    assert await provider.run("return [1, 'a']") == [1, "a"]
    assert await provider.run("x + 1", inputs={"x": 1}) == 2
    assert await provider.run("x = '''\n  kept\n'''\nx") == "\n  kept\n"
    assert await provider.run("# nothing") is None


async def test_functions_of_the_host_are_awaited(provider: CellSandboxProvider) -> None:
    async def later(name: str, *, times: int = 1) -> str:
        await asyncio.sleep(0)
        return name * times

    functions = {"later": later, "now": lambda n: n + 1}
    code = "import asyncio\nreturn await asyncio.gather(later('a'), later('b', times=2), now(1))"
    assert await provider.run(code, external_functions=functions) == ["a", "bb", 2]


async def test_many_programs_run_at_once_with_functions_of_their_own(
    provider: CellSandboxProvider,
) -> None:
    async def one(number: int) -> int:
        return await provider.run("await me()", external_functions={"me": lambda: number})

    assert await asyncio.gather(*map(one, range(6))) == list(range(6))


async def test_a_function_that_fails_raises_in_the_program(provider: CellSandboxProvider) -> None:
    async def broken() -> None:
        raise ToolError("no such city")

    functions = {"broken": broken}
    code = "try:\n    await broken()\nexcept Exception as error:\n    return str(error)"
    assert "no such city" in await provider.run(code, external_functions=functions)
    with pytest.raises(ToolError, match="no such city"):
        await provider.run("await broken()", external_functions=functions)


async def test_what_fails_is_told(provider: CellSandboxProvider) -> None:
    for code, words in (
        ("open('/etc/shadow')", "FileNotFoundError"),
        ("return (", "SyntaxError"),
        ("import socket; socket.create_connection(('192.0.2.1', 80))", "PermissionError"),
    ):
        with pytest.raises(ToolError, match=words):
            await provider.run(code)


async def test_a_program_cannot_call_what_it_was_not_given(provider: CellSandboxProvider) -> None:
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def secret() -> str:
        await held
        return "s"

    other = asyncio.create_task(
        provider.run("await secret()", external_functions={"secret": secret})
    )
    for code in (
        "from tools import browse\nreturn [await browse(), await browse(server='')]",
        "call_tool('secret')",
        "_names",
    ):
        try:
            found = await provider.run(code)
        except ToolError as error:
            found = str(error)
        assert "host-" not in str(found)
    held.set_result(None)
    assert await other == "s"


async def test_a_cancelled_task_ends_the_program_and_its_functions(
    provider: CellSandboxProvider,
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    task = asyncio.create_task(provider.run("await slow()", external_functions={"slow": slow}))
    await asyncio.wait_for(begun.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 30)


async def test_a_program_has_a_time_limit() -> None:
    provider = CellSandboxProvider(pool=0, timeout=0.5)
    with pytest.raises(ToolError, match=r"0\.5 s"):
        await provider.run("while True: pass")
    await provider.aclose()
    with pytest.raises(PolicyError, match="those of FastMCP"):
        CellSandboxProvider(tools=[])
