"""`cellwright judge`: its own interface, and those of SandboxFusion, Piston and Judge0."""

import base64
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.requests import Request

from cellwright.harness.servers.judge import judging_core
from cellwright.harness.servers.judge.sandbox_fusion import RunJupyter
from cellwright.harness.servers.served_requests import KeptAnswers, KeptLimits
from tests.conftest import OPTIONAL, soon

ADD = "print(sum(map(int, input().split())))"
C = '#include <stdio.h>\nint main(void) { int n; return scanf("%d", &n) == 1 && printf("%d", 2 * n) ? 0 : 1; }'


class Answer(NamedTuple):
    status: int
    body: Any


class Client(NamedTuple):
    url: str

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        data = (
            None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Answer(answer.status, _decoded(answer.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _decoded(error.read()))


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


@contextlib.contextmanager
def started(*arguments: str, said: list[str] | None = None) -> Iterator[tuple[Client, str]]:
    """Start a server; `said` gets what it wrote to standard error after its first lines."""
    command = [sys.executable, "-Im", "cellwright", "judge", "--http", "127.0.0.1:0", *arguments]
    optional = [word for layer in OPTIONAL for word in ("--optional", layer)]
    process = subprocess.Popen([*command, *optional], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        first = process.stderr.readline()
        assert "serving at" in first, first + process.stderr.read()
        token = (
            ""
            if {"--no-token", "--token-file"} & {*arguments}
            else process.stderr.readline().split()[-1]
        )
        yield Client(first.split()[-1]), token
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        told = process.stderr.read()
        if said is not None:
            said.append(told)
        process.stderr.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with started("--no-token") as (client, _):
            yield client


def test_our_own_interface_compiles_once_and_judges_cases(server: Client) -> None:
    cases = [{"input": f"{n} 1", "expected": str(n + 1)} for n in range(5)]
    done = server.ask("/v1/judge", {"source": ADD, "cases": cases}).body
    assert (done["verdict"], done["passed"], done["total"]) == ("accepted", 5, 5)
    cases[2]["expected"] = "0"
    done = server.ask("/v1/judge", {"source": ADD, "cases": cases, "all": True}).body
    assert (done["verdict"], done["score"]) == ("wrong answer", 0.8)
    assert server.ask("/v1/judge", {"source": ADD, "cases": [], "checker": "x"}).status == 422
    assert server.ask("/v1/judge", {"source": ADD, "case": []}).status == 422
    assert server.ask("/v1/judge", b"{").status == 422
    assert "cpp" in server.ask("/v1/languages").body
    assert server.ask("/v1/status").body["verdicts"]["accepted"] >= 1
    assert "accepted" in server.ask("/").body


def test_workers_judge_cases() -> None:
    with started("--no-token", "--workers", "2") as (client, _):
        cases = [{"input": f"{n} 1", "expected": str(n + 1)} for n in range(4)]
        source = "print(sum(map(int, input().split())))"
        asked = {"source": source, "language": "python", "cases": cases}
        done = client.ask("/v1/judge", asked).body
        assert (done["verdict"], done["passed"]) == ("accepted", 4)


FUSION = {"compile_timeout": 10, "run_timeout": 10, "memory_limit_MB": 1024, "files": {}, "fetch_files": []}  # fmt: skip


def verl(server: Client, code: str, stdin: str, expected: str, **given: Any) -> bool | int:
    """Return what verl's client makes of an answer (verl/utils/reward_score/sandbox_fusion)."""
    asked = {**FUSION, "code": code, "stdin": stdin, "language": "python", **given}
    answer = server.ask("/run_code", asked)
    if answer.status != 200:
        return -1
    said, ran, compiled = answer.body, answer.body["run_result"], answer.body["compile_result"]
    if said["status"] == "SandboxError":
        return -1
    if said["status"] == "Success" and ran and ran["status"] == "Finished":
        return bool(ran["stdout"].rstrip("\n") == expected.rstrip("\n"))
    if compiled and (compiled["status"] != "Finished" or compiled["return_code"] != 0):
        return -4
    return -3 if ran and ran["status"] == "TimeLimitExceeded" else -2


def test_a_client_of_sandbox_fusion_gets_its_rewards(server: Client) -> None:
    assert verl(server, ADD, "1 2", "3\n") is True
    assert verl(server, ADD, "1 2", "4") is False
    assert verl(server, "1 / 0", "", "") == -2
    assert verl(server, "while True: pass", "", "", run_timeout=0.3) == -3
    assert verl(server, "x = bytearray(10 ** 9)", "", "", memory_limit_MB=64) == -2
    assert verl(server, "1", "", "", language="klingon") == -1


@pytest.mark.needs("gcc")
def test_a_program_that_does_not_compile_is_minus_four(server: Client) -> None:
    assert verl(server, "int main( {", "", "", language="c") == -4
    assert verl(server, C, "21", "42", language="c") is True


def test_files_go_in_and_out_of_run_code(server: Client) -> None:
    asked = {
        **FUSION, "language": "python", "fetch_files": ["out.bin"],
        "code": "open('out.bin', 'wb').write(open('in', 'rb').read() * 2)",
        "files": {"in": base64.b64encode(b"\0\xff").decode()},
    }  # fmt: skip
    done = server.ask("/run_code", asked).body
    assert base64.b64decode(done["files"]["out.bin"]) == b"\0\xff\0\xff"
    asked["files"] = {"in": "no base64!"}
    assert server.ask("/run_code", asked).body["status"] == "SandboxError"


def test_cells_of_a_notebook_share_a_session(server: Client) -> None:
    asked = {"cells": ["x = 20\nprint(x)", "x + 22", "1 / 0", "x"], "total_timeout": 20}
    done = server.ask("/run_jupyter", asked).body
    assert done["cells"][0]["stdout"] == "20\n"
    assert done["cells"][1]["display"] == [{"text/plain": "42"}]
    assert done["cells"][2]["error"][0]["ename"] == "ZeroDivisionError"
    assert len(done["cells"]) == 3


def test_a_client_of_piston_runs_programs(server: Client) -> None:
    names = {each["language"] for each in server.ask("/api/v2/runtimes").body}
    assert {"python", "cpp"} <= names
    asked = {
        "language": "py", "version": "*", "args": ["a b"], "stdin": "hi", "run_timeout": 2000,
        "files": [{"content": "import sys, other; print(input(), sys.argv[1:], other.x)"},
                  {"name": "other.py", "content": base64.b64encode(b"x = 1").decode(), "encoding": "base64"}],
    }  # fmt: skip
    run = server.ask("/api/v2/execute", asked).body["run"]
    assert (run["stdout"], run["code"], run["signal"]) == ("hi ['a b'] 1\n", 0, None)
    endless = {**asked, "files": [{"content": "while True: pass"}], "run_timeout": 200}
    run = server.ask("/api/v2/execute", endless).body["run"]
    assert (run["status"], run["signal"], run["code"]) == ("TO", "SIGKILL", None)
    wrong = {**asked, "language": "klingon"}
    assert server.ask("/api/v2/execute", wrong).status == 400
    assert server.ask("/api/v2/execute", {**asked, "files": []}).status == 400


def test_a_client_of_judge0_submits_waits_and_asks(server: Client) -> None:
    asked = {"source_code": ADD, "language_id": 71, "stdin": "1 2", "expected_output": "3"}
    done = server.ask("/submissions?wait=true", asked)
    assert done.status == 201
    assert (done.body["status"]["id"], done.body["stdout"]) == (3, "3\n")
    encoded = {**asked, **{name: base64.b64encode(str(asked[name]).encode()).decode()
                           for name in ("source_code", "stdin", "expected_output")}}  # fmt: skip
    done = server.ask("/submissions?wait=true&base64_encoded=true&fields=stdout,status", encoded)
    assert done.body == {"stdout": "Mwo=", "status": {"id": 3, "description": "Accepted"}}
    programs = {
        "print(4)": 4,
        "1 / 0": 11,
        "import os; os.kill(os.getpid(), 11)": 7,
        "while True: pass": 5,
    }
    batch = [{**asked, "source_code": code, "cpu_time_limit": 0.3} for code in programs]
    taken = server.ask("/submissions/batch", {"submissions": batch})
    tokens = ",".join(each["token"] for each in taken.body)
    while True:
        told = server.ask(f"/submissions/batch?tokens={tokens}").body["submissions"]
        if all(each["status"]["id"] > 2 for each in told):
            break
    assert [each["status"]["id"] for each in told] == list(programs.values())
    assert server.ask("/submissions/nosuch").status == 404
    assert server.ask("/submissions", {**asked, "language_id": 9999}).status == 422
    assert {each["id"] for each in server.ask("/languages").body} >= {71, 54}
    assert len(server.ask("/statuses").body) == 14
    assert server.ask("/config_info").body["cpu_time_limit"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/run_code", {**FUSION, "code": "1", "language": "python", "run_timeout": "nan"}),
        ("/run_jupyter", {"cells": ["1"], "total_timeout": "nan"}),
        ("/submissions", {"source_code": "1", "language_id": 71, "memory_limit": "inf"}),
        ("/v1/judge", {"source": "1", "cases": [{}], "memory_bytes": 2**50}),
        ("/v1/judge", {"source": "1", "cases": [{}], "wall_seconds": 3600}),
        ("/v1/judge", b'{"source": "1", "cases": [' + b"{}," * 10**6 + b"{}]}"),
    ],
    ids=["nan", "nan-jupyter", "inf", "memory", "seconds", "expansion"],
)  # fmt: skip
def test_numbers_and_bodies_that_would_harm_other_clients_are_refused(
    server: Client, path: str, body: Any
) -> None:
    assert server.ask(path, body).status == 422
    asked = {"source_code": "print(1)", "language_id": 71}
    assert server.ask("/submissions?wait=true", asked).body["stdout"] == "1\n"


SLEEP = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def narrow() -> Iterator[Client]:
    """Yield the client of a server that runs one request at a time."""
    with started("--no-token", "--at-once", "1") as (client, _):
        yield client


def left(client: Client, path: str, body: Any) -> None:
    """Send a request, and disconnect once it runs."""
    host = client.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)
    connection.request("POST", path, json.dumps(body))
    assert soon(lambda: client.ask("/v1/status").body["running"] == 1)
    connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/run_code", {**FUSION, "code": SLEEP, "language": "python", "run_timeout": 60}),
        ("/run_jupyter", {"cells": ["1", SLEEP, SLEEP], "total_timeout": 60}),
        ("/api/v2/execute", {"language": "python", "version": "*", "run_timeout": 60_000, "files": [{"content": SLEEP}]}),
        ("/submissions?wait=true", {"source_code": SLEEP, "language_id": 71, "wall_time_limit": 600}),
        ("/v1/judge", {"source": SLEEP, "cases": [{}] * 500, "wall_seconds": 600, "all": True}),
    ],
    ids=["run_code", "run_jupyter", "piston", "judge0", "judge"],
)  # fmt: skip
def test_work_ends_with_its_client(narrow: Client, path: str, body: Any) -> None:
    """Else nobody would have a turn for ten minutes."""
    left(narrow, path, body)
    assert verl(narrow, ADD, "1 2", "3") is True
    status = narrow.ask("/v1/status").body
    assert (status["running"], status["waiting"]) == (0, 0)
    assert set(status["verdicts"]) == {"accepted"}


def test_a_client_that_leaves_the_queue_takes_no_turn(narrow: Client) -> None:
    host = narrow.url.removeprefix("http://")
    first, second = (http.client.HTTPConnection(host) for _ in range(2))
    asked = {"source": SLEEP, "cases": [{}], "wall_seconds": 600}
    first.request("POST", "/v1/judge", json.dumps(asked))
    assert soon(lambda: narrow.ask("/v1/status").body["running"] == 1)
    second.request("POST", "/v1/judge", json.dumps(asked))
    assert soon(lambda: narrow.ask("/v1/status").body["waiting"] == 1)
    second.close()
    assert soon(lambda: narrow.ask("/v1/status").body["waiting"] == 0)
    first.close()
    assert verl(narrow, ADD, "1 2", "3") is True


# A hundred million tokens.
BOMB = "#define A1 1,1,1,1,1,1,1,1,1,1,\n" + "".join(
    f"#define A{n} {' '.join([f'A{n - 1}'] * 10)}\n" for n in range(2, 9)
) + "int a[] = { A8 };\nint main(void) { return 0; }"  # fmt: skip


@pytest.mark.needs("gcc", "cgroup")
def test_a_compiler_has_a_time_of_its_own(server: Client) -> None:
    asked = {**FUSION, "code": BOMB, "language": "c", "compile_timeout": 0.2}
    assert server.ask("/run_code", asked).body["compile_result"]["status"] == "TimeLimitExceeded"
    assert verl(server, BOMB, "", "", language="c", compile_timeout=0.2) == -4
    asked = {
        "language": "c", "version": "*", "compile_timeout": 200, "run_timeout": 5000,
        "files": [{"name": "main.c", "content": BOMB}],
    }  # fmt: skip
    compiled = server.ask("/api/v2/execute", asked).body["compile"]
    assert (compiled["status"], compiled["signal"], compiled["code"]) == ("TO", "SIGKILL", None)
    asked = {"source": BOMB, "language": "c", "cases": [{}], "compile_timeout": 0.2}
    done = server.ask("/v1/judge", asked).body
    assert (done["verdict"], done["compile"]["ok"]) == ("compile error", False)


@pytest.mark.needs("gcc")
def test_an_answer_does_not_tell_what_others_submitted(server: Client) -> None:
    """The second answer differs from the first only in its times."""
    asked = {"source": C, "language": "c", "cases": [{"input": "21", "expected": "42"}]}
    first, second = (server.ask("/v1/judge", asked).body for _ in range(2))
    assert first["compile"] == second["compile"]


def test_a_program_that_sleeps_is_late_before_its_client_gives_up(server: Client) -> None:
    """verl waits for both timeouts and ten seconds."""
    assert verl(server, SLEEP, "", "", run_timeout=1, compile_timeout=1) == -3


def test_a_busy_server_asks_a_client_of_sandbox_fusion_to_try_again(narrow: Client) -> None:
    host = narrow.url.removeprefix("http://")
    first = http.client.HTTPConnection(host)
    first.request(
        "POST", "/v1/judge", json.dumps({"source": SLEEP, "cases": [{}], "wall_seconds": 600})
    )
    assert soon(lambda: narrow.ask("/v1/status").body["running"] == 1)
    asked = {
        **FUSION,
        "code": "1",
        "language": "python",
        "run_timeout": 0.1,
        "compile_timeout": 0.1,
    }
    assert narrow.ask("/run_code", asked).status == 504
    first.close()
    assert narrow.ask("/run_code", asked).status == 200


@pytest.mark.needs("gcc")
def test_the_sdk_of_judge0_finds_its_server_and_its_languages(server: Client) -> None:
    """What judge0 0.0.8 of PyPI asks, in its order."""
    assert {"id": 71, "name": "Python"} in server.ask("/languages").body
    config = server.ask("/config_info").body
    for name in ("allow_enable_network", "enable_additional_files", "enable_callbacks"):
        assert config[name] is False
    numbers = ("max_cpu_time_limit", "max_memory_limit", "max_max_file_size", "max_stack_limit",
               "max_queue_size", "max_submission_batch_size", "submission_cache_duration")  # fmt: skip
    assert all(config[name] > 0 for name in numbers)
    assert server.ask("/about").body["version"] == "1.13.1"
    assert server.ask("/languages/52").body["name"] == "C++ (GCC)"
    assert server.ask("/languages/9999").status == 404
    asked = {
        "source_code": base64.b64encode(C.encode()).decode(), "language_id": 50,
        "stdin": base64.b64encode(b"21").decode(), "enable_network": False, "number_of_runs": 1,
        "redirect_stderr_to_stdout": False, "expected_output": base64.b64encode(b"42").decode(),
    }  # fmt: skip
    (taken,) = server.ask("/submissions/batch?base64_encoded=true", {"submissions": [asked]}).body
    assert str(uuid.UUID(taken["token"])) == taken["token"]
    one = f"/submissions/{taken['token']}?base64_encoded=true&fields=*"
    assert soon(lambda: server.ask(one).body["status"]["id"] > 2)
    done = server.ask(one).body
    assert (done["status"]["id"], base64.b64decode(done["stdout"])) == (3, b"42")
    assert datetime.strptime(done["finished_at"], "%Y-%m-%dT%H:%M:%S.%f%z")


def test_what_sandbox_fusion_of_pypi_sends_is_taken(server: Client) -> None:
    """sandbox-fusion 0.3.7 sends every field, and takes only answers with status 200."""
    asked = {
        "code": "print(input())", "language": "python", "stdin": "hi", "compile_timeout": 10,
        "run_timeout": 10, "memory_limit_MB": -1, "files": {}, "fetch_files": [], "args": [],
    }  # fmt: skip
    assert server.ask("/run_code", asked).body["run_result"]["stdout"] == "hi\n"
    cells = {"cells": ["x = 1", "print(x + 1)", "x"], "cell_timeout": 0, "total_timeout": 45, "kernel": "python3",
             "files": {}, "fetch_files": []}  # fmt: skip
    done = server.ask("/run_jupyter", cells).body
    assert (done["status"], [each["stdout"] for each in done["cells"]]) == (
        "Success",
        ["", "2\n", ""],
    )


def test_a_client_of_piston_may_end_a_path_with_a_slash(server: Client) -> None:
    """aiopyston 1.2.1 asks for runtimes/, which is redirected."""
    assert server.ask("/api/v2/runtimes/").body == server.ask("/api/v2/runtimes").body


PISTON = {"language": "python", "version": "*", "files": [{"content": "print(1)"}]}
JUDGE0 = {"source_code": "print(1)", "language_id": 71}


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [
        ("/run_code", {**FUSION, "code": "1", "language": "python", "run_timeout": -1}, 422, "run_timeout"),
        ("/run_code", {**FUSION, "code": "1", "language": "python", "compile_timeout": 0}, 422, "compile_timeout"),
        ("/run_jupyter", {"cells": ["1"], "total_timeout": 0}, 422, "total_timeout"),
        ("/run_jupyter", {"cells": ["1"], "cell_timeout": -1}, 422, "cell_timeout"),
        ("/api/v2/execute", {**PISTON, "run_timeout": -1}, 400, "run_timeout"),
        ("/api/v2/execute", {**PISTON, "compile_timeout": -1}, 400, "compile_timeout"),
        ("/api/v2/execute", {**PISTON, "run_timeout": "x"}, 400, "run_timeout"),
        ("/api/v2/execute", {**PISTON, "files": [*PISTON["files"], {"name": "../a", "content": ""}]}, 400, "'../a'"),
        ("/api/v2/execute", {**PISTON, "files": [*PISTON["files"], {"name": "/etc/a", "content": ""}]}, 400, "'/etc/a'"),
        ("/api/v2/execute", {**PISTON, "files": [{"content": "@", "encoding": "base64"}]}, 400, "base64"),
        ("/submissions", {**JUDGE0, "cpu_time_limit": -1}, 422, "cpu_time_limit"),
        ("/submissions", {**JUDGE0, "memory_limit": 0}, 422, "memory_limit"),
        ("/submissions", {**JUDGE0, "max_processes_and_or_threads": 0}, 422, "max_processes_and_or_threads"),
        ("/v1/judge", {"source": "1", "cases": [{}], "time_seconds": 0}, 422, "time_seconds"),
        ("/v1/judge", {"source": "1", "cases": [{"files": {"../a": ""}}]}, 422, "'../a'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_its_name(
    server: Client, path: str, body: Any, status: int, names: str
) -> None:
    answer = server.ask(path, body)
    assert (answer.status, names in answer.body["message"]) == (status, True), answer


def test_files_below_other_directories_are_an_error_of_sandbox_fusion(server: Client) -> None:
    asked = {**FUSION, "code": "1", "language": "python", "files": {"../a": ""}}
    done = server.ask("/run_code", asked).body
    assert (done["status"], "'../a'" in done["message"]) == ("SandboxError", True)


def test_null_and_zero_are_the_defaults_of_piston(server: Client) -> None:
    absent = {
        "stdin": None,
        "args": None,
        "run_timeout": 0,
        "compile_timeout": None,
        "run_memory_limit": -1,
    }
    run = server.ask("/api/v2/execute", {**PISTON, **absent}).body["run"]
    assert (run["stdout"], run["code"]) == ("1\n", 0)


def request_of(*pieces: bytes) -> Request:
    """Return a request whose body comes in pieces."""
    left = [*pieces]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((b'{"cells": ', b'["1"]}'), None),
        ((b'{"cells": ["1"], "x": ', b"{", b"}}"), None),
        ((b"x" * 60, b"x" * 60), 413),
        ((b'{"cells": ["1"], "x": [' + b"{}," * 10**6 + b"{}]}",), 422),  # else "x" is left alone
        ((b"\xff",), 422),
    ],
)
async def test_a_body_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], status: int | None
) -> None:
    if status == 413:
        monkeypatch.setattr(judging_core, "MOST_BODY", 100)
    if status is None:
        assert (await judging_core.body_of(request_of(*pieces), RunJupyter)).cells == ["1"]
        return
    with pytest.raises(judging_core.DialectError) as error:
        await judging_core.body_of(request_of(*pieces), RunJupyter)
    assert error.value.status == status


def test_answers_of_judge0_make_room_for_newer_ones_of_their_client() -> None:
    kept = KeptAnswers[str](len, KeptLimits(9, 100), KeptLimits(9, 10), seconds=60)
    for key, text in (("a", "x" * 6), ("b", "y" * 6), ("c", "z" * 6)):
        kept.begin(key, b"", "c" if key == "c" else "one")
        assert kept.kept(key) is None  # it is at work
        kept.end(key, text)
    assert [kept.kept(key) for key in "abc"] == [None, "y" * 6, "z" * 6]


def test_many_clients_wait_and_nobody_is_refused(server: Client) -> None:
    def one(n: int) -> bool | int:
        return verl(server, f"print({n})", "", str(n))

    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(one, range(256))) == [True] * 256


def test_no_log_has_a_token(tmp_path: Path) -> None:
    """Neither of a known client, in a request that fails or is refused, nor of an unknown one."""
    known, unknown = "k" * 32, "u" * 32
    file = tmp_path / "tokens"
    file.write_text(f"one {known}\n")
    file.chmod(0o600)
    said: list[str] = []
    log = tmp_path / "log"
    with started("--token-file", str(file), "--request-log", str(log), said=said) as (client, _):
        for token in (known, unknown):
            at, asked = f"/token/{token}", {**FUSION, "code": "1", "language": "python"}
            for path in ("/run_code", "/nosuch", "/run_code?x=%0d%0a", "/submissions/nosuch"):
                client.ask(at + path, asked)
                client.ask(path, asked, **{"X-Auth-Token": token})
            client.ask(at + "/run_code", b"\xff{")
            client.ask(at + "/v1/judge", {"source": "\ud800", "cases": [{}]})
    lines = log.read_text()
    assert '"path":"/run_code"' in lines
    for token in (known, unknown):
        assert token not in said[0] + lines


def test_operators_see_verdicts_and_who_waits(tmp_path: Path) -> None:
    place = str(tmp_path / "metrics")
    with started("--no-token", "--metrics", place) as (client, _):
        client.ask("/v1/judge", {"source": "print(1)", "cases": [{"expected": "1"}]})
        client.ask("/v1/judge", {"source": "print(2)", "cases": [{"expected": "1"}]})
        client.ask("/run_code", {**FUSION, "code": "print(1)", "language": "python"})
        page, status = client.ask("/").body, client.ask("/v1/status").body
        seen = scraped(place)
    assert status["verdicts"] == {"accepted": 2, "wrong answer": 1}
    assert (status["running"], status["waiting"], status["per_minute"]) == (0, 0, 3)
    assert "3 requests in the last minute; 0 run, 0 wait" in page
    assert "<td>accepted<td>2" in page
    verdicts = "cellwright_judge_verdicts_total"
    assert seen[f'{verdicts}{{verdict="accepted"}}'] == 2
    assert seen[f'{verdicts}{{verdict="wrong answer"}}'] == 1
    assert seen['cellwright_judge_requests{state="running"}'] == 0
    assert seen['cellwright_requests_total{kind="judge POST",outcome="200"}'] == 3


def scraped(place: str) -> dict[str, float]:
    """Return the metrics that a socket answers."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(place)
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if line.startswith("cellwright"))
    return {name: float(value) for name, _, value in rows}


def test_a_token_comes_by_a_header_or_in_the_path() -> None:
    with started() as (client, token):
        asked = {"source": "print(1)", "cases": [{"expected": "1"}]}
        assert client.ask("/v1/judge", asked).status == 401
        assert client.ask("/token/wrong/v1/judge", asked).status == 401
        assert client.ask("/v1/judge", asked, Authorization=f"Bearer {token}").status == 200
        assert client.ask("/v1/judge", asked, **{"X-Auth-Token": token}).status == 200
        assert verl(Client(f"{client.url}/token/{token}"), ADD, "1 2", "3") is True
        assert client.ask("/v1/judge", asked, Host="evil.example").status == 421


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-token", "--http", "0.0.0.0:1"], "needs a loopback address"),
        (["--at-once", "0"], "at_once: must be a whole number from 1"),
    ],
)
def test_a_server_that_could_be_reached_by_others_needs_tokens(
    arguments: list[str], message: str
) -> None:
    command = [sys.executable, "-Im", "cellwright", "judge", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
