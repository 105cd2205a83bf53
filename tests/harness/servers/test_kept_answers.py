"""The answers that are kept by key, of a web server and of the node of a fleet."""

from cellwright.harness.servers.served_requests import KeptAnswers, KeptLimits


def answers(number: int, size: int = 1000, *, forgotten: int = 10) -> KeptAnswers[bytes]:
    return KeptAnswers(len, KeptLimits(number, size), most_forgotten=forgotten)


def kept(memory: KeptAnswers[bytes], key: str) -> bytes | None:
    entry, is_new = memory.begin(key, b"")
    assert not is_new
    return entry.answer.result(0)


def keep(memory: KeptAnswers[bytes], key: str, answer: bytes, owner: str = "") -> None:
    _, is_new = memory.begin(key, b"", owner)
    assert is_new
    memory.end(key, answer)


def test_an_answer_is_kept_and_a_request_at_work_is_not_begun_twice() -> None:
    memory = answers(2)
    entry, is_new = memory.begin("a", b"digest")
    assert is_new
    again, is_new = memory.begin("a", b"other")
    assert again is entry
    assert (is_new, again.digest, again.answer.done()) == (False, b"digest", False)
    memory.end("a", b"outcome")
    assert kept(memory, "a") == b"outcome"


def test_older_answers_are_forgotten_by_number_and_by_bytes_but_not_that_they_began() -> None:
    for most, most_bytes, size in ((3, 1000, 1), (1000, 30, 10)):
        memory = answers(most, most_bytes)
        for number in range(5):
            keep(memory, str(number), b"x" * size)
        assert [kept(memory, str(number)) for number in range(5)] == [None, None] + [
            b"x" * size
        ] * 3


def test_what_is_remembered_without_an_answer_is_bounded() -> None:
    memory = answers(1)
    for number in range(100):
        keep(memory, str(number), b"x")
    assert len(memory._forgotten) == 10
    assert memory.begin("0", b"")[1]


def test_a_request_that_did_nothing_can_be_tried_again() -> None:
    memory = answers(2)
    waiting, _ = memory.begin("a", b"")
    memory.end("a", b"full", is_kept=False)
    assert waiting.answer.result(0) == b"full"
    assert memory.begin("a", b"")[1]


def test_the_oldest_of_an_owner_make_room_before_those_of_others() -> None:
    memory: KeptAnswers[bytes] = KeptAnswers(len, KeptLimits(4, 100), KeptLimits(2, 100))
    running, _ = memory.begin("running", b"", "ann")
    for key, owner in (("a", "bob"), ("b", "ann"), ("c", "ann"), ("d", "ann"), ("e", "eve")):
        keep(memory, key, b"x", owner)
    assert memory.begin("b", b"")[1]
    assert [kept(memory, key) for key in "acde"] == [b"x"] * 4
    assert not running.answer.done()


def test_an_answer_is_kept_for_so_long() -> None:
    now = [0.0]
    memory: KeptAnswers[bytes] = KeptAnswers(
        len, KeptLimits(9, 9), seconds=10.0, clock=lambda: now[0]
    )
    keep(memory, "a", b"x")
    now[0] = 9.0
    assert kept(memory, "a") == b"x"
    now[0] = 10.0
    assert memory.begin("a", b"")[1]
    assert not memory._bytes
