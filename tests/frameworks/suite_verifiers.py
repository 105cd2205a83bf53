"""verifiers' own command on a small task set with a scripted model; and its runtime's interface."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from verifiers.v1.errors import SandboxError

from cellwright.errors import PolicyError
from cellwright.harness.adapters.evaluation.verifiers import (
    CellEnv,
    VerifiersCellRuntime,
    provision,
)

sys.path.append(str(Path(__file__).parents[2]))
from tests.model_server import Exchange, serving

TASKS = """
import verifiers.v1 as vf
from cellwright.harness.adapters.evaluation.verifiers import CellEnv


class Counting(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime):
        await runtime.write("words.txt", b"one two three")

    @vf.reward(weight=1.0)
    async def counted(self, runtime) -> float:
        try:
            return float((await runtime.read("answer.txt", max_bytes=100)).strip() == b"3")
        except vf.SandboxError:
            return 0.0


class CountingTasks(vf.Taskset[Counting, vf.TasksetConfig]):
    def load(self):
        return [Counting(vf.TaskData(prompt="Count the words."), self.config.task)]


__all__ = ["CountingTasks", "CellEnv"]
"""


def reply(finish: str, **delta: object) -> Callable[[Exchange], None]:
    """Answer with one event that has every field."""

    def event(choices: list[object], **more: object) -> dict[str, object]:
        kind = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return kind | {"choices": choices} | more

    def answer(exchange: Exchange) -> None:
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        exchange.stream(
            event([{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}]),
            event([{"index": 0, "delta": {}, "finish_reason": finish}]),
            event([], usage=usage),
        )

    return answer


def calling(command: str) -> Callable[[Exchange], None]:
    arguments = json.dumps({"command": command})
    function = {"name": "bash", "arguments": arguments}
    call = {"index": 0, "id": "c1", "type": "function", "function": function}
    return reply("tool_calls", tool_calls=[call])


def evaluate(place: Path, url: str) -> tuple[str, list[dict[str, object]]]:
    """Run the command; return what it printed, and the traces."""
    (place / "counting_v1.py").write_text(TASKS)
    env = {
        "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(place), "KEY": "k",
    }  # fmt: skip
    done = subprocess.run(
        [Path(sys.executable).with_name("vf-eval"), "counting-v1", "--env.agent.harness.id", "bash",
         "--model", "m", "--client.base-url", url, "--client.api-key-var", "KEY", "--no-push",
         "--no-rich", "-o", "out"],
        cwd=place, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    traces = [
        json.loads(line)
        for path in (place / "out").rglob("traces.jsonl")
        for line in path.read_text().splitlines()
    ]
    return done.stdout + done.stderr, traces


def test_the_command_evaluates_a_scripted_model(tmp_path: Path) -> None:
    command = "id -un; cat /etc/shadow; wc -w < words.txt > answer.txt"
    with serving([calling(command), reply("stop", content="Done.")]) as server:
        printed, traces = evaluate(tmp_path, server.url)
    assert "reward=1.000" in printed, printed
    assert len(traces) == 1, printed
    (_, second) = server.requests
    (told,) = [each["content"] for each in second["messages"] if each["role"] == "tool"]
    assert told.startswith("cell\n")
    assert "/etc/shadow: No such file" in told


async def test_a_task_with_an_image_says_that_it_needs_one() -> None:
    task = SimpleNamespace(data=SimpleNamespace(image="debian:12", idx=0))
    with pytest.raises(PolicyError, match="needs the image 'debian:12', and cellwright runs tasks"):
        await CellEnv.run(CellEnv.__new__(CellEnv), task, None)


@pytest_asyncio.fixture(scope="module")
async def runtime() -> AsyncIterator[VerifiersCellRuntime]:
    async with provision() as made:
        yield made


async def test_commands_have_an_exit_code_both_streams_and_variables(
    runtime: VerifiersCellRuntime,
) -> None:
    done = await runtime.run(["sh", "-c", "echo $A $B; pwd; echo err >&2; exit 3"], {"A": "1"})
    assert (done.exit_code, done.stdout, done.stderr) == (3, "1\n/workspace\n", "err\n")
    view = runtime.with_env({"B": "2"})
    assert (await view.run(["sh", "-c", "echo $A $B"], {"A": "1"})).stdout == "1 2\n"
    assert await runtime.alive()


async def test_files_are_read_and_written_in_the_working_directory(
    runtime: VerifiersCellRuntime,
) -> None:
    await runtime.write("a/b", b"\0" * 300_000)
    assert await runtime.read("/workspace/a/b") == b"\0" * 300_000
    assert await runtime.read("a/b", max_bytes=300_000) == b"\0" * 300_000
    with pytest.raises(SandboxError, match="over the 5 byte limit"):
        await runtime.read("a/b", max_bytes=5)
    for path in ("missing", "/etc/shadow", "/workspace"):
        with pytest.raises(SandboxError):
            await runtime.read(path)
    await runtime.write("/logs/artifacts/x", b"1")
    assert await runtime.read("/logs/artifacts/x") == b"1"


async def test_a_script_runs_in_the_cell_with_its_environment(
    runtime: VerifiersCellRuntime,
) -> None:
    script = '# /// script\n# requires-python = ">=3.10"\n# dependencies = []\n# ///\n'
    script += "import os, sys\nprint(os.getuid(), sys.argv[1:], os.path.exists('/etc/shadow'))"
    done = await runtime.run_uv_script(script, ["a b"])
    assert (done.exit_code, done.stdout) == (0, "1000 ['a b'] False\n"), done
    first = await runtime.prepare_uv_script(script, activate=False)
    assert first[0].endswith("/bin/python3") or first[0].endswith("/bin/python")


async def test_only_the_endpoints_of_the_rollout_are_reached(runtime: VerifiersCellRuntime) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 300_000)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    ports = [each.sockets[0].getsockname()[1] for each in (server, other)]

    async def asked(port: int) -> tuple[int, int]:
        fetch = "import sys, urllib.request as r\nprint(len(r.urlopen(sys.argv[1]).read()))"
        done = await runtime.run(["python3", "-c", fetch, f"http://127.0.0.1:{port}/"], {})
        return done.exit_code, int(done.stdout or 0)

    assert (await asked(ports[0]))[0] == 1
    await runtime.prepare_execution([f"http://127.0.0.1:{ports[0]}/v1"])
    await runtime.prepare_execution([f"http://127.0.0.1:{ports[0]}/mcp", "https://example.org/x"])
    assert await asyncio.gather(*(asked(ports[0]) for _ in range(3))) == [(0, 300_000)] * 3
    assert (await asked(ports[1]))[0] == 1
    server.close()
    other.close()


async def test_a_server_runs_in_the_background(runtime: VerifiersCellRuntime) -> None:
    await runtime.run_background(["sh", "-c", "echo up; exec sleep 600"], {}, "server.log")
    for _ in range(200):
        if (await runtime.run(["cat", "server.log"], {})).stdout == "up\n":
            break
    else:
        raise AssertionError("it did not start")
    assert (await runtime.run(["pgrep", "-x", "sleep"], {})).exit_code == 0


async def test_a_runtime_that_was_stopped_says_so() -> None:
    async with provision() as made:
        assert (await made.run(["true"], {})).exit_code == 0
    assert made.stopped
    with pytest.raises(SandboxError):
        await made.run(["true"], {})
    made.cleanup()
