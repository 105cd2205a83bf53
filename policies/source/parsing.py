"""Parsing of hostile Python source without harm to the process that embeds cellwright."""

import _ast as ast  # without what `ast` adds to it, which takes a millisecond to import
import re
import resource
import sys
import threading
import warnings

_FILENAME = "<source check>"
# Python warns of odd literals while it parses: on the host's stderr since 3.12, and if warnings are
# errors, a valid program does not parse.  `catch_warnings` is not thread-safe; one filter for this file
# name, installed once, is.
_FILTER = ("ignore", None, Warning, re.compile(re.escape(_FILENAME)), 0)

# CPython dies of SIGSEGV if its parser, or a walk over its tree, needs more stack than the thread has.
# Measured on x86-64, 3.11: the parser stops by itself within 1 MiB, not within 512 KiB; a walk needs 81
# bytes a level, and stops at three times the recursion limit.
_PARSER_BYTES = 1024 * 1024
_LEVEL_BYTES = 128
_LEVELS_PER_FRAME = 3
_CHARACTERS_PER_LEVEL = 2
_UNLIMITED_BYTES = 2 * 1024 * 1024  # of a thread where RLIMIT_STACK is infinite: pthread_create(3)

# CPython's parser keeps every prefix of an imported dotted name: memory grows with the square of the
# length, to 16 GiB for 256 Ki characters.  Any character outside ASCII may be part of a name.
_PARTS = 256
_NAME = r"[^\x00-/:-@\[-^`{-\x7f]"  # [\w\x80-\U0010ffff], compiled in a twentieth of the time
_GAP = r"[\s\\]*+"
_DOTTED = re.compile(rf"(?<!{_NAME})(?:{_NAME}++{_GAP}\.{_GAP})++")

# CPython 3.11 counts the depth of all trees in one place, and raises SystemError if two threads build
# trees at the same time (gh-106905).  Other threads of the embedding process may parse too.
_one_at_a_time = threading.RLock()  # reentrant: a finalizer may parse during a parse
_ATTEMPTS = 10


class TooDeep(Exception):  # noqa: N818 - becomes a finding
    """Parsing may need more stack than this thread has, or too much memory."""


def parse(code: str) -> ast.Module:
    """Return the syntax tree of `code`.

    Raises TooDeep if parsing could crash the process, and the exceptions of `ast.parse`: SyntaxError,
    ValueError, RecursionError, MemoryError.  The check uses the stack size that new threads get; a
    thread that was started with a smaller one is not detected.
    """
    if (needed := _needed(code)) > _stack():
        raise TooDeep(f"parsing may need {needed} bytes of stack, and a thread has {_stack()}")
    if any(name[0].count(".") >= _PARTS for name in _DOTTED.finditer(code)):
        raise TooDeep(f"parsing a name of more than {_PARTS} parts needs too much memory")
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(_FILENAME))
    return _parsed(code, _ATTEMPTS)


def _parsed(code: str, attempts: int) -> ast.Module:
    try:
        with _one_at_a_time:
            tree: ast.Module = compile(  # type: ignore[assignment]
                code, _FILENAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True
            )
            return tree
    except SystemError:
        if attempts == 1:
            raise
    return _parsed(code, attempts - 1)


def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a tree in the order of `ast.walk`."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            values = value if isinstance(value, list) else (value,)
            found += [each for each in values if isinstance(each, ast.AST)]
    return found


def _needed(code: str) -> int:
    levels = min(len(code) // _CHARACTERS_PER_LEVEL, sys.getrecursionlimit() * _LEVELS_PER_FRAME)
    return max(_PARSER_BYTES, levels * _LEVEL_BYTES)


def _stack() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    default = _UNLIMITED_BYTES if soft == resource.RLIM_INFINITY else soft
    return threading.stack_size() or default
