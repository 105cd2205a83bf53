"""Forged states of paused sessions, sealed with their own tokens: refused, or contained in a cell.

Only the holder of a token can forge one.  Even so a forged state must give a session no more than a
program in that session could take by itself.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright import HostSettings, PauseSettings, Sandbox, SessionLost
from cellwright.errors import PauseError
from cellwright.harness.sandbox.sessions import state_file
from cellwright.harness.sandbox.sessions.pausing import PausedSession
from cellwright.harness.sandbox.sessions.state_file import FILES, HEADER, MEMORY, PauseToken
from cellwright.runner.branching.copying import PAGE_BYTES
from cellwright.runner.branching.keeping import KeptMemory, KeptReader, PageRun
from cellwright.runner.branching.kernel_state import OpenFile
from cellwright.runner.branching.traced import machine
from tests.conftest import policy_named
from tests.escapes.test_branches import seen_from_outside

MACHINE = machine()
pytestmark = [
    pytest.mark.needs("userns", "root"),
    pytest.mark.skipif(MACHINE is None, reason="no branches by memory on this machine"),
]

Pieces = list[tuple[bytes, bytes]]
Forge = Callable[[Pieces], Pieces]
# What a program changes for itself, and nothing else may differ.
OWN = {"SigIgn", "SigBlk", "Umask", "cwd", "descriptors"}
HIGH = 1 << 63
WORDS = 8  # bytes of a register
INSTRUCTION = MACHINE.program_counter if MACHINE else 0
STACK = MACHINE.stack_pointer if MACHINE else 0
# Registers, by index, with what a program may not have in them: more privilege, and another mode.  In
# struct user_regs_struct: eflags with IOPL 3, cs with the kernel's segment; in struct user_pt_regs:
# pstate with EL1, and of 32 bits.
PRIVILEGE, MODE = {
    "x86_64": ((18, 0x3246), (17, 0x10)),
    "aarch64": ((33, 0x3C5), (33, 0x10)),
}.get(os.uname().machine, ((0, 0), (0, 0)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forged")


@pytest.fixture(scope="module")
def sandbox(directory: Path) -> Iterator[Sandbox]:
    settings = PauseSettings(directory)
    with Sandbox(
        policy=policy_named("standard"), pool=2, host=HostSettings(pauses=settings)
    ) as box:
        yield box


class State:
    """The state of a paused session, which a test reads and writes with its token."""

    def __init__(self, directory: Path, token: str) -> None:
        self._path = directory / f"{token.split('_')[1]}.session"
        self._token = PauseToken.parse(token)

    def read(self) -> Pieces:
        with self._path.open("rb") as file:
            self._until = state_file.is_encrypted_until(file.fileno())[1]
            read = state_file.pieces(file.fileno(), self._token, None, self._until)
            return [(kind, bytes(data)) for kind, data in read]

    def write(self, pieces: Pieces) -> None:
        with self._path.open("wb") as file:
            writer = state_file.StateWriter(file.fileno(), self._token, None, self._until, 1 << 30)
            for kind, data in pieces:
                writer.add(kind, data)


def header(past: dict[str, Any] | None = None, **changes: Any) -> Forge:
    def forge(pieces: Pieces) -> Pieces:
        known = msgspec.msgpack.decode(pieces[0][1], type=PausedSession)
        made = msgspec.structs.replace(known, past=known.past._replace(**past or {}), **changes)
        return [(HEADER, msgspec.msgpack.encode(made)), *pieces[1:]]

    return forge


def head(change: Callable[[KeptMemory], KeptMemory], more: bytes = b"") -> Forge:
    """Forge the head of the memory, and add `more` to its pages."""

    def forge(pieces: Pieces) -> Pieces:
        memory = b"".join(data for kind, data in pieces if kind == MEMORY)
        file = os.memfd_create("forged")
        try:
            os.write(file, memory)
            reader = KeptReader(file)
            pages = memory[: reader._pages_bytes] + more
            made = msgspec.msgpack.encode(change(reader.kept))
        finally:
            os.close(file)
        forged = pages + made + len(made).to_bytes(8, "little")
        others = [each for each in pieces if each[0] in (HEADER, FILES)]
        parts = [forged[at : at + (8 << 20)] for at in range(0, len(forged), 8 << 20)]
        return [*others, *((MEMORY, each) for each in parts), pieces[-1]]

    return forge


def state(**changes: Any) -> Forge:
    return head(lambda kept: msgspec.structs.replace(kept, state=kept.state._replace(**changes)))


def status(**changes: str) -> Forge:
    return head(
        lambda kept: msgspec.structs.replace(
            kept, state=kept.state._replace(status={**kept.state.status, **changes})
        )
    )


def register(number: int, value: int) -> Forge:
    def change(kept: KeptMemory) -> KeptMemory:
        at = number * WORDS
        registers = (
            kept.registers[:at] + value.to_bytes(WORDS, "little") + kept.registers[at + WORDS :]
        )
        return msgspec.structs.replace(kept, registers=registers)

    return head(change)


def maps(change: Callable[[bytes], bytes]) -> Forge:
    return head(lambda kept: msgspec.structs.replace(kept, maps=change(kept.maps)))


def more_maps(line: str) -> Forge:
    """Add a mapping, in order of addresses."""
    added = line.encode() + b"\n"

    def change(text: bytes) -> bytes:
        lines = [*text.splitlines(keepends=True), added]
        return b"".join(sorted(lines, key=lambda each: int(each.split(b"-")[0], 16)))

    return maps(change)


def page_at(address: int) -> Forge:
    """Add a page there."""

    def change(kept: KeptMemory) -> KeptMemory:
        return msgspec.structs.replace(kept, runs=(*kept.runs, PageRun(address, PAGE_BYTES)))

    return head(change, bytes(PAGE_BYTES))


def opened(path: str, flags: int = os.O_RDONLY, number: int = 4) -> Forge:
    def change(kept: KeptMemory) -> KeptMemory:
        like = kept.state.files[0].status
        files = (*kept.state.files, OpenFile(number, path, flags, 0, like))
        return msgspec.structs.replace(kept, state=kept.state._replace(files=files))

    return head(change)


def limits(kept: KeptMemory) -> KeptMemory:
    most = tuple((-1, -1) for _ in kept.state.limits)
    return msgspec.structs.replace(kept, state=kept.state._replace(limits=most))


FORGED: dict[str, Forge] = {
    # the layout
    "no layout": maps(lambda text: b""),
    "a layout that is no text of the kernel": maps(lambda text: b"\xff" * 100 + b"\n"),
    "a mapping in the kernel": more_maps("ffff800000000000-ffff800000001000 rwxp 00000000 00:00 0"),
    "a mapping over all": maps(lambda text: b"0-7ffffffff000 rwxp 00000000 00:00 0\n" + text),
    "a mapping that ends before it begins": maps(
        lambda text: b"2000-1000 rw-p 00000000 00:00 0\n" + text
    ),
    "huge mappings that cancel out": maps(
        lambda text: b"10000-400000000000 rw-p 0 00:00 0\n400000000000-10000 rw-p 0 00:00 0\n" + text
    ),
    "mappings in another order": maps(
        lambda text: b"".join(reversed(text.splitlines(keepends=True)))
    ),
    "each mapping twice": maps(lambda text: text + text),
    "the first page": more_maps("0-1000 rwxp 00000000 00:00 0"),
    "shared memory": more_maps("100000000-100001000 rw-s 00000000 00:01 7 /dev/zero (deleted)"),
    "another vDSO": more_maps("100000000-100001000 rwxp 00000000 00:00 0 [vdso]"),
    "a file of the host": more_maps("100000000-100001000 r--p 00000000 08:01 7 /etc/shadow"),
    "a device": more_maps("100000000-100001000 rw-p 00000000 00:05 7 /dev/mem"),
    "no C library": maps(
        lambda text: b"".join(
            each for each in text.splitlines(keepends=True) if b"libc" not in each
        )
    ),
    # the registers
    "an instruction in the kernel": register(INSTRUCTION, HIGH | 0x1000),
    "an instruction nowhere": register(INSTRUCTION, 0x41414141),
    "privileged flags": register(*PRIVILEGE),
    "another mode of the processor": register(*MODE),
    "a stack in the kernel": register(STACK, HIGH | 0x1000),
    "registers too few": head(lambda kept: msgspec.structs.replace(kept, registers=b"")),
    "other registers of noise": head(
        lambda kept: msgspec.structs.replace(kept, extended=b"\xff" * len(kept.extended))
    ),
    # the pages
    "a page in the kernel": page_at(0xFFFF_8000_0000_0000),
    "a page at the end of addresses": page_at((1 << 64) - PAGE_BYTES),
    "a page that no mapping has": page_at(0x7FFF_FFFF_E000),
    # the files
    "the memory of the first process": opened("/proc/1/mem", os.O_RDWR),
    "its own memory": opened("/proc/self/mem", os.O_RDWR),
    "a file that the cell does not show": opened("/etc/shadow"),
    "a file to be made and cut": opened("/workspace/x", os.O_RDWR | os.O_CREAT | os.O_TRUNC),
    "a door to tools": opened("/dev/tools", os.O_RDWR),
    "a number below the others": opened("/dev/null", number=-1),
    "the number of its socket": opened("/dev/null", os.O_RDWR, number=3),
    "a number beyond all": opened("/dev/null", number=1 << 40),
    "a path with a NUL": opened("/dev/null\0/x"),
    # the rest
    "the most of every limit": head(limits),
    "the first priority": state(niceness=-20),
    "a processor that is not there": state(processors=frozenset({1 << 20})),
    "a long name": state(name=b"x" * 60_000),
    "a directory of another process": state(directory="/proc/1/root"),
    "a status without fields": state(status={}),
    "other capabilities": status(CapEff="000001ffffffffff", CapPrm="000001ffffffffff"),
    "no filter": status(Seccomp="0"),
    "the ids of root": status(Uid="0 0 0 0", Gid="0 0 0 0", Groups="0"),
    "a umask that is none": status(Umask="99999999999"),
    "each signal blocked and ignored": status(SigBlk="f" * 16, SigIgn="f" * 16),
    "a status that is no number": status(SigIgn="x"),
    "CPU time to be had": header(past={"cpu_seconds": -1e9}),
    "CPU time that is no number": header(past={"cpu_seconds": float("nan")}),
    "requests to be had": header(past={"requests": -(10**9)}),
    "another language": header(language="bash"),
    "an image elsewhere": header(image="../../../../etc/passwd"),
    "an image that is too long a name": header(image="a" * 5000),
    "files of noise": lambda pieces: [pieces[0], (FILES, b"\xff" * 1000), *pieces[1:]],
    "no memory": lambda pieces: [pieces[0], (MEMORY, b""), pieces[-1]],
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused_or_contained(
    sandbox: Sandbox, directory: Path, name: str
) -> None:
    with sandbox.session() as neighbour:
        neighbour.execute("mine = 'kept'")
        session = sandbox.session()
        session.execute("x = 41", files={"kept": b"file"})
        token = session.pause()
        paused = State(directory, token)
        genuine = paused.read()
        paused.write(FORGED[name](genuine))
        resumed = None
        with contextlib.suppress(PauseError, SessionLost):
            resumed = sandbox.resume(token)
        if resumed:
            with resumed, contextlib.suppress(SessionLost, OSError):  # it may end at any moment
                expected, seen = seen_from_outside(neighbour), seen_from_outside(resumed)
                assert {key: seen[key] for key in seen.keys() - OWN} == {
                    key: expected[key] for key in expected.keys() - OWN
                }
                resumed.execute("1", timeout=5)
        else:  # the token can be used again, and the genuine state is as good as ever
            paused.write(genuine)
            with sandbox.resume(token) as again:
                assert again.execute("x, open('kept').read()").value == [41, "file"]
        assert neighbour.execute("mine").value == "kept"
        with sandbox.session() as fresh:
            assert fresh.execute("'x' in globals()").value is False


# What is known to be refused: the others may as well be contained.
REFUSED = {
    "CPU time to be had": "malformed", "CPU time that is no number": "malformed",
    "requests to be had": "malformed", "a mapping over all": "laid out",
    "a mapping that ends before it begins": "laid out",
    "huge mappings that cancel out": "laid out", "mappings in another order": "laid out",
    "each mapping twice": "laid out", "another language": "policy", "other capabilities": "capabilities",
    "no filter": "seccomp filter", "the most of every limit": "permitted|limits",
    "the first priority": "ermi", "a door to tools": "descriptor",
    "the memory of the first process": "descriptor", "a file of the host": "mapped",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_forged_state_is_refused_by_name(sandbox: Sandbox, directory: Path, name: str) -> None:
    session = sandbox.session()
    session.execute("x = 41")
    token = session.pause()
    paused = State(directory, token)
    paused.write(FORGED[name](paused.read()))
    with pytest.raises(PauseError) as refused:
        sandbox.resume(token)
    assert re.search(REFUSED[name], str(refused.value)), refused.value
    sandbox.discard(token)
