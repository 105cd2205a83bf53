"""`cellwright run --connect` without msgspec: it sends and shows what the modules with msgspec do."""

import os
import re
import socket
from pathlib import Path

import msgspec
import pytest

from cellwright.harness.cli import daemon_run
from cellwright.harness.cli.main import main
from cellwright.harness.sandbox.remote import frames, lean_frames
from cellwright.harness.sandbox.remote.call_frames import packed_result
from cellwright.runner.requests.result import SandboxResult, SandboxStatus, Usage
from tests.harness.servers.daemon.daemons import Daemon


def test_the_arguments_of_a_program_are_those_of_the_protocol() -> None:
    told = [getattr(frames.ExecuteArguments(), name) for name in lean_frames.EXECUTE_ARGUMENTS]
    fields = frames.ExecuteArguments.__struct_fields__
    assert fields[: len(told)] == tuple(lean_frames.EXECUTE_ARGUMENTS)
    encode = msgspec.msgpack.encode
    assert encode(told) == encode(list(lean_frames.EXECUTE_ARGUMENTS.values()))
    options = daemon_run._options(["--connect", "s", "-c", "é", "--timeout", "2.5", "--", "a"])
    read = msgspec.msgpack.decode(daemon_run._request(options), type=frames.ClientRequest)
    given = frames.ExecuteArguments(timeout=2.5, arguments=("a",))
    assert read == frames.Execute("é".encode(), True, "python", given, stream=True)


@pytest.mark.parametrize("length", [0, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_frames_are_read_as_msgspec_reads_them(length: int) -> None:
    numbers = [
        0,
        1,
        127,
        128,
        255,
        256,
        65_536,
        1 << 32,
        (1 << 64) - 1,
        -1,
        -32,
        -33,
        -129,
        -(1 << 63),
    ]
    value = [
        "é" * length,
        b"x" * length,
        [None, True, False] * length,
        numbers,
        2.5,
        {"a": {"b": []}},
    ]
    members = {str(number): number for number in range(length)}
    for each in (*value, members):
        frame = msgspec.msgpack.encode(each)
        assert lean_frames.unpack(frame) == each
        with pytest.raises(ValueError, match="invalid frame"):
            lean_frames.unpack(frame + b"\0")
        if len(frame) > 1:
            with pytest.raises(ValueError, match="invalid frame"):
                lean_frames.unpack(frame[:-1])
    plain = [each for each in value if each is not numbers]
    assert msgspec.msgpack.decode(lean_frames.pack([plain, -5, 1 << 40])) == [plain, -5, 1 << 40]


WELCOME = ["Welcome", 1, "x", 1 << 20, "1", 10, 0]
CHUNK = b"\x93\xabOutputChunk"


def _answered(*frames_of_daemon: bytes) -> bytes | None:
    """Return what the client makes of a daemon that sends these frames."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for each in frames_of_daemon:
            theirs.send(b"\0" + each)
        return daemon_run._reply(ours, daemon_run._options(["--connect", "s", "-c", "1"]))


@pytest.mark.parametrize("welcome", [1, {"a": 1}, ["Welcome"], ["Welcome", 1, "x", "y"]], ids=str)
def test_an_invalid_greeting_is_left_to_the_modules_that_say_why(welcome: object) -> None:
    assert _answered(msgspec.msgpack.encode(welcome)) is None


@pytest.mark.parametrize("chunk", [CHUNK, CHUNK + b"\x90\x90", CHUNK + b"\xa1x\xc4\x01x"], ids=repr)
def test_invalid_output_of_a_daemon_ends_the_call(chunk: bytes) -> None:
    assert _answered(msgspec.msgpack.encode(WELCOME), chunk) == b""


def test_a_frame_that_is_longer_than_any_reply_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_frames, "REPLY_BYTES", 100)
    assert _answered(msgspec.msgpack.encode(WELCOME), b"x" * 100) == b"x" * 100
    assert _answered(msgspec.msgpack.encode(WELCOME), b"x" * 101) == b""


@pytest.mark.parametrize("value", [b"[" * 9000 + b"]" * 9000, b"\xff"], ids=len)
def test_a_value_that_cannot_be_shown_is_no_bug_of_the_client(value: bytes) -> None:
    result = {"status": "completed", "stdout": "", "stderr": ""}
    encode = msgspec.msgpack.encode
    assert daemon_run._shown(encode(["Executed", result, value]), "python") is None
    assert daemon_run._shown(encode(1), "python") is None


def test_only_a_result_about_which_nothing_is_said_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = SandboxResult(status=SandboxStatus.COMPLETED, reason="exit", value=[1.5, None, "é"])
    encode = msgspec.msgpack.encode
    assert daemon_run._shown(encode(packed_result(done)), "python") == 0
    assert capsys.readouterr().out == "[1.5, None, 'é']\n"
    for each in (
        msgspec.structs.replace(done, status=SandboxStatus.FAILED),
        msgspec.structs.replace(done, notices=("note",)),
        msgspec.structs.replace(done, truncated={"stdout": 5}),
    ):
        assert daemon_run._shown(encode(packed_result(each)), "python") is None
    assert daemon_run._shown(encode(frames.Failure("BusyError", "busy")), "python") is None
    assert daemon_run._shown(b"", "python") is None
    fields = {*SandboxResult.__struct_fields__}
    assert {*daemon_run._SAID, "status", "stdout", "stderr"} <= fields
    assert isinstance(done.usage, Usage)


@pytest.mark.needs("userns")
@pytest.mark.parametrize(
    "words",
    [
        ("-c", "{'a': [1, 2.5, None, True, 10**30, '\\u00e9']}"),
        ("-c", "print('out', flush=True); import sys; sys.stderr.write('err'); 5"),
        ("-c", "print('x' * 300_000)"),
        ("-c", "1 / 0"),
        ("-c", ""),
        ("-c", "'text'"),
        ("-c", "open('made', 'w').write('1')"),
        ("-c", "import sys; sys.argv", "--", "a", "-b"),
        (
            "-c",
            "import os; os.environ['A'], os.environ['PATH_OF_TEST']",
            "--env",
            "A=é=",
            "--env",
            "PATH_OF_TEST",
        ),
        ("--language", "bash", "-c", "echo $0; exit 3"),
        ("--language", "sh", "-c", "echo 5"),
        ("program.py", "--stdin", "input"),
        ("input", "--language", "python"),
        ("nosuch.py",),
        ("-c", "1", "--timeout", "0"),
        ("-c", "1", "--timeout", "inf"),
        ("-c", "1", "--policy", "nosuch"),
        ("-c", "1", "--env", "NOT_SET_HERE"),
        ("-c", "1", "--json-lines"),
        ("-c", "#" * 69_000_000),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_it_does_what_the_modules_with_msgspec_do(
    daemon: Daemon, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH_OF_TEST", "here")
    Path("program.py").write_text("import sys; sys.stdin.read(), __file__.rpartition('/')[2]")
    Path("input").write_bytes(b"'of a file'")
    command = ["run", "--connect", os.fspath(daemon.path), *words]
    quick = main(command), *_without_times(capfd)
    monkeypatch.setattr(daemon_run, "attempt", lambda _: None)
    assert quick == (main(command), *_without_times(capfd))


def _without_times(capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    told = capfd.readouterr()
    changing = r"[\d.]+ (ms|MiB|bytes,)|\{.*\}\n"  # times, lengths of frames, and a result as JSON
    return re.sub(changing, "", told.out), re.sub(changing, "", told.err)
