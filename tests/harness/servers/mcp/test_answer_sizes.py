"""Answers that are too large: a note lists what is left out, and every client can read the rest."""

import json
from typing import Any

import pytest
from mcp import Client
from mcp.types import TextContent

from cellwright.harness.servers.mcp.answers import fitted, size_in_answer
from cellwright.harness.servers.mcp.approvals import HTTP_BYTES, PIPE_BYTES
from tests.harness.servers.mcp.servers import ERAS, Inside, at, call, drive, over_http
from tests.harness.servers.mcp.test_http import ANN, tokens_in

MANY = "x\n" * 1_000_000


@pytest.mark.parametrize("most", [20_000, HTTP_BYTES, PIPE_BYTES])
@pytest.mark.parametrize(
    "value",
    [MANY, '"\\' * 500_000, list(range(60_000)), {"a": {"b": MANY}}, {str(n): n for n in range(20_000)}],
    ids=["lines", "quotes", "list", "deep", "object"],
)  # fmt: skip
def test_whatever_is_told_fits_and_is_told_to_be_cut(value: Any, most: int) -> None:
    told = {"stdout": value, "short": "whole", "error": value}
    kept, notes = fitted(told, most)
    assert sum(map(size_in_answer, kept.values())) < most
    assert kept["short"] == "whole"
    cut = {name for name in kept if kept[name] != told[name]}
    assert {each.partition(":")[0] for each in notes} == cut
    assert all(type(kept[name]) is type(told[name]) for name in kept)


def test_what_fits_is_left_as_it_is() -> None:
    assert fitted({"stdout": "x" * 1000, "value": [1]}, HTTP_BYTES) == (
        {"stdout": "x" * 1000, "value": [1]}, [],
    )  # fmt: skip


CODES = {
    "a long text": "'x' * 1_000_000",
    "a long list": "list(range(150_000))",
    "much output": "print('y' * 900_000)\nimport sys\nprint('z' * 900_000, file=sys.stderr)\n1/0",
    "more than a value may be": "'x' * 3_000_000",
    "a large file": "open('a.bin', 'wb').write(b'x' * 1_000_000)\n1",
    "many files": "for n in range(3000): open(f'{n:04}' + 'n' * 240, 'w').close()",
}  # fmt: skip


@pytest.mark.needs("userns")
def test_every_client_can_read_what_is_too_large_and_is_told(tmp_path: Any) -> None:
    """The SDK's client over HTTP fails a call whose event has more than a mebibyte."""
    quiet = []

    async def body(client: Client) -> None:
        for name, code in CODES.items():
            given: dict[str, Any] = {"code": code, "collect": ["*.bin"]}
            result = await client.call_tool("run_code", given)
            block = result.content[0]
            assert isinstance(block, TextContent)
            if not json.loads(block.text).get("notes"):
                quiet.append(name)
        assert (await call(client, "run_code", code="1"))["value"] == 1

    with over_http("--token-file", tokens_in(tmp_path, ANN)) as http:
        for era in ERAS:
            drive(http.connected(ANN, era), body)
    assert quiet == []


FORGED = r"""
import os, socket, struct
words = b"E" * (15 << 20)
text = b"\xdb" + struct.pack(">I", len(words)) + words
frame = b"\x99\xa8Finished\xc0\xc0" + {0} + b"\xc2\x90" + {1} + b"\x01"
control = socket.socket(fileno=os.dup(3))
pieces = [frame[at : at + 65535] for at in range(0, len(frame), 65535)]
for piece in pieces[:-1]:
    control.send(b"\1" + piece)
control.send(b"\0" + pieces[-1])
os._exit(1)
"""


@pytest.mark.needs("userns")
@pytest.mark.parametrize("part", ["text + b'\\xc0'", "b'\\xc0' + text", "b'\\xc0\\xc0'"])
def test_a_last_word_that_a_guest_forges_is_bounded(server: Inside, part: str) -> None:
    """What our own side of a guest would say is short; one that speaks for itself may say 16 MiB."""
    control = FORGED.replace("{0}", part).replace("{1}", "b'\\xa0'")

    async def body(client: Client) -> None:
        result = await client.call_tool("run_code", {"code": control})
        assert result.is_error
        size = len(result.model_dump_json())
        assert size < 200_000
        assert (size > 2000) is ("text" in part)  # the frame was believed, and then cut

    drive(at(server.server, "legacy"), body)


def test_a_value_that_a_guest_forges_is_bounded() -> None:
    """By the policy's `value_bytes`, whatever else its last word had room for."""
    from cellwright.runner.messages import Finished
    from cellwright.runner.requests.outcome import _value

    data = b'"' + b"x" * 100 + b'"'
    assert _value(Finished(data, None, None, None), 102) == "x" * 100
    assert _value(Finished(data, None, None, None), 50) == '"' + "x" * 49
    assert _value(Finished(None, "x" * 100, None, None), 50) == "x" * 50
