"""The behaviour that AutoGen asks of a code executor, and what a cell adds."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeResult

from cellwright import PolicyError
from cellwright.harness.adapters.autogen import AutoGenCellExecutor


@pytest_asyncio.fixture(scope="module")
async def executor() -> AsyncIterator[AutoGenCellExecutor]:
    async with AutoGenCellExecutor(pool=0, timeout=30) as made:
        yield made


async def run(executor: AutoGenCellExecutor, *blocks: tuple[str, str]) -> CodeResult:
    given = [CodeBlock(code, language) for code, language in blocks]
    return await executor.execute_code_blocks(given, CancellationToken())


async def test_blocks_run_in_order_in_one_session(executor: AutoGenCellExecutor) -> None:
    done = await run(
        executor,
        ("x = 20\nprint('one')", "python"),
        ("echo two; echo three >&2", "bash"),
        ("x + 1", "Python"),
    )
    assert done == CodeResult(0, "one\ntwo\nthree\n21\n")


@pytest.mark.parametrize(
    ("code", "language"), [("1/0", "python"), ("exit 3", "sh"), ("1", "cobol")]
)
async def test_a_block_that_fails_ends_the_rest(
    executor: AutoGenCellExecutor, code: str, language: str
) -> None:
    done = await run(executor, (code, language), ("print('never')", "python"))
    assert done.exit_code == (3 if language == "sh" else 1)
    assert "never" not in done.output


async def test_a_cancelled_block_is_interrupted_and_variables_stay(
    executor: AutoGenCellExecutor,
) -> None:
    await run(executor, ("kept = 7", "python"))
    token = CancellationToken()
    asyncio.get_running_loop().call_later(0.3, token.cancel)
    with pytest.raises(asyncio.CancelledError):
        await executor.execute_code_blocks([CodeBlock("while True: pass", "python")], token)
    assert (await run(executor, ("kept", "python"))).output == "7\n"


@pytest.mark.parametrize(
    ("code", "language"), [("while True: pass", "python"), ("sleep 60", "bash")]
)
async def test_a_block_that_takes_too_long_raises_timeout_error(code: str, language: str) -> None:
    async with AutoGenCellExecutor(pool=0, timeout=0.5) as executor:
        with pytest.raises(TimeoutError):
            await run(executor, (code, language))


async def test_restart_begins_with_nothing(executor: AutoGenCellExecutor) -> None:
    await run(executor, ("kept = 7", "python"))
    await executor.restart()
    assert "NameError" in (await run(executor, ("kept", "python"))).output


async def test_a_program_does_not_see_the_host(executor: AutoGenCellExecutor) -> None:
    assert "FileNotFoundError" in (await run(executor, ("open('/etc/shadow')", "python"))).output


async def test_invalid_arguments_are_refused_at_once() -> None:
    with pytest.raises(PolicyError):
        async with AutoGenCellExecutor(policy="nosuch"):
            pass
