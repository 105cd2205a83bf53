"""The table of sessions and other things of clients: its quota counts what is in it and what is coming."""

import pytest

from cellwright import BusyError
from cellwright.harness.servers.client_quota import ClientQuota, OwnedTable, QuotaLevel


class Thing:
    lost = ""


def table(over: list[str] | None = None) -> OwnedTable[str, Thing]:
    of_client = QuotaLevel(3, of=lambda owner: owner.partition("/")[0])
    quota = ClientQuota("things", QuotaLevel(2, "conversation"), 4, "close one", [of_client])
    noted = [] if over is None else over
    return OwnedTable(quota, lambda each: each.lost, lambda key, each: noted.append(key))


def test_every_level_of_a_quota_refuses_and_frees() -> None:
    things = table()
    with things.room("ann/1", 2) as put:
        put("a", Thing())
        put("b", Thing())
    with pytest.raises(BusyError, match="at most 2 for each conversation\nhint: close one"):
        things.room("ann/1").__enter__()
    with things.room("ann/2"), pytest.raises(BusyError, match="at most 3 for each client"):
        things.room("ann/3").__enter__()
    with (
        things.room("bob/1", 2),
        pytest.raises(BusyError, match="4 for all conversations together"),
    ):
        things.room("eve/1").__enter__()
    assert things.pop("a")
    assert things.pop("a") is None
    with things.room("ann/1"), things.room("ann/2"):
        pass


def test_a_thing_that_is_over_gives_its_place_back_once() -> None:
    over: list[str] = []
    things = table(over)
    with things.room("ann/1", 2) as put:
        first = put("a", Thing())
        put("b", Thing())
    first.lost = "ended"
    assert things.get("a") is first  # its reason can still be read
    with things.room("ann/1") as put:
        put("c", Thing())
    assert over == ["a"]
    assert things.pop("a") is None
    assert [key for key, _ in things.items()] == ["b", "c"]
    assert len(things.of("ann/1")) == 2


def test_a_place_that_is_not_filled_is_given_back() -> None:
    things = table()
    with pytest.raises(ZeroDivisionError), things.room("ann/1", 2):
        raise ZeroDivisionError
    with things.room("ann/1", 2) as put:
        assert put("a", first := Thing()) is first
        assert put("a", Thing()) is first  # another thread was first
    with things.room("ann/1"):
        pass


def test_a_thing_without_room_takes_a_place_or_is_refused() -> None:
    things = table()
    with things.room("ann/1", 0) as put:
        put("a", Thing())
        put("b", Thing())
        with pytest.raises(BusyError):
            put("c", Thing())
    assert [key for key, _ in things.items()] == ["a", "b"]
