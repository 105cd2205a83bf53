"""Twins of methods for asyncio, which `in_asyncio` and `cancellable` make."""

import asyncio
import inspect
import threading

import pytest

from cellwright import Sandbox, Session
from cellwright.harness.sandbox.calls.executing import AsyncClosing, close_unused, in_asyncio


class Made(AsyncClosing):
    """A thing that notes that it was closed, and opens another one once it may."""

    def __init__(self) -> None:
        self.closed, self.begun, self.may_end = (threading.Event() for _ in range(3))

    def close(self) -> None:
        self.closed.set()

    def open(self, other: "Made", *, well: bool = True) -> "Made":
        self.begun.set()
        assert self.may_end.wait(60)
        assert well
        return other

    aopen = in_asyncio(open, close_unused)


class Own(Made):
    """A class with an `open` of its own."""

    def open(self, other: Made, *, well: bool = True) -> Made:
        return self


def test_what_is_made_after_its_task_was_cancelled_is_closed() -> None:
    made, other = Made(), Made()

    async def cancelled() -> None:
        task = asyncio.create_task(made.aopen(other))
        await asyncio.to_thread(made.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not other.closed.is_set()
    made.may_end.set()
    assert other.closed.wait(60)


def test_a_twin_calls_the_method_of_the_objects_class_and_passes_its_errors_on() -> None:
    own, made = Own(), Made()
    assert asyncio.run(own.aopen(made)) is own
    made.may_end.set()
    with pytest.raises(AssertionError):
        asyncio.run(made.aopen(own, well=False))
    assert not own.closed.is_set()


@pytest.mark.parametrize(
    ("twin", "method"),
    [
        (Session.abranch, Session.branch), (Session.asave_skill, Session.save_skill),
        (Session.aterminal, Session.terminal), (Sandbox.aresume, Sandbox.resume),
        (Sandbox.ajudge, Sandbox.judge), (Sandbox.acompile, Sandbox.compile),
    ],
)  # fmt: skip
def test_a_twin_has_the_signature_of_its_method_and_is_a_coroutine_function(
    twin: object, method: object
) -> None:
    assert inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(method)  # type: ignore[arg-type]
    assert twin.__name__ == f"a{method.__name__}"  # type: ignore[attr-defined]
