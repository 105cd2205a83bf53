"""`SharedBudget`: things that all cells need, which no cell can take from all others.  Pure.

Each cell has some of them for itself alone, and takes more from those in common while there are
any left.
"""

from typing import NamedTuple

_OWN_NAMES, _COMMON_NAMES = 4096, 4 * 131_072  # a name of 253 characters takes 500 bytes
_OWN_CONNECTIONS = 16


class SharedBudget:
    """`common` things for all cells, and `own` for each."""

    def __init__(self, common: int, own: int) -> None:
        self.common = common
        self.own = own

    def share(self) -> "BudgetShare":
        """Return what a new cell may take."""
        return BudgetShare(self)


class BudgetShare:
    """What one cell has taken of a budget."""

    def __init__(self, budget: SharedBudget) -> None:
        self._budget = budget
        self._taken = 0

    def has_room(self) -> bool:
        """Tell whether one more may be taken now."""
        return self._taken < self._budget.own or self._budget.common > 0

    def take(self) -> None:
        """Count one more; the caller has looked whether there is room."""
        if self._taken >= self._budget.own:
            self._budget.common -= 1
        self._taken += 1

    def give_back(self, count: int = 1) -> None:
        from_common = min(count, max(0, self._taken - self._budget.own))
        self._taken -= count
        self._budget.common += from_common

    def give_back_all(self) -> None:
        self.give_back(self._taken)


class Budgets(NamedTuple):
    """The budgets of a process."""

    names: SharedBudget
    connections: SharedBudget


def budgets(open_files: int) -> Budgets:
    """Return the budgets of a process that may have so many descriptors.

    Half of them are for cells' own sockets and connections, and for what resolves names.
    """
    common = open_files // 2 // 2  # a connection has two
    return Budgets(SharedBudget(_COMMON_NAMES, _OWN_NAMES), SharedBudget(common, _OWN_CONNECTIONS))
