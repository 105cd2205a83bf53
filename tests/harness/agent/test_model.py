"""A model's client against a server with every fault that small servers have."""

import gzip
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from cellwright.harness.agent.model import ModelClient, _lines
from cellwright.harness.agent.prompts import Message, ModelReply, Sampling
from cellwright.harness.user_data import named_source
from cellwright.policies.errors import ModelError, ModelUnavailable, PolicyError
from cellwright.policies.extras import how_to_install
from tests.conftest import ROOT
from tests.model_server import (
    Exchange,
    ModelServer,
    Reply,
    calling,
    delta,
    failing,
    said,
    serving,
)

ASKED = [Message("system", "s"), Message("user", "u")]


@contextmanager
def client(reply: Reply, **about: object) -> Iterator[tuple[ModelClient, ModelServer]]:
    with (
        serving([reply] * 2) as server,
        ModelClient(server.url, first_wait=0.001, key="k", **about) as model,  # type: ignore[arg-type]
    ):
        yield model, server


def ask(reply: Reply, **about: object) -> ModelReply:
    with client(reply, **about) as (model, _):
        return model.ask(ASKED)


def test_a_streamed_reply_comes_in_parts_and_with_its_usage() -> None:
    parts: list[str] = []
    with client(said("one two three four"), model="m") as (model, server):
        reply = model.ask(ASKED, Sampling(0.3, 7), on_text=parts.append)
    assert reply == ModelReply(
        text="one two three four", finish="stop", input_tokens=100, output_tokens=20
    )
    assert "".join(parts) == reply.text
    assert len(parts) > 1
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["auth"] == "Bearer k"
    assert (request["model"], request["temperature"], request["seed"]) == ("m", 0.3, 7)
    assert request["messages"] == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
    ]  # fmt: skip


def test_calls_of_tools_are_put_together_from_their_parts() -> None:
    reply = ask(calling(("find_tool", '{"description": "x"}'), ("run_python", '{"code": ')))
    assert [(each.name, each.arguments) for each in reply.requests] == [
        ("find_tool", '{"description": "x"}'), ("run_python", '{"code": '),
    ]  # fmt: skip


def test_a_server_that_does_not_stream_answers_too() -> None:
    message = {"choices": [{"message": {"role": "tool", "content": "hi"}, "finish_reason": "stop"}]}

    def answer(exchange: Exchange) -> None:
        import json

        exchange.send(200, json.dumps(message).encode())

    reply = ask(answer)
    assert (reply.text, reply.finish, reply.is_estimated) == ("hi", "stop", True)
    assert reply.input_tokens > 0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failure_that_may_pass_is_repeated(status: int) -> None:
    assert ask(failing(status, 3, "done", Retry_After="0")).text == "done"


def test_a_failure_that_does_not_pass_is_an_error_that_lets_the_run_be_resumed() -> None:
    with pytest.raises(ModelUnavailable, match="500 no room") as raised:
        ask(failing(500, 99, "never"), retries=2)
    assert "resume" in raised.value.hint


def test_a_refusal_is_not_repeated() -> None:
    with client(failing(401, 99, "never")) as (model, server):
        with pytest.raises(ModelError, match="401 no room") as raised:
            model.ask(ASKED)
        assert not isinstance(raised.value, ModelUnavailable)
        assert len(server.requests) == 1
        assert "OPENAI_API_KEY" in raised.value.hint


def test_an_older_server_is_asked_without_the_newer_members() -> None:
    def picky(exchange: Exchange) -> None:
        if "stream_options" in exchange.request:
            exchange.send(400, b"unknown member")
        else:
            said("fine")(exchange)

    with client(picky) as (model, server):
        assert model.ask(ASKED).text == "fine"
        assert model.ask(ASKED).text == "fine"
        assert len(server.requests) == 3  # it is remembered


def test_a_dead_server_is_a_typed_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with (
        ModelClient(f"http://127.0.0.1:{port}/v1", first_wait=0.001, retries=1) as model,
        pytest.raises(ModelUnavailable, match="does not answer"),
    ):
        model.ask(ASKED)


def test_a_stream_that_ends_in_the_middle_is_seen_as_cut() -> None:
    assert ask(lambda exchange: exchange.stream(delta("half"), end=False)).finish == "cut"


def test_what_is_not_of_the_protocol_is_passed_over() -> None:
    strange = [
        None, 7, [], {}, {"choices": None}, {"choices": [None]}, {"choices": [{"delta": 3}]},
        {"choices": [{"delta": {"content": 4, "tool_calls": [None, {}, {"index": 10**9}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": None}}]}}]},
        {"usage": {"prompt_tokens": "many", "completion_tokens": -1}},
    ]  # fmt: skip
    reply = ask(lambda exchange: exchange.stream(*strange, delta("x", "stop")))
    assert (reply.text, reply.finish) == ("x", "stop")


def test_an_error_inside_a_stream_is_repeated() -> None:
    error = {"error": {"message": "slot lost"}}
    with pytest.raises(ModelUnavailable, match="slot lost"):
        ask(lambda exchange: exchange.stream(delta("a"), error), retries=1)


def test_an_answer_that_is_not_json_is_repeated() -> None:
    with pytest.raises(ModelUnavailable, match="not JSON"):
        ask(lambda exchange: exchange.send(200, b"data: {\n\n", "text/event-stream"), retries=1)


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_with_invalid_utf_8_is_repeated(is_stream: bool) -> None:
    bad = b'{"choices":[{"message":{"content":"caf\xe9"}}]}'
    kind = "text/event-stream" if is_stream else "application/json"
    data = b"data: " + bad + b"\n\n" if is_stream else bad
    with pytest.raises(ModelUnavailable, match="not JSON"):
        ask(lambda exchange: exchange.send(200, data, kind), retries=1)
    with pytest.raises(ModelError, match="401 .*caf"):
        ask(lambda exchange: exchange.send(401, bad))


def test_an_endless_reply_is_cut() -> None:
    def endless(exchange: Exchange) -> None:
        exchange.stream(*[delta("x" * 100_000)] * 200, end=False)

    reply = ask(endless)
    assert reply.finish == "length"
    assert len(reply.text) == 1 << 20


@pytest.mark.parametrize("status", [200, 400])
def test_a_compressed_answer_is_not_unpacked(status: int) -> None:
    def bomb(exchange: Exchange) -> None:
        exchange.send(
            status, gzip.compress(gzip.compress(b" " * 1000)), Content_Encoding="gzip, gzip"
        )

    with pytest.raises(ModelUnavailable, match="compressed"):
        ask(bomb, retries=0)


def test_the_words_of_a_failure_are_read_for_a_time_and_up_to_a_size() -> None:
    left = [10_000]  # so that the test ends without the protection too

    def endless(exchange: Exchange) -> None:
        exchange.send(500, b"")
        with suppress(OSError):  # the client has gone
            while left[0]:
                left[0] -= 1
                exchange.handler.wfile.write(b"x" * 1000)

    with pytest.raises(ModelUnavailable, match="500 xxx"):
        ask(endless, retries=0)
    with pytest.raises(ModelUnavailable, match="too long"):
        ask(failing(500, 1, ""), retries=0, reply_seconds=0.0)
    assert left[0] > 0


def test_words_that_are_nested_too_deeply_are_shown_as_they_are() -> None:
    with pytest.raises(ModelError, match=r"422 \[\[\["):
        ask(lambda exchange: exchange.send(422, b"[" * 5000))


@pytest.mark.parametrize(
    "given",
    [
        {"url": "127.0.0.1"},
        {"url": "http://"},
        {"url": "http://[::1"},
        {"url": "file:///x"},
        {"url": "http://x", "reply_tokens": 1 << 20},
        {"url": "http://x", "context_tokens": 3},
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        ModelClient(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["env", "file", "keyring"])
def test_the_key_comes_from_a_named_source(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, keyring = tmp_path / "key", types.ModuleType("keyring")
    file.write_text("from-file\n")
    file.chmod(0o600)
    keyring.get_password = lambda service, user: f"from-keyring {service} {user}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", keyring)
    monkeypatch.setenv("MODEL_KEY", "from-env")
    name, key = {
        "env": ("env:MODEL_KEY", "from-env"),
        "file": (f"file:{file}", "from-file"),
        "keyring": ("keyring:llm/me", "from-keyring llm me"),
    }[kind]
    with (
        serving(["hi"]) as server,
        ModelClient(server.url, key=named_source(name)) as model,
    ):
        model.ask(ASKED)
    assert server.requests[0]["auth"] == f"Bearer {key}"


def test_a_key_that_cannot_be_used_is_refused_without_being_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("hush-hush")
    file.chmod(0o644)
    for name, why in (("env:MODEL_KEY", "has no MODEL_KEY"), (f"file:{file}", "chmod 600")):
        with pytest.raises(PolicyError, match=why) as refused:
            ModelClient("http://x", key=named_source(name))
        assert "hush" not in str(refused.value)
    for text in ("hush\nX-More: 1", "hush\N{LATIN SMALL LETTER E WITH ACUTE}"):
        with pytest.raises(PolicyError, match="printable ASCII") as refused:
            ModelClient("http://x", key=text)
        assert "hush" not in str(refused.value)


def test_a_text_is_a_key_and_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.env` file of a repository could name any variable otherwise, and the server that gets it."""
    monkeypatch.setenv("OTHER_SECRET", "hush-hush")
    with serving(["hi"]) as server, ModelClient(server.url, key="env:OTHER_SECRET") as model:
        model.ask(ASKED)
    assert server.requests[0]["auth"] == "Bearer env:OTHER_SECRET"


def test_the_longest_reply_fits_into_a_small_context() -> None:
    with client("hi", context_tokens=4096) as (model, server):
        model.ask(ASKED)
    assert server.requests[0]["max_tokens"] == 1024


def test_an_error_does_not_show_the_password_of_the_url() -> None:
    with (
        ModelClient("http://me:hunter2@127.0.0.1:1/v1", retries=0) as model,
        pytest.raises(ModelUnavailable) as failed,
    ):
        model.ask(ASKED)
    assert "hunter2" not in str(failed.value)
    assert "127.0.0.1:1/v1" in str(failed.value)


def test_the_time_of_a_reply_is_that_of_all_its_repetitions() -> None:
    """A server that never ends its streams is not asked again for each of its endless replies."""

    def dripping(exchange: Exchange) -> None:
        exchange.send(200, b"", "text/event-stream")
        with suppress(OSError):  # the client has gone
            for _ in range(10_000):
                exchange.handler.wfile.write(b": still here\n")

    with client(dripping, retries=9, reply_seconds=0.0) as (model, server):
        with pytest.raises(ModelUnavailable, match="too long"):
            model.ask(ASKED)
        assert len(server.requests) == 1


def test_a_line_that_comes_in_pieces_is_put_together() -> None:
    class Response:
        headers: ClassVar[dict[str, str]] = {}

        def __init__(self, parts: list[bytes]) -> None:
            self.iter_raw = lambda: iter(parts)

    text = b"data: one\n\ndata: two\ndata: three"
    for size in (1, 2, 7, len(text)):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        found = list(_lines(Response(parts), time.monotonic() + 60))  # type: ignore[arg-type]
        assert found == text.split(b"\n")


def test_without_the_extra_only_the_client_is_missing_and_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx2'] = None; from cellwright.agent import Agent; print(Agent.__name__)"
    for wanted in (
        "from cellwright.agent import ModelClient; ModelClient()",
        "Agent('http://127.0.0.1:1/v1')",
    ):
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; {wanted}"], cwd=ROOT, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert done.stdout == "Agent\n"
        assert done.stderr.endswith(f"hint: {how_to_install('agent')}\n")
