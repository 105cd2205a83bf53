"""`mapped`: many calls at once, with their outcomes in order and once each."""

import concurrent.futures
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ...policies.errors import CellwrightError
from ...runner.result import SandboxResult

_AHEAD = 2  # calls that are read from the iterable, for each one that runs

Program = str | bytes
Outcome = SandboxResult | CellwrightError
_Future = concurrent.futures.Future[SandboxResult]


def mapped(
    execute: Callable[[Program, str | None], SandboxResult],
    programs: Iterable[Program],
    keys: Iterable[str] | None,
    width: int,
    *,
    return_errors: bool,
) -> Iterator[Outcome]:
    """Yield the outcome of `execute` for each program; at most `width` run at once.

    Calls that have not started are cancelled when the iterator is closed, and those that run are
    waited for.
    """
    waiting: deque[_Future] = deque()
    pairs: Iterable[tuple[Program, str | None]] = (
        zip(programs, itertools.repeat(None)) if keys is None else zip(programs, keys, strict=True)
    )
    with concurrent.futures.ThreadPoolExecutor(width, "cellwright-fleet") as threads:
        try:
            for program, key in pairs:
                waiting.append(threads.submit(execute, program, key))
                while len(waiting) > _AHEAD * width or (waiting and waiting[0].done()):
                    yield _outcome(waiting.popleft(), return_errors)
            while waiting:
                yield _outcome(waiting.popleft(), return_errors)
        finally:
            for each in waiting:
                each.cancel()


def _outcome(future: _Future, return_errors: bool) -> Outcome:
    try:
        return future.result()
    except CellwrightError as error:
        if not return_errors:
            raise
        return error
