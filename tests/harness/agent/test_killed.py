"""An agent that is killed at every step: the next process reaches the same end, and calls nothing twice."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OPTIONAL
from tests.model_server import Exchange, ModelServer, answer_with, said, serving

TOKEN = re.compile(r"pii_email_\w+")
TOOLS = """
import os
from cellwright import tool

@tool
def send(to: str) -> str:
    "Send a mail."
    with open({log!r}, "a") as log:
        log.write(to + "\\n")
    if to == os.environ.get("KILL_AT"):
        os.kill(os.getpid(), 9)
    return "sent to " + to
"""
SCRIPT = [
    "```python\nn = 1\nfirst = execute_tool('send', {'to': 'ann'})\n```",
    (
        "```python\nn += 1\ntry:\n    second = execute_tool('send', {'to': 'bob'})\n"
        "except Exception as error:\n    second = error.kind\nsecond\n```"
    ),
    "no program",
    "```python\nfinal_answer([n, first, second])\n```",
]
DONE = [2, "sent to ann", "sent to bob"]


class Processes:
    """Starts `cellwright agent` on one directory, and kills it."""

    def __init__(self, server: ModelServer, directory: Path) -> None:
        self._url, self._directory = server.url, directory
        self.log = directory / "sent"
        (directory / "tools.py").write_text(TOOLS.format(log=str(self.log)))

    def start(self, *words: str, **environment: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable, "-Im", "cellwright", "agent", *words, "--model", self._url,
            "--tools", str(self._directory / "tools.py"), "--directory", str(self._directory / "a"),
            "--json-lines", *(f"--optional={each}" for each in OPTIONAL),
        ]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def events(self, *words: str, **environment: str) -> list[dict[str, Any]]:
        with self.start(*words, **environment) as process:
            assert process.stdout
            return [json.loads(each) for each in process.stdout]

    def sent(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def test_killed_after_each_event(tmp_path: Path) -> None:
    with serving(SCRIPT) as server:
        (tmp_path / "whole").mkdir()
        whole = Processes(server, tmp_path / "whole").events("run", "t")
        assert whole[-1]["answer"] == DONE
        for count in range(1, len(whole) - 2):
            (place := tmp_path / str(count)).mkdir()
            processes = Processes(server, place)
            with processes.start("run", "t") as process:
                assert process.stdout
                seen = [json.loads(process.stdout.readline()) for _ in range(count)]
                process.kill()
            ended = processes.events("resume", seen[0]["text"])
            assert ended[-1]["status"] == "completed", (count, ended)
            # A kill in the middle of a call leaves its outcome unknown, and then it is not repeated.
            assert ended[-1]["answer"][:2] == DONE[:2] or "unknown" in str(ended), (count, ended)
            # Such a call may not have reached its tool.
            sent = processes.sent()
            assert len(sent) == len({*sent}), (count, ended)
            assert {*sent} == {"ann", "bob"} or "unknown" in str(ended), (count, ended)


@pytest.mark.parametrize("at", ["ann", "bob"])
def test_killed_within_a_call(tmp_path: Path, at: str) -> None:
    with serving(SCRIPT) as server:
        processes = Processes(server, tmp_path)
        begun = processes.events("run", "t", KILL_AT=at)
        assert begun[-1]["kind"] == "program"
        ended = processes.events("resume", begun[0]["text"])
    assert processes.sent().count(at) == 1
    if at == "bob":  # the program sees that the outcome is unknown
        assert ended[-1]["answer"] == [2, "sent to ann", "unknown"]
    else:
        assert "unknown" in json.dumps(ended)


def test_another_process_has_the_tokens_of_the_first_from_the_file_of_values(
    tmp_path: Path,
) -> None:
    """The model is sent tokens by both processes, the same ones, and the tool gets the value."""
    mail, sent = "ann.smith@example.org", []
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f'extends = "strict"\n[privacy]\nenabled = true\nrestore = ["send:to"]\nscope = "session"\n'
        f'vault = "{tmp_path / "values.db"}"\nkey = "env:VALUES_KEY"\n'
    )

    def calls_with_its_token(exchange: Exchange) -> None:
        (token,) = set(TOKEN.findall(json.dumps(exchange.request)))
        sent.append(token)
        said(f"```python\nfinal_answer([n, execute_tool('send', {{'to': '{token}'}})])\n```")(
            exchange
        )

    script = ["```python\nn = 1\nn\n```", calls_with_its_token]
    with serving(script) as server:
        processes = Processes(server, tmp_path)
        options = "--policy", str(policy)
        with processes.start("run", f"Write to {mail}", *options, VALUES_KEY="k" * 32) as process:
            assert process.stdout
            events = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.kill()
        assert [each["kind"] for each in events] == ["started", "program", "observation"]
        ended = processes.events("resume", events[0]["text"], *options, VALUES_KEY="k" * 32)
        first, *later = [set(TOKEN.findall(json.dumps(each))) for each in server.requests]
        assert mail not in json.dumps(server.requests)
    assert later
    assert all(each == first for each in later)
    assert ended[-1]["answer"] == [1, f"sent to {sent[-1]}"]
    assert processes.sent() == [mail]
    assert mail.encode() not in (tmp_path / "values.db").read_bytes()


def test_another_process_does_not_take_up_a_run_that_is_worked_on(tmp_path: Path) -> None:
    asked, released = threading.Event(), threading.Event()

    def late(exchange: Exchange) -> None:
        asked.set()
        released.wait(60)
        answer_with(SCRIPT[0], exchange)

    with serving([late, *SCRIPT[1:]]) as server:
        processes = Processes(server, tmp_path)
        with processes.start("run", "t") as process:
            assert process.stdout
            run = json.loads(process.stdout.readline())["text"]
            assert asked.wait(60)  # it is stopped while it waits, not while it writes
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with processes.start("resume", run) as second:
                    status = second.wait()
            finally:
                released.set()
                os.kill(process.pid, signal.SIGCONT)  # else a failure waits for it without end
            assert status == 2
            assert json.loads(process.stdout.read().splitlines()[-1])["answer"] == DONE
        assert processes.sent() == ["ann", "bob"]
