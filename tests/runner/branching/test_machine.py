"""The registers of stopped processes, by architecture: read and made without any process."""

import struct

import pytest

from cellwright.runner.branching import traced as machines
from cellwright.runner.branching.traced import Machine, Parked, machine

X86_64, AARCH64 = (machines._MACHINES[name] for name in ("x86_64", "aarch64"))
AT, STACK, RECEIVED = 0x7000_1000, 0x7FFF_0000, 3
NO_CALL = -1


def registers(known: Machine, **values: int) -> bytes:
    """Return registers that hold their own numbers, but for `values`."""
    words = list(range(1000, 1000 + known.words))
    for name, value in values.items():
        place = known.arguments[0] if name == "first" else getattr(known, name)
        words[place] = value & (1 << 64) - 1
    return struct.pack(f"={known.words}Q", *words)


def in_call(number: int) -> bytes:
    return number.to_bytes(4, "little", signed=True)


def x86(answer: int) -> bytes:
    return registers(
        X86_64, original=45, answer=answer, first=RECEIVED, stack_pointer=STACK, program_counter=AT
    )


def arm(first: int, at: int, ends: int = 5) -> bytes:
    return registers(
        AARCH64, call=207, first=first, stack_pointer=STACK, program_counter=at, ends=ends
    )


def test_a_call_that_was_interrupted_is_known_by_its_answer_on_x86_64() -> None:
    assert X86_64.parked(x86(-512)) == Parked(45, RECEIVED, AT - 2, STACK, is_interrupted=True)
    assert X86_64.parked(x86(-38)) == Parked(45, RECEIVED, AT - 2, STACK, is_interrupted=False)
    assert X86_64.parked(x86(7)) is None


def test_a_call_that_was_interrupted_is_put_back_already_on_aarch64() -> None:
    """As it begins x7 is 0, as it ends it is 1: syscall-entry-stop in ptrace(2)."""
    interrupted = AARCH64.parked(arm(RECEIVED, AT), in_call(NO_CALL))
    assert interrupted == Parked(207, RECEIVED, AT, STACK, is_interrupted=True)
    begun = AARCH64.parked(arm(RECEIVED, AT + 4, ends=0), in_call(207))
    assert begun == Parked(207, RECEIVED, AT, STACK, is_interrupted=False)
    # It answers three bytes, which is not the descriptor.
    assert AARCH64.parked(arm(3, AT + 4, ends=1), in_call(207)) is None


def test_another_process_makes_the_same_call() -> None:
    words = struct.unpack("=27Q", X86_64.repeating(x86(-512)))
    assert (words[10], words[15], words[16]) == (45, (1 << 64) - 1, AT - 2)
    assert AARCH64.repeating(arm(RECEIVED, AT)) == arm(RECEIVED, AT)


@pytest.mark.parametrize("known", [X86_64, AARCH64], ids=["x86_64", "aarch64"])
def test_a_call_has_its_number_and_its_arguments_where_it_is_made(known: Machine) -> None:
    parked = x86(-512) if known is X86_64 else arm(RECEIVED, AT)
    made = known.calling(parked, known.numbers["mmap"], (1, 2, -1))
    words = struct.unpack(f"={known.words}Q", made)
    assert words[known.call] == known.numbers["mmap"]
    assert [words[each] for each in known.arguments[:3]] == [1, 2, (1 << 64) - 1]
    assert words[known.program_counter] == (AT - 2 if known is X86_64 else AT)
    assert words[known.stack_pointer] == STACK
    assert known.answered(registers(known, answer=-13)) == -13


def test_both_make_the_same_calls() -> None:
    assert X86_64.numbers.keys() == AARCH64.numbers.keys()
    assert machine() in (X86_64, AARCH64, None)
