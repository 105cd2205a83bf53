"""Random programs, branched at a random point, beside a twin that is not branched.

Each program makes a state of several kinds, and then shows and changes it.  The source, both
branches and the twin get the same requests from there on.  All must answer alike: a branch has all
that its source had, and sees nothing that another changes.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sessions.session import Session
from .settings import Settings

_SEED = 23
_BRANCHES, _SHOWN = 2, 8  # branches of a program, and requests that show its state


class _Piece(NamedTuple):
    """A piece of state: what makes it, and an expression that shows and changes it.

    `{k}` is its number in the program, `{n}` a random number.
    """

    make: str
    show: str


_PIECES = (
    _Piece(
        "d{k} = {{i: str(i) * {n} for i in range({n})}}",
        "(d{k}.popitem(), len(d{k}), hash(frozenset(d{k})) % 97)",
    ),
    _Piece(
        "def g{k}():\n  n = {n}\n  while True:\n    n = (n * 31 + (yield n) or 1) "
        "% 1009\ni{k} = g{k}(); next(i{k})",
        "i{k}.send({n})",
    ),
    _Piece(
        "def f{k}():\n  c = [{n}]\n  return lambda: (c.append(len(c)), sum(c))[1]\nh{k} = f{k}()",
        "h{k}()",
    ),
    _Piece(
        "class C{k}:\n  __slots__ = ('a', 'b')\nc{k} = C{k}(); c{k}.a = {n}; c{k}.b = c{k}",
        "(setattr(c{k}, 'a', c{k}.a + 1), c{k}.b.a)",
    ),
    _Piece(
        "try:\n  [][{n}]\nexcept IndexError as e:\n  e{k} = e",
        "(e{k}.args, e{k}.__traceback__.tb_lineno, e{k}.add_note('x'), len(e{k}.__notes__))",
    ),
    _Piece(
        "import sqlite3\ns{k} = sqlite3.connect(':memory:'); "
        "s{k}.execute('create table t (n)'); s{k}.executemany('insert into t "
        "values (?)', [(i,) for i in range({n})])",
        "(s{k}.execute('insert into t values ({n})').rowcount, "
        "s{k}.execute('select sum(n), count(*) from t').fetchone())",
    ),
    _Piece(
        "b{k} = bytearray({n} * 4096); b{k}[::4096] = bytes(i % 251 for i in range({n}))",
        "(b{k}.extend(b'zz'), len(b{k}), sum(b{k}[::4096]))",
    ),
    _Piece(
        "o{k} = open('file{k}', 'w+'); o{k}.write('abc' * {n}); o{k}.flush(); o{k}.seek({n})",
        "(o{k}.read(3), o{k}.tell(), o{k}.write('d'), o{k}.flush())",
    ),
    _Piece(
        "import random; random.seed({n})",
        "random.random()",
    ),
    _Piece(
        "import array; a{k} = array.array('d', range({n}))",
        "(a{k}.append({n}), sum(a{k}))",
    ),
    _Piece(
        "import decimal; x{k} = decimal.Decimal({n}).sqrt()",
        "globals().update(x{k}=x{k} * 3) or str(x{k})",
    ),
    _Piece(
        "import hashlib; m{k} = hashlib.sha256(b'{n}')",
        "(m{k}.update(b'q'), m{k}.hexdigest())",
    ),
    _Piece(
        "import zlib; z{k} = zlib.compressobj()",
        "len(z{k}.compress(b'{n}' * 99)) + len(z{k}.flush(zlib.Z_SYNC_FLUSH))",
    ),
    _Piece(
        "import collections, heapq; q{k} = list(range({n}, 0, -1)); heapq.heapify(q{k})",
        "(heapq.heappop(q{k}) if q{k} else 0, len(q{k}))",
    ),
    _Piece(
        "import itertools; t{k} = itertools.accumulate(itertools.count({n}))",
        "next(t{k})",
    ),
    _Piece(
        "import re; r{k} = re.finditer('a', 'a' * {n})",
        "getattr(next(r{k}, None), 'start', int)()",
    ),
    _Piece(
        "import os; os.makedirs('p{k}/{n}'); open('p{k}/{n}/f', 'w').write('x')",
        "(sorted(os.listdir('p{k}')), os.mkdir(f'p{k}/x{{len(os.listdir(\"p{k}\"))}}'))",
    ),
)


class Twins(NamedTuple):
    """How many programs there were, how many agreed with their twin, and how branches were made."""

    programs: int
    agreed: int
    by_memory: int
    branches: int


def twins(settings: Settings, count: int) -> Twins:
    """Run `count` random programs, each with a twin, and branch each at a random point."""
    chance = random.Random(_SEED)
    with Sandbox(policy=settings.policy) as sandbox:
        done = [_one(sandbox, chance) for _ in range(count)]
    agreed = sum(alike for alike, _ in done)
    return Twins(count, agreed, sum(memory for _, memory in done), count * _BRANCHES)


def _one(sandbox: Sandbox, chance: random.Random) -> tuple[bool, int]:
    """Return whether all answers of one program were alike, and its branches by memory."""
    makes, shows = _program(chance)
    point = chance.randrange(len(shows))
    before, after = (*makes, *shows[:point]), shows[point:]
    with sandbox.session() as source, sandbox.session() as twin:
        first = [list(_answers(each, before)) for each in (source, twin)]
        branches = source.branch(_BRANCHES)
        rest = [list(_answers(each, after)) for each in (twin, source, *branches)]
        memory = sum(each.forked_by == "memory" for each in branches)
        for each in branches:
            each.close()
    return first[0] == first[1] and all(each == rest[0] for each in rest), memory


def _program(chance: random.Random) -> tuple[list[str], list[str]]:
    """Return the requests that make a state, and those that show and change it."""
    chosen = [
        (piece, {"k": place, "n": chance.randrange(1, 400)})
        for place, piece in enumerate(chance.choices(_PIECES, k=chance.randrange(2, 7)))
    ]
    makes = [piece.make.format(**words) for piece, words in chosen]
    shows = [piece.show.format(**words) for piece, words in chosen]
    return makes, [chance.choice(shows) for _ in range(_SHOWN)]


def _answers(
    session: Session, requests: tuple[str, ...] | list[str]
) -> Iterator[tuple[object, ...]]:
    for each in requests:
        result = session.execute(each)
        yield result.status, result.value, result.stdout, result.error
