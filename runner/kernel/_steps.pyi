from collections.abc import Callable

NUMBERS: dict[str, int]
Rehearsal = tuple[Callable[[], int], int, int, bytes]

def serve(
    program: bytes,
    sock: int,
    nursery: int,
    keeper: int,
    home: tuple[int, ...],
    hooks: bool,
    opens_sockets: bool,
    booted: bytes,
    rehearsal: Rehearsal,
    /,
) -> None: ...
def execute(
    program: bytes, inputs: tuple[int, ...], pages: bytes = b"", /
) -> tuple[int, int, str] | tuple[()]: ...
def fork(flags: int = 0, cgroup: int = -1, waits: bool = False, /) -> int: ...
def count(program: bytes, /) -> int: ...
def rehearse(
    work: Callable[[], int], near: int, far: int, regions: bytes, of_files: bool = False, /
) -> bytes: ...
def syscall(number: int, /, *arguments: int | bytes | bytearray | None) -> int: ...
def address(memory: bytearray | memoryview, /) -> int: ...
def sleeper(flags: int, proc: int, /) -> tuple[int, int, int, int, int]: ...
