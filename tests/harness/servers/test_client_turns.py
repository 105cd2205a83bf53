"""`ClientTurns`: work of each client, and of all together, at once; the rest waits."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import pytest

from cellwright.harness.servers.http_access import ClientTurns

Begin = Callable[[str], Awaitable["_Work"]]


class _Work:
    """Work that holds a turn, once it has one, until `end` is set."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.begun = anyio.Event()
        self.end = anyio.Event()
        self.scope = anyio.CancelScope()

    async def run(self, turns: ClientTurns) -> None:
        with self.scope:
            async with turns.turn(self.client):
                self.begun.set()
                await self.end.wait()


async def _begin(turns: ClientTurns, group: anyio.abc.TaskGroup, client: str) -> _Work:
    work = _Work(client)
    group.start_soon(work.run, turns)
    await anyio.wait_all_tasks_blocked()
    return work


@pytest.mark.anyio
async def test_one_client_leaves_turns_for_another() -> None:
    turns = ClientTurns(per_client=2, total=3)
    async with anyio.create_task_group() as group:
        of_ann = [await _begin(turns, group, "ann") for _ in range(10)]
        assert [each.begun.is_set() for each in of_ann] == [True, True, *[False] * 8]
        assert (await _begin(turns, group, "bob")).begun.is_set()
        group.cancel_scope.cancel()
    assert not turns._held
    assert not turns._waiting


@pytest.mark.anyio
async def test_a_free_turn_goes_to_the_client_with_the_fewest() -> None:
    turns = ClientTurns(per_client=3, total=4)
    async with anyio.create_task_group() as group:
        of_ann = [await _begin(turns, group, "ann") for _ in range(20)]
        of_bob = [await _begin(turns, group, "bob") for _ in range(20)]
        of_cat = [await _begin(turns, group, "cat") for _ in range(2)]
        of_ann[0].end.set()
        await anyio.wait_all_tasks_blocked()
        assert of_cat[0].begun.is_set()  # though forty waited before
        assert not of_ann[3].begun.is_set()
        assert not of_bob[1].begun.is_set()
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_cancelled_work_leaves_its_place_and_its_turn() -> None:
    turns = ClientTurns(per_client=1, total=1)
    async with anyio.create_task_group() as group:
        first, second, third = [await _begin(turns, group, "ann") for _ in range(3)]
        second.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        first.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert third.begun.is_set()
        assert not second.begun.is_set()
        third.end.set()
    assert not turns._held
    assert not turns._waiting


@pytest.mark.anyio
async def test_a_turn_that_was_handed_to_cancelled_work_goes_on() -> None:
    turns = ClientTurns(per_client=1, total=1)
    async with anyio.create_task_group() as group:
        first, second, third = [await _begin(turns, group, "ann") for _ in range(3)]
        first.end.set()
        await anyio.lowlevel.checkpoint()  # the second has the turn, and has not run yet
        second.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert third.begun.is_set()
        third.end.set()
    assert not turns._held
    assert not turns._waiting
