"""Mutations of the rules by which a cgroup serves another cell, or is removed (runner/cgroups)."""

from tests.mutations import Edit, Mutation, drop, replace

_ASKED = ("tests/escapes/test_used_cgroups.py",)
_FILE = "runner/cgroups/counters.py"
_ALIKE, _EMPTY = "CountedCgroup.take_back", "CountedCgroup._is_empty"


def _rule(layer: str, function: str, find: str, instead: str) -> Mutation:
    return _is(layer, replace(_FILE, function, find, instead))


def _is(layer: str, edit: Edit) -> Mutation:
    return Mutation(layer, _ASKED, (edit,))


USED_CGROUPS = (
    _rule("only after one process", _ALIKE, "processes != 1", "False"),
    _rule("only after little memory", _ALIKE, "memory >= self._caps.memory_bytes // 2", "False"),
    _rule("only after a cell that was ready", _ALIKE, "not was_left", "False"),
    _rule("not after it was retired", _ALIKE, "self._is_retired", "False"),
    _rule("only a number of times", _ALIKE, "self._cells >= cells_each", "False"),
    _rule("only without a process", _EMPTY, 'counters.number("processes") != 0', "False"),
    _rule("not after a kill", _EMPTY, 'kills.get("oom_kill") != 0', "False"),
    _rule("not after a refusal", _EMPTY, 'refusals.get("max") != 0', "False"),
    _rule("only with little memory charged", _EMPTY, "charged <= most", "True"),
    _rule("peak of each cell", "CountedCgroup.renew", "self._counters.reset()", "True"),
    _rule(
        "CPU time of each cell", "CountedCgroup._user_and_system", "self._times_before", "(0, 0)"
    ),
    _rule("share of each cell", "CountedCgroup.renew", "self._write_cpu_cap()", "None"),
    Mutation(
        "not while a supervisor holds it",
        ("tests/runner/test_cgroups.py",),
        (
            replace(
                "runner/cgroups/detect.py",
                "sweep",
                "_remove_unlocked(left)",
                "remove_with_cells(left)",
            ),
        ),
    ),
    _is("not after a session", drop("runner/supervisor.py", "_cell_of", "held.cell.cgroup.retire")),
    _is("not with a guard", drop("runner/launching/generation.py", "_open_guard", "cgroup.retire")),
    _is("not after a freeze", drop("runner/cgroups/v1.py", "freeze", "self.retire")),
    _is("not after a kill by cgroup", drop("runner/cgroups/v1.py", "kill", "self.retire")),
)
