"""The forms of requests: a shell reads lines, JSON holds what JSON can."""

import contextlib
import json
import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.policies.languages import LANGUAGES
from cellwright.runner import channel
from cellwright.runner.messages import Finished, InputFile, RunProgram, decode
from cellwright.runner.requests import forms as request_forms
from cellwright.runner.requests.forms import request_form, start_form

SHELLS = [shutil.which(name) or name for name in ("bash", "sh")]


def a_run(code: str, files: tuple[InputFile, ...] = (), stdin: bytes = b"") -> RunProgram:
    return RunProgram(code, b"{}", files, {}, 100, 1, stdin)


@pytest.mark.parametrize("shell", SHELLS)
@settings(max_examples=20)
@given(data=st.binary(max_size=20_000))
def test_a_shell_writes_the_bytes_that_it_is_told(
    tmp_path_factory: pytest.TempPathFactory, shell: str, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("shell") / "it's -n"
    script = b"set -C\n" + request_forms._write(str(path), data) * 2
    subprocess.run([shell], input=script, check=True, env={}, timeout=30)
    assert path.read_bytes() == data


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("code", [0, 1, 9, 10, 127, 130, 255])
def test_how_a_request_ends_is_one_packet(shell: str, code: int) -> None:
    """Even where the status is a newline, at which a stream may be flushed."""
    ending = request_form(a_run(":"), "bash", 0).ending.decode()
    script = f"_cell=1\n(exit {code})\n{ending}{ending}"
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        nine = (os.POSIX_SPAWN_DUP2, theirs.fileno(), 9)
        pid = os.posix_spawn(shell, [shell, "-c", script], {}, file_actions=[nine])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        theirs.close()
        frame = channel.Receiver(ours, 1000).receive()
        assert ours.recv(1) == b""  # said once, though the line came twice
    finished = decode(frame or b"", Finished)
    assert (finished.exit_code, finished.ends_well) == (code, code == 0)


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_starts_an_interpreter_brings_files_and_no_variables(language: str) -> None:
    said = start_form((InputFile("f", b"content"),), language)
    assert b"content" in said.program
    assert bool(said.stdin) == bool(said.ending) == LANGUAGES[language].is_shell


def test_json_is_one_line_and_bytes_follow_it() -> None:
    files = (InputFile("a", b"1\n2"), InputFile("b", b"", True))
    run = a_run("x\ny", files=files, stdin=b"\xff")
    header, _, contents = request_form(run, "ruby", 0).program.partition(b"\n")
    request = json.loads(header)
    assert (request["code"], request["files"], request["stdin"]) == (
        "x\ny",
        [["a", 3, False], ["b", 0, True]],
        1,
    )
    assert contents == b"1\n2\xff"
