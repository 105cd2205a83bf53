"""A client's frame decodes to a bounded number of objects, whichever part of it is multiplied."""

from typing import Any

import msgspec
import pytest

from cellwright.harness.sandbox.remote.frames import (
    Cancel,
    ClientRequest,
    Describe,
    Download,
    Execute,
    ExecuteArguments,
    Hello,
    OpenSession,
    Validate,
)
from cellwright.policies.policy import MIB
from cellwright.runner.messages import InputFile, decode
from tests.work import cost_of, multiplied

_TIMES = 8  # the size of a frame
_BESIDES = 16 * MIB  # 65,536 files, variables and globs
GIVEN = ExecuteArguments(
    b"in", b"{}", (InputFile("p", b"d"),), {"A": "b"}, 1.0, "t", ("*",), False, ("a",)
)
FRAMES = [Execute(b"1", True, "python", GIVEN, "s"), OpenSession("s"), Download("s", "p"),
          Validate(b"1"), Cancel(), Describe(), Hello(1, "p")]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_clients_frame_is_no_larger_once_decoded_whatever_is_multiplied(frame: Any) -> None:
    kind = Hello if isinstance(frame, Hello) else ClientRequest
    plain = msgspec.to_builtins(frame, builtin_types=(bytes,))
    for times in (40, 50_000, 400_000):
        for each in multiplied(plain, times):
            data = msgspec.msgpack.encode(each)

            def work(data: bytes = data) -> Any:
                try:
                    return decode(data, kind)
                except msgspec.DecodeError:
                    return None

            assert cost_of(work).memory_bytes <= _BESIDES + _TIMES * len(data)
