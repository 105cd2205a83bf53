"""Sandboxes of the OpenAI Agents SDK: what it asks of a client and a session, and what a cell adds."""

import asyncio
import io
import tarfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agents.editor import ApplyPatchOperation
from agents.sandbox import (
    ErrorCode,
    ExecTimeoutError,
    ExecTransportError,
    LocalSnapshotSpec,
    Manifest,
    SandboxError,
    SandboxPathGrant,
    User,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.entries import File
from agents.sandbox.errors import InvalidManifestPathError, PtySessionNotFoundError
from agents.sandbox.session import BaseSandboxClientOptions, SandboxSessionState

from cellwright import PolicyError, Sandbox
from cellwright.harness.adapters.common import cell_sandbox_session
from cellwright.harness.adapters.openai_agents import (
    CellSandboxClient,
    CellSandboxClientOptions,
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy="workshop", pool=0) as made:
        yield made


@pytest.fixture(scope="module")
def client(sandbox: Sandbox) -> CellSandboxClient:
    return CellSandboxClient(sandbox)


@pytest_asyncio.fixture(scope="module")
async def session(client: CellSandboxClient) -> AsyncIterator[Any]:
    manifest = Manifest(
        entries={"src/words.txt": File(content=b"one\ntwo\n")}, environment={"value": {"NAME": "v"}}
    )
    async with await client.create(manifest=manifest) as made:
        yield made


async def test_the_manifest_is_in_the_cell(session: Any) -> None:
    done = await session.exec("wc -l < src/words.txt; echo $NAME; pwd; ls /etc/shadow")
    assert done.stdout == b"2\nv\n/workspace\n"
    assert b"No such file" in done.stderr
    assert done.exit_code == 2
    assert await session.running()


async def test_arguments_reach_a_command_as_they_are(session: Any) -> None:
    done = await session.exec("printf", "%s|", "a b", "$HOME", "--", shell=False)
    assert done.stdout == b"a b|$HOME|--|"


async def test_a_missing_program_is_a_result(session: Any) -> None:
    assert (await session.exec("nosuch", shell=False)).exit_code == 127


async def test_a_command_that_takes_too_long_is_killed(session: Any) -> None:
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 60", timeout=0.3)


async def test_more_output_than_fits_is_said(session: Any) -> None:
    done = await session.exec("head -c 11000000 /dev/zero")
    assert len(done.stdout) == 10 * 1024 * 1024
    assert b"only the first 10485760 bytes" in done.stderr


@pytest.mark.parametrize("size", [0, 3, 300_000])
async def test_a_file_that_is_written_is_read(session: Any, size: int) -> None:
    await session.write(Path("deep/er/file"), io.BytesIO(b"x" * size))
    assert (await session.read(Path("deep/er/file"))).read() == b"x" * size
    assert await session.read_bounded(Path("deep/er/file"), max_bytes=2) == b"x" * min(2, size)
    assert [each.path for each in await session.ls("deep/er")] == ["/workspace/deep/er/file"]


async def test_a_missing_file_is_said(session: Any) -> None:
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("nosuch"))
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read_bounded(Path("nosuch"), max_bytes=1)


@pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd", "out/passwd"])
async def test_a_path_out_of_the_workspace_is_refused(session: Any, path: str) -> None:
    await session.exec("ln -sfn /etc out")
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path(path))
    with pytest.raises(InvalidManifestPathError):
        await session.write(Path(path), io.BytesIO(b"x"))


@pytest.mark.parametrize("name", ["-rf", "a\nb", "$(touch made)", "é", "a'b"])
async def test_odd_names_are_names(session: Any, name: str) -> None:
    await session.write(Path(name), io.BytesIO(b"kept"))
    assert (await session.read(Path(name))).read() == b"kept"
    await session.rm(name)
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path(name))


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "n" * 10_000_000])
async def test_impossible_names_are_errors_of_the_sdk(session: Any, name: str) -> None:
    with pytest.raises(SandboxError):
        await session.write(Path(name), io.BytesIO(b"x"))
    with pytest.raises(SandboxError):
        await session.read(Path(name))


async def test_a_patch_is_applied(session: Any) -> None:
    await session.apply_patch(
        ApplyPatchOperation(type="create_file", path="made.txt", diff="+one\n")
    )
    assert (await session.read(Path("made.txt"))).read().strip() == b"one"


async def test_a_command_goes_on_after_its_first_answer(session: Any) -> None:
    first = await session.pty_exec_start(
        "echo one; until [ -e go ]; do sleep 0.05; done; echo two; exit 3", yield_time_s=0.3
    )
    assert first.exit_code is None
    await session.write(Path("go"), io.BytesIO(b""))
    last = await session.pty_write_stdin(session_id=first.process_id, chars="", yield_time_s=20)
    assert (first.output + last.output, last.exit_code) == (b"one\ntwo\n", 3)
    assert last.process_id is None
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=first.process_id, chars="")


async def test_a_command_without_a_terminal_has_no_input(session: Any) -> None:
    done = await session.pty_exec_start("cat; tty", yield_time_s=20)
    assert (done.output, done.exit_code) == (b"not a tty\n", 1)


async def test_a_terminal_is_typed_at_and_interrupted(session: Any) -> None:
    first = await session.pty_exec_start(
        "read x; echo got $x; sleep 60", tty=True, yield_time_s=0.3
    )
    assert first.exit_code is None
    number, output, typed = first.process_id, b"", "six\n"
    for _ in range(40):
        output += (await session.pty_write_stdin(session_id=number, chars=typed)).output
        typed = " "
        if b"got six" in output:
            break
    ended = await session.pty_write_stdin(session_id=number, chars="\x03", yield_time_s=20)
    assert b"got six" in output
    assert ended.exit_code == 130


async def test_open_processes_end_with_the_sandbox(client: CellSandboxClient) -> None:
    made = await client.create()
    async with made:
        await made.pty_exec_start("sleep 600", yield_time_s=0.3)
        await made.pty_exec_start("sleep 600", tty=True, yield_time_s=0.3)
    assert not await made.running()
    with pytest.raises(ExecTransportError):
        await made.exec("true")


async def test_the_oldest_of_too_many_processes_ends(
    client: CellSandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_sandbox_session, "_MOST_OPEN", 1)
    async with await client.create() as made:
        first = await made.pty_exec_start("sleep 600", yield_time_s=0)
        second = await made.pty_exec_start("sleep 601", yield_time_s=0)
        with pytest.raises(PtySessionNotFoundError):
            await made.pty_write_stdin(session_id=first.process_id, chars="")
        assert second.exit_code is None
        assert b"sleep 600" not in (await made.exec("cat /proc/*/cmdline | tr '\\0' ' '")).stdout


async def test_a_snapshot_is_unpacked_into_another_cell(
    client: CellSandboxClient, tmp_path: Path
) -> None:
    snapshot = LocalSnapshotSpec(base_path=tmp_path)
    manifest = Manifest(entries={"scratch": File(content=b"new", ephemeral=True)})
    first = await client.create(snapshot=snapshot, manifest=manifest)
    async with first:
        await first.write(Path("kept/é"), io.BytesIO(b"1"))
        await first.exec("ln -s kept/é link; mkdir kept/scratch; touch kept/scratch/x")
    payload = client.serialize_session_state(first.state)
    state = client.deserialize_session_state(payload)
    async with await client.resume(state) as second:
        done = await second.exec("cat link scratch; ls kept/scratch")
        assert done.stdout == b"1newx\n"


async def test_a_cell_that_lives_is_resumed(client: CellSandboxClient) -> None:
    async with await client.create() as first:
        await first.exec("touch kept")
        again = await client.resume(first.state)
        await again.start()
        assert (await again.exec("ls")).stdout == b"kept\n"
        await client.delete(again)
        assert not await first.running()


@pytest.mark.parametrize("name", ["../out", "/tmp/out"])
async def test_a_tar_that_leaves_the_workspace_is_refused(session: Any, name: str) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(SandboxError):
        await session.hydrate_workspace(io.BytesIO(archive.getvalue()))


async def test_a_port_is_reached(client: CellSandboxClient) -> None:
    options = CellSandboxClientOptions(exposed_ports=(8000, 8001))
    async with await client.create(options=options) as made:
        await made.exec("echo hello > index.html")
        await made.pty_exec_start("python3 -m http.server 8000", yield_time_s=0.3)
        until = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))'"
        await made.exec(f"{until}; do sleep 0.05; done", timeout=20)
        endpoint = await made.resolve_exposed_port(8000)
        read = lambda: urllib.request.urlopen(endpoint.url_for("http"), timeout=10).read()  # noqa: E731
        assert await asyncio.to_thread(read) == b"hello\n"
        assert await made.resolve_exposed_port(8000) == endpoint
        with pytest.raises(SandboxError) as caught:
            await made.resolve_exposed_port(9)
        assert caught.value.error_code is ErrorCode.EXPOSED_PORT_UNAVAILABLE


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(users=[User(name="root")]),
        Manifest(extra_path_grants=(SandboxPathGrant(path="/data", host_path="/etc"),)),
    ],
)
async def test_what_no_cell_has_is_refused_at_once(
    client: CellSandboxClient, manifest: Manifest
) -> None:
    with pytest.raises(SandboxError, match="a cell has none"):
        await client.create(manifest=manifest)


async def test_another_user_is_refused(session: Any) -> None:
    for work in (
        session.exec("true", user="root"),
        session.read(Path("x"), user="root"),
        session.write(Path("x"), io.BytesIO(b""), user=User(name="root")),
        session.pty_exec_start("true", user="root"),
    ):
        with pytest.raises(SandboxError, match="one user"):
            await work


def test_options_and_states_are_found_by_their_type(client: CellSandboxClient) -> None:
    options = BaseSandboxClientOptions.parse({"type": "cellwright", "exposed_ports": [1]})
    assert options == CellSandboxClientOptions(exposed_ports=(1,))
    made = asyncio.run(client.create())
    assert type(SandboxSessionState.parse(made.state.model_dump())) is type(made.state)


def test_arguments_that_contradict_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(PolicyError):
        CellSandboxClient(sandbox, policy="strict")
