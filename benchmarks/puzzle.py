"""A tree search by branches: eight queens, each node of the tree is a session."""

import time
from typing import NamedTuple

from ..harness.sandbox.session import Session

_STATE = """\
queens = []
def safe():
    row = len(queens)
    return [
        column for column in range(8)
        if all(column != c and abs(column - c) != row - r for r, c in enumerate(queens))
    ]
def place(column):
    queens.append(column)
    return [list(queens), safe()]
"""


class TreeSearch(NamedTuple):
    """What a search came to."""

    nodes: int
    solutions: tuple[tuple[int, ...], ...]
    by_memory: int
    seconds: float


def search(root: Session, most_nodes: int) -> TreeSearch:
    """Try every safe column of each row in a branch, depth first, until there are `most_nodes`."""
    began = time.perf_counter()
    root.execute(_STATE)
    solutions: list[tuple[int, ...]] = []
    nodes = by_memory = 0
    waiting = [(root, column) for column in reversed(range(8))]
    left = {root.id: len(waiting)}
    while waiting:
        parent, column = waiting.pop()
        if nodes < most_nodes:
            (node,) = parent.branch()
            nodes += 1
            by_memory += node.forked_by == "memory"
            queens, columns = node.execute(f"place({column})").value
            if len(queens) == 8:
                solutions.append(tuple(queens))
            left[node.id] = len(columns)
            waiting += [(node, each) for each in reversed(columns)]
            if not columns:
                node.close()
        left[parent.id] -= 1
        if not left[parent.id] and parent is not root:
            parent.close()
    return TreeSearch(nodes, tuple(solutions), by_memory, time.perf_counter() - began)


def expected(most_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Return the solutions that a search without cells finds in as many nodes."""
    solutions: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [(column,) for column in reversed(range(8))]
    for _ in range(most_nodes):
        if not waiting:
            break
        queens = waiting.pop()
        row = len(queens)
        if row == 8:
            solutions.append(queens)
            continue
        waiting += [
            (*queens, column)
            for column in reversed(range(8))
            if all(column != c and abs(column - c) != row - r for r, c in enumerate(queens))
        ]
    return tuple(solutions)
