"""The memory of a node: calls that it began, and their outcomes."""

from cellwright.harness.fleet.key_memory import KeyMemory


def kept(memory: KeyMemory, key: str) -> bytes | None:
    call, is_new = memory.begin(key, b"")
    assert not is_new
    return call.outcome


def test_an_outcome_is_kept_and_a_call_that_runs_is_not_begun_twice() -> None:
    memory = KeyMemory(2, 100)
    call, is_new = memory.begin("a", b"digest")
    assert is_new
    again, is_new = memory.begin("a", b"digest")
    assert again is call
    assert not is_new
    assert not again.is_over.is_set()
    memory.end("a", b"outcome")
    assert again.is_over.is_set()
    assert kept(memory, "a") == b"outcome"


def test_older_outcomes_are_forgotten_by_number_and_by_bytes_but_not_that_they_began() -> None:
    for most, most_bytes, size in ((3, 1000, 1), (1000, 30, 10)):
        memory = KeyMemory(most, most_bytes)
        for number in range(5):
            memory.begin(str(number), b"")
            memory.end(str(number), b"x" * size)
        assert [kept(memory, str(number)) for number in range(5)] == [b"", b""] + [b"x" * size] * 3


def test_what_is_remembered_without_an_outcome_is_bounded() -> None:
    memory = KeyMemory(1, 100)
    for number in range(100):
        memory.begin(str(number), b"")
        memory.end(str(number), b"x")
    assert len(memory._forgotten) == 10
    assert memory.begin("0", b"")[1]


def test_a_call_that_did_not_begin_can_be_tried_again() -> None:
    memory = KeyMemory(2, 100)
    waiting, _ = memory.begin("a", b"")
    memory.undo("a", b"full")
    assert waiting.is_over.is_set()
    assert waiting.outcome == b"full"
    assert memory.begin("a", b"")[1]
