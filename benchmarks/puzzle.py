"""The solutions of eight queens that harness/examples/tree_search.py has to find."""


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
