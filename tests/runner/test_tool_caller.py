"""The caller of tools in a cell: it closes what it opened, once."""

import contextlib
import os

import pytest

from cellwright.runner import channel
from cellwright.runner.cell.tool_caller import ToolCaller


def test_a_second_close_does_not_touch_a_file_that_has_its_number() -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        caller = ToolCaller(ours, ours.fileno(), channel.Receiver(ours, 1000))
        caller.close()  # never opened
        caller.open(sites=False)
        number = caller._closing
        caller.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        own = os.eventfd(0, os.EFD_NONBLOCK)
        try:
            if own != number:
                os.dup2(own, number)
            caller.close()
            os.fstat(number)
            with pytest.raises(BlockingIOError):
                os.eventfd_read(number)
        finally:
            for each in {own, number}:
                os.close(each)
        caller.open(sites=False)
        caller.close()
