"""A user's program in asyncio."""

import asyncio

from cellwright import BusyError, CellwrightError, Sandbox, SandboxStatus, Workspaces


async def show(stream: str, data: bytes) -> None:
    print(stream, data.decode())


async def main() -> int:
    async with await Sandbox.create(policy={"extends": "strict"}) as sandbox:
        result = await sandbox.aexecute("print(1)", on_output=show, collect=["*.csv"])
        run = sandbox.start("print(2)", plain=True)
        async for stream, data in run.output():
            print(stream, len(data))
        async with sandbox.session(workspace="mine") as session:
            await session.aupload("a.txt", "text")
            content: bytes = await session.adownload("a.txt")
        status: SandboxStatus = (await run.aresult()).status
    return len(content) if status is SandboxStatus.COMPLETED and result.ok else 0


if __name__ == "__main__":
    try:
        Workspaces(wait_seconds=1.0).list()
        print(asyncio.run(main()))
    except BusyError as error:
        print(error.hint)
    except CellwrightError as error:
        print(error.what)
