"""Source to syntax tree, without harm to the process that asks: the source is hostile."""

import ast
import re
import resource
import sys
import threading
import warnings

_FILENAME = "<source check>"
# Python warns of odd literals while it parses: on the host's stderr since 3.12, and where warnings are
# errors a fine program would not parse.  `catch_warnings` is not safe in threads; a filter for this
# name, put there once, is.
_FILTER = ("ignore", None, Warning, re.compile(re.escape(_FILENAME)), 0)

# CPython dies of SIGSEGV where its parser, or the walks over its tree, need more stack than the thread
# has.  Measured on x86-64, 3.11: the parser stops by itself within 1 MiB, not within 512 KiB; a walk
# needs 81 bytes a level, and stops at three times the recursion limit.
_PARSER_BYTES = 1024 * 1024
_LEVEL_BYTES = 128
_LEVELS_PER_FRAME = 3
_CHARACTERS_PER_LEVEL = 2
_UNLIMITED_BYTES = 2 * 1024 * 1024  # of a thread where RLIMIT_STACK is infinite: pthread_create(3)

# CPython's parser keeps every beginning of a dotted name that is imported: memory grows with the square
# of the length, to 16 GiB for 256 Ki characters.  Whatever is not ASCII may be part of a name.
_PARTS = 256
_NAME = r"[\w\x80-\U0010ffff]"
_GAP = r"[\s\\]*+"
_DOTTED = re.compile(rf"(?<!{_NAME})(?:{_NAME}++{_GAP}\.{_GAP})++")

# CPython 3.11 counts the depth of every tree that it makes in one place, and raises SystemError where
# two threads make one at a time (see gh-106905).  The process that embeds us may parse besides.
_one_at_a_time = threading.RLock()  # a finalizer that runs meanwhile may come back here
_ATTEMPTS = 10


class TooDeep(Exception):  # noqa: N818 - becomes a finding
    """This thread's stack, or the memory, may not be enough."""


def parse(code: str) -> ast.Module:
    """Return the tree.

    Raises TooDeep where trying could crash, and whatever `ast.parse` raises: SyntaxError, ValueError,
    RecursionError, MemoryError.  It asks for the stack that threads get now; of one that was started
    with less it cannot know.
    """
    if (needed := _needed(code)) > _stack():
        raise TooDeep(f"to parse it safely takes {needed} bytes of stack, a thread has {_stack()}")
    if any(name[0].count(".") >= _PARTS for name in _DOTTED.finditer(code)):
        raise TooDeep(f"to parse a name of more than {_PARTS} parts takes too much memory")
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(_FILENAME))
    return _parsed(code, _ATTEMPTS)


def _parsed(code: str, attempts: int) -> ast.Module:
    try:
        with _one_at_a_time:
            return ast.parse(code, _FILENAME)
    except SystemError:
        if attempts == 1:
            raise
    return _parsed(code, attempts - 1)


def _needed(code: str) -> int:
    levels = min(len(code) // _CHARACTERS_PER_LEVEL, sys.getrecursionlimit() * _LEVELS_PER_FRAME)
    return max(_PARSER_BYTES, levels * _LEVEL_BYTES)


def _stack() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    default = _UNLIMITED_BYTES if soft == resource.RLIM_INFINITY else soft
    return threading.stack_size() or default
