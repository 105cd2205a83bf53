"""Merging of near-duplicate tools: of two that do the same, one is kept, with the tests of both.

Drafts of several runs at once cannot see each other, so that two runs make two tools for one job.  That
tools look alike is a guess; that each passes the tests of the other too decides.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ...policies.errors import ToolError
from ..schemas.functions import describe_source
from ..schemas.spec import ToolSpec, ToolState, ToolTest
from ..tools.registry import ToolRegistry
from ..tools.similarity import are_near, shape_of
from .execution import ToolExecutor

_MOST_PAIRS = 200  # that are tested; each costs a cell for each test


class MergedTool(NamedTuple):
    """What was done with two tools that do the same: `kept` has the tests of both."""

    kept: ToolSpec
    retired: ToolSpec


def merge_similar(
    registry: ToolRegistry, executor: ToolExecutor, specs: Sequence[ToolSpec]
) -> tuple[MergedTool, ...]:
    """Merge those of the live tools `specs` that do the same; return what was merged.

    A trusted tool is kept before others, and an older one before a newer one, so that two processes
    choose alike.  A tool without a test that calls it is left alone: any other one would pass its
    tests.
    """
    left = sorted((each for each in specs if _is_tested(each)), key=_rank)
    merged: list[MergedTool] = []
    tried = 0
    while left:
        kept = left.pop(0)
        for other in tuple(left):
            if not _may_be_same(kept, other) or tried >= _MOST_PAIRS:
                continue
            tried += 1
            if _passes(executor, kept, other) and _passes(executor, other, kept):
                kept = _with_tests_of(registry, kept, other)
                retired = registry.set_state(other.reference, ToolState.RETIRED)
                merged.append(MergedTool(kept, retired))
                left.remove(other)
    return tuple(merged)


def _rank(spec: ToolSpec) -> tuple[bool, str, str]:
    return spec.state is not ToolState.TRUSTED, spec.created_at, spec.name


def _is_tested(spec: ToolSpec) -> bool:
    calls = re.compile(rf"\b{re.escape(spec.function)}\s*\(")
    return any(not each.source or calls.search(each.source) for each in spec.tests)


def _may_be_same(kept: ToolSpec, other: ToolSpec) -> bool:
    """Tell whether two tools take arguments of the same kinds, may do the same, and read alike."""
    rights = [(each.grants, each.calls, each.risky) for each in (kept, other)]
    shapes = [shape_of(each.parameters) for each in (kept, other)]
    return rights[0] == rights[1] and shapes[0] == shapes[1] and are_near(kept, other)


def _passes(executor: ToolExecutor, spec: ToolSpec, other: ToolSpec) -> bool:
    """Tell whether a tool passes the tests of another."""
    tried = replace(spec, tests=_tests_for(spec, other))
    try:
        executor.try_out(tried, describe_source(spec.source_code, spec.name))
    except ToolError:
        return False
    return True


def _tests_for(spec: ToolSpec, other: ToolSpec) -> tuple[ToolTest, ...]:
    """Return the tests of `other`, in which its function is the one of `spec`."""
    if spec.function == other.function:
        return other.tests
    alias = f"{other.function} = {spec.function}\n"
    return tuple(
        replace(each, source=alias + each.source) if each.source else each for each in other.tests
    )


def _with_tests_of(registry: ToolRegistry, kept: ToolSpec, other: ToolSpec) -> ToolSpec:
    """Store the next version of a tool, which has the tests of another too, and the state as before:
    its source is the same.  The name of the other leads to it from now on."""
    more = [each for each in _tests_for(kept, other) if each not in kept.tests]
    replaces = dict.fromkeys((*kept.replaces, *other.replaces, other.name))
    return registry.add(replace(kept, tests=(*kept.tests, *more), replaces=tuple(replaces)))
