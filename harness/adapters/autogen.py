"""`AutoGenCellExecutor`: the code executor of AutoGen's agents, in a cell."""

import asyncio
from typing import TYPE_CHECKING, Any

from ...policies.errors import SessionLost
from ...policies.policy import Policy
from ...runner.requests.result import SandboxResult
from ..text.hidden import advice
from .common.cell_sandbox_session import AdapterSession, missing

try:
    from autogen_core import CancellationToken
    from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
except ImportError as error:
    raise missing("autogen", "autogen", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

_PYTHON, _SHELLS = ("python", "py", "python3"), ("bash", "sh", "shell")


class AutoGenCellExecutor(CodeExecutor):
    """Runs the code blocks of an agent in one session, whose variables and files stay until `restart`.

    `policy`, default the profile workshop, and `options` are arguments of `Sandbox`.  `timeout`:
    seconds of each block.  Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, *, policy: "PolicyLike | None" = None, timeout: float | None = None, **options: Any
    ) -> None:
        self._cell = AdapterSession(policy=policy, **options)
        self._timeout = timeout

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> CodeResult:
        """Run the blocks in order until one fails; cancelling the token ends the one that runs.

        Raises TimeoutError if a block takes too long.
        """
        output: list[str] = []
        for block in code_blocks:
            running = asyncio.ensure_future(self._run(block))
            cancellation_token.link_future(running)
            code, text = await running
            output.append(text)
            if code:
                return CodeResult(code, "".join(output))
        return CodeResult(0, "".join(output))

    async def _run(self, block: CodeBlock) -> tuple[int, str]:
        language = block.language.lower()
        if language in _PYTHON:
            session = await self._cell.in_thread(lambda: self._cell.session)
            result = await session.aexecute(block.code, timeout=self._timeout)
            return _as_code_result(result, self._cell.sandbox.policy)
        if language not in _SHELLS:
            return 1, f"unknown language {block.language[:40]!r}: use python or bash\n"
        name = "bash" if language == "bash" else "sh"
        done = await self._cell.arun(
            [name, "-c", block.code], timeout=self._timeout, is_merged=True
        )
        if done.timed_out:
            raise TimeoutError(f"the block took longer than its timeout: {done.text[0][-1000:]}")
        return done.exit_code, done.text[0]

    async def start(self) -> None:
        """Make the sandbox and the session, which the first block would else do."""
        await self._cell.in_thread(lambda: self._cell.session)

    async def stop(self) -> None:
        """End the session, and the sandbox of this executor."""
        await self._cell.aclose()

    async def restart(self) -> None:
        """Begin with a new session, without variables and files."""
        await self._cell.in_thread(self._cell.restart)


def _as_code_result(result: SandboxResult, policy: Policy) -> tuple[int, str]:
    """Return the exit code and the output of a program, with the value of its last expression."""
    if result.reason in ("wall_time", "cpu_time"):
        raise TimeoutError(f"the block took too long: {result.error}")
    if result.session_lost:
        raise SessionLost(f"the cell has ended: {result.error or result.reason}", "call restart()")
    text = result.stdout + result.stderr
    if result.ok and result.value is not None:
        text += f"{result.value!r}\n"
    notes = advice(result.notices, result.hints, policy, is_ok=result.ok)
    text += "".join(f"{each}\n" for each in notes)
    return (0 if result.ok else result.exit_code or 1), text
