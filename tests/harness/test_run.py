"""Executions in the background: handles and coroutines."""

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cellwright import ClosedError, PolicyError, PoolSettings, Sandbox, SandboxStatus
from cellwright.testing import inspect
from tests.conftest import ROOT, open_descriptors, policy_named, soon

STEADY = "import time\nprint('up', flush=True)\ntime.sleep(60)"


def test_output_comes_while_the_program_runs(strict: Sandbox) -> None:
    run = strict.start("print('first', flush=True)\nprint(input())", stdin="second")
    assert b"".join(data for _, data in run.output()) == b"first\nsecond\n"
    assert run.result().stdout == "first\nsecond\n"


def test_a_running_program_can_be_read_and_cancelled(strict: Sandbox) -> None:
    run = strict.start(STEADY)
    output = run.output()
    assert next(output) == ("stdout", b"up\n")
    assert run.status is SandboxStatus.RUNNING
    run.cancel()
    result = run.result()
    assert (result.status, result.reason) == (SandboxStatus.CANCELLED, "cancelled")
    assert result.stdout == "up\n"
    assert run.status is SandboxStatus.CANCELLED


def test_output_ends_after_a_cancel(strict: Sandbox) -> None:
    """A reader that waits in one thread must not wait for ever when another thread cancels."""
    run = strict.start(STEADY)
    chunks: list[tuple[str, bytes]] = []
    up = threading.Event()

    def read() -> None:
        for chunk in run.output():
            chunks.append(chunk)
            up.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert up.wait(60)
    run.cancel()
    assert run.result().reason == "cancelled"
    reader.join(60)
    assert not reader.is_alive()
    assert chunks == [("stdout", b"up\n")]


def test_output_after_the_result_ends(strict: Sandbox) -> None:
    run = strict.start("print('x')")
    run.result()
    done = threading.Event()

    def read() -> None:
        list(run.output())
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(60)


def test_output_asked_for_twice_ends_twice(strict: Sandbox) -> None:
    run = strict.start("print('x')")
    assert list(run.output()) == [("stdout", b"x\n")]
    done = threading.Event()

    def read() -> None:
        list(run.output())
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(60)
    run.result()


def test_cancelling_twice_and_after_the_end_is_harmless(strict: Sandbox) -> None:
    run = strict.start("1 + 1")
    result = run.result()
    run.cancel()
    run.cancel()
    assert run.result() is result
    assert result.value == 2


@pytest.mark.parametrize("cancel", ["x", None, True, 10**12, -2])
def test_only_an_open_descriptor_can_cancel(strict: Sandbox, cancel: Any) -> None:
    with pytest.raises(PolicyError, match="cancel: must be an open descriptor, got"):
        strict.execute("1", cancel=cancel)


def test_cancelling_before_the_cell_is_up_works(strict: Sandbox) -> None:
    for _ in range(20):
        run = strict.start(STEADY)
        run.cancel()
        assert run.result().reason == "cancelled"


def test_the_result_can_be_asked_for_by_several_threads(strict: Sandbox) -> None:
    run = strict.start("import time; time.sleep(0.05); 'v'")
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(run.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert len(set(map(id, results))) == 1


def test_a_slow_reader_holds_the_guest_and_not_our_memory(strict: Sandbox) -> None:
    run = strict.start("import os\nfor _ in range(600): os.write(1, b'x' * 65536)\n'end'")
    total = sum(len(data) for _, data in run.output())
    assert total == 600 * 65536
    assert run.result().value == "end"


@pytest.mark.parametrize(
    "read",
    [
        "for stream, data in run.output(): work(data)\n    result = run.result()",
        "result = box.execute(CODE, on_output=lambda stream, data: work(data))",
    ],
    ids=["output", "on_output"],
)
def test_a_hundred_megabytes_and_a_slow_reader_cost_little_memory(read: str) -> None:
    """By the kernel's count of a process that does nothing else."""
    code = f"""
import hashlib, resource
from cellwright import Sandbox
from tests.conftest import policy_named
CODE = "import os\\nfor _ in range(1600): os.write(1, b'x' * 65536)\\n'end'"
total = 0

def work(data):  # takes the reader ten times longer than the writer
    global total
    total += len(data)
    for _ in range(4): hashlib.sha256(data).digest()

with Sandbox(policy=policy_named("strict"), pool=0) as box:
    box.execute("print(1)", on_output=lambda stream, data: None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = box.start(CODE) if {"run." in read} else None
    {read}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(result.value, total == 1600 * 65536, result.truncated["stdout"], grown // 1024 < 24, grown)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split()[:4] == ["end", "True", str(1600 * 65536 - 100_000), "True"], done


def test_arguments_that_make_no_sense_are_raised_where_the_result_is_asked_for(
    strict: Sandbox,
) -> None:
    run = strict.start("1", timeout=-1)
    assert list(run.output()) == []
    with pytest.raises(PolicyError, match="timeout"):
        run.result()


def test_a_rejected_program_is_a_result_of_the_handle_too(strict: Sandbox) -> None:
    assert strict.start("").result().status is SandboxStatus.REJECTED


def test_handles_leave_no_descriptor_behind(strict: Sandbox) -> None:
    strict.start("1").result()
    before = open_descriptors()
    for _ in range(20):
        strict.start("print(1)").result()
    assert open_descriptors() <= before  # the first may have had some still open


def test_a_handle_that_is_dropped_leaves_no_descriptor_behind(strict: Sandbox) -> None:
    strict.start("1").result()
    before = open_descriptors()
    for _ in range(20):
        run = strict.start("1")
        list(run.output())
        run._background.join(60)
        del run
    assert soon(lambda: open_descriptors() <= before)


# asyncio


def test_aexecute_is_execute(strict: Sandbox) -> None:
    result = asyncio.run(strict.aexecute("x + 1", inputs={"x": 1}))
    assert result.value == 2


def test_aexecute_runs_many_at_once(strict: Sandbox) -> None:
    async def many() -> list[object]:
        runs = (strict.aexecute("n * n", inputs={"n": n}) for n in range(30))
        return [result.value for result in await asyncio.gather(*runs)]

    assert asyncio.run(many()) == [n * n for n in range(30)]


def test_aexecute_takes_no_thread_of_the_loops_own_executor(strict: Sandbox) -> None:
    """More executions run at once than that has threads, and while it has none to give."""
    go_on = threading.Event()

    async def all_at_once() -> int:
        begun, loop = asyncio.Semaphore(0), asyncio.get_running_loop()
        executor = ThreadPoolExecutor(1)
        loop.set_default_executor(executor)
        blocked = asyncio.create_task(asyncio.to_thread(go_on.wait, 60))

        def on_output(stream: str, data: bytes) -> None:
            loop.call_soon_threadsafe(begun.release)

        code = "print('up', flush=True)\nimport time\ntime.sleep(60)"
        tasks = [asyncio.create_task(strict.aexecute(code, on_output=on_output)) for _ in range(12)]
        for _ in tasks:
            await asyncio.wait_for(begun.acquire(), 20)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        go_on.set()
        await blocked
        return sum(isinstance(each, asyncio.CancelledError) for each in ended)

    assert asyncio.run(all_at_once()) == 12


def test_aexecute_runs_as_many_at_once_as_the_sandbox_and_the_rest_waits() -> None:
    async def many() -> tuple[list[object], int]:
        runs = (sandbox.aexecute("n", inputs={"n": n}) for n in range(9))
        values = [result.value for result in await asyncio.gather(*runs)]
        waiting = asyncio.create_task(sandbox.aexecute(STEADY))
        queued = [asyncio.create_task(sandbox.aexecute(STEADY)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in queued:  # tasks without a thread end at once
            task.cancel()
        await asyncio.wait(queued)
        waiting.cancel()
        await asyncio.wait([waiting])
        return values, len(threads())

    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if "aexecute_" in each.name]

    with Sandbox(policy=policy_named("strict"), pool=PoolSettings(size=0, running=2)) as sandbox:
        before = len(threads())
        values, most = asyncio.run(many())
        assert values == list(range(9))
        assert most - before <= 2
    assert soon(lambda: len(threads()) == before)


def test_aexecute_does_not_block_the_loop(strict: Sandbox) -> None:
    async def both() -> bool:
        first = asyncio.create_task(strict.aexecute("import time; time.sleep(0.2); 1"))
        turns = 0
        while not first.done():
            turns += 1
            await asyncio.sleep(0)
        return turns > 10 and (await first).value == 1

    assert asyncio.run(both())


def test_cancelling_the_task_ends_the_cell(strict: Sandbox) -> None:
    async def cancel_it() -> list[str]:
        heard: list[str] = []
        up = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_output(stream: str, data: bytes) -> None:
            heard.append(data.decode())
            loop.call_soon_threadsafe(up.set)

        task = asyncio.create_task(strict.aexecute(STEADY, on_output=on_output))
        await asyncio.wait_for(up.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        return heard

    before = len(inspect(strict).cell_pids())
    assert asyncio.run(cancel_it()) == ["up\n"]
    assert len(inspect(strict).cell_pids()) == before


def test_cancelling_the_task_twice_still_ends_the_cell(strict: Sandbox) -> None:
    """A second cancel arrives while the first waits for the cell to die, and does not end the wait."""

    async def cancel_twice() -> None:
        up = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_output(stream: str, data: bytes) -> None:
            loop.call_soon_threadsafe(up.set)

        task = asyncio.create_task(strict.aexecute(STEADY, on_output=on_output))
        await asyncio.wait_for(up.wait(), 60)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)

    asyncio.run(cancel_twice())
    assert not inspect(strict).cell_pids()
    assert strict.execute("1 + 1").value == 2


def test_wait_for_with_a_timeout_ends_the_cell(strict: Sandbox) -> None:
    async def hurry() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(strict.aexecute(STEADY), 0.2)

    asyncio.run(hurry())
    assert not inspect(strict).cell_pids()


def test_an_interrupt_in_the_main_thread_ends_the_cell(strict: Sandbox) -> None:
    def interrupt(stream: str, data: bytes) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        strict.execute(STEADY, on_output=interrupt)
    assert strict.execute("1 + 1").value == 2


async def ticks(until: "asyncio.Task[object]", most: int = 100) -> int:
    """Return how often the event loop went round before a task was done, at most `most`."""
    count = 0
    while not until.done() and count < most:
        await asyncio.sleep(0)
        count += 1
    return count


def test_output_is_read_in_an_event_loop_that_goes_on(strict: Sandbox) -> None:
    """A reader that kept the loop from going on would do so until the program ends."""

    async def read() -> tuple[bytes, int]:
        run = strict.start(f"print(input(), flush=True)\n{STEADY}", stdin="first")
        output = b""

        async def collect() -> None:
            nonlocal output
            async for _, data in run.output():
                output += data

        reading = asyncio.create_task(collect())
        turns = await ticks(reading)
        while b"up" not in output and not reading.done():
            await asyncio.sleep(0)
        run.cancel()
        await reading
        return output, turns

    assert asyncio.run(read()) == (b"first\nup\n", 100)


def test_a_reader_in_an_event_loop_can_be_cancelled_and_leaves_the_rest(strict: Sandbox) -> None:
    async def read() -> tuple[list[tuple[str, bytes]], str]:
        run = strict.start(STEADY)
        assert await anext(run.output()) == ("stdout", b"up\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(run.output()), 0.05)
        run.cancel()
        return [chunk async for chunk in run.output()], (await run.aresult()).reason

    assert asyncio.run(read()) == ([], "cancelled")


def test_a_sandbox_and_a_session_are_async_context_managers() -> None:
    async def use() -> tuple[object, bytes, str]:
        making = asyncio.create_task(Sandbox.create(policy=policy_named("strict"), pool=0))
        assert await ticks(making) > 2  # the event loop goes on
        async with await making as sandbox, sandbox.session() as session:
            await session.aupload("a.txt", "text")
            result = await session.aexecute("open('a.txt').read()")
            content = await session.adownload("a.txt")
        with pytest.raises(ClosedError):
            sandbox.execute("1")
        return result.value, content, session.lost

    assert asyncio.run(use()) == ("text", b"text", "it was closed")


def test_an_upload_that_is_cancelled_ends_and_the_session_lives(strict: Sandbox) -> None:
    async def use() -> object:
        async with strict.session() as session:
            run = session.start(STEADY)
            assert await anext(run.output())
            uploading = asyncio.create_task(session.aupload("a.txt", "text"))
            await asyncio.sleep(0)
            uploading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await uploading
            run.cancel()
            await run.aresult()
            return (await session.aexecute("import os; os.listdir()")).value

    assert asyncio.run(use()) == []


def test_a_sandbox_whose_making_was_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    close = Sandbox.close

    def note(self: Sandbox) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(Sandbox, "close", note)

    async def cancel() -> None:
        making = asyncio.create_task(Sandbox.create(policy=policy_named("strict"), pool=0))
        await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(cancel())
    assert closed.wait(30)
