"""A tree search: eight queens, each node a branch of a living session; 1,000 nodes, timed."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from cellwright import Sandbox, Session

BOARD = """
queens = []
def is_safe(column):
    return all(abs(column - c) not in (0, len(queens) - r) for r, c in enumerate(queens))
def place(column):
    queens.append(column)
    return [queens, [column for column in range(8) if is_safe(column)]]
"""


@dataclass
class TreeSearch:
    """The result of a search."""

    nodes: int = 0
    by_memory: int = 0
    solutions: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0


def search(root: Session, most_nodes: int) -> TreeSearch:
    """Try every safe column of each row in a branch, depth first, until there are `most_nodes`."""
    found, began = TreeSearch(), time.perf_counter()
    root.execute(BOARD)
    _visit(root, range(8), most_nodes, found)
    found.seconds = time.perf_counter() - began
    return found


def _visit(board: Session, columns: Iterable[int], most_nodes: int, found: TreeSearch) -> None:
    for column in columns:
        if found.nodes == most_nodes:
            return
        with board.branch()[0] as node:  # the cell ends with the block
            queens, safe = node.execute(f"place({column})").value
            found.nodes += 1
            found.by_memory += node.forked_by == "memory"
            if len(queens) == 8:
                found.solutions.append(tuple(queens))
            _visit(node, safe, most_nodes, found)


def main() -> None:
    with Sandbox() as sandbox, sandbox.session() as root:
        found = search(root, 1000)
    print(f"{found.nodes} nodes, {len(found.solutions)} solutions, the first {found.solutions[0]}")
    print(f"{found.by_memory} branches by memory, {found.seconds:.1f} s")


if __name__ == "__main__":
    main()
