"""The cost of a tool call: of a tool on the host and of a made one, from the host and from a cell."""

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..harness.making.factory import ToolFactory
from ..harness.sandbox.sandbox import Sandbox
from ..harness.schemas.spec import ToolSpec
from ..harness.tools.registry import ToolRegistry
from ..harness.tools.tool_store import ToolStore
from ..runner.settings import PoolSettings
from .measuring import (
    MS,
    Contender,
    median,
    percentile_columns,
    percentile_row,
    ratio,
    seconds_of,
    side_by_side,
)
from .report import Column, Criterion, Report, ReportTable
from .round_trips import by_language, seconds_of_call
from .scratch import scratch_directory
from .settings import Settings, sandbox

_SOURCE = "def double(n: int) -> int:\n    return n * 2"
_EXECUTE, _BY_HAND = "`execute('1+1')`, no tool", "`execute` of the source and a call"
_MADE, _HOST = "made tool, a fresh cell", "tool of the host"
_INSIDE, _NESTED = "tool of the host, from a cell", "made tool, from a cell: another cell"
_SHELVED, _ADDED = 10_000, 200
_REGISTRY = partial(
    ToolRegistry, maker_bytes=2**30, maker_versions=2 * _SHELVED
)  # one maker has all
_READY = PoolSettings()
_SECONDS = 45.0  # longest time of measuring single calls
_CLIENTS = (1, 2, 4, 8)


def increment(n: int) -> int:
    """Add one."""
    return n + 1


def measure(settings: Settings) -> Report:
    """Return percentiles of calls in turn, calls a second, and what a large registry takes."""
    with sandbox(settings) as outer, ToolFactory(outer) as factory:
        factory.registry.register(increment)
        factory.create_tool("double", "Double a number", _SOURCE, tests=[({"n": 21}, 42)])
        with (
            outer.sibling(factory.policy_of("double"), _READY) as bare,
            outer.sibling(outer.policy, _READY, factory.broker) as offering,
        ):
            times = _latencies(settings, factory, bare, offering)
            languages = by_language(settings, offering, "increment")
            rates = _rates(settings, factory)
    registry_times = _registry_times(settings)
    return _report(times, languages, rates, registry_times)


def _latencies(
    settings: Settings, factory: ToolFactory, bare: Sandbox, offering: Sandbox
) -> dict[str, list[float]]:
    given = {"given": {"n": 21}}
    by_hand = partial(bare.execute, f"{_SOURCE}\n[double(**given)]", inputs=given)
    inside = partial(seconds_of_call, offering, "increment", settings.amount(200, 20))
    nested = partial(seconds_of_call, offering, "double", settings.amount(20, 4))
    return side_by_side(
        [
            Contender(_EXECUTE, partial(bare.execute, "1+1"), bare.settle),
            Contender(_BY_HAND, by_hand, bare.settle),
            Contender(_MADE, partial(factory.call, "double", {"n": 21}), factory.settle),
            Contender(_HOST, partial(factory.call, "increment", {"n": 21})),
            Contender(_INSIDE, inside, every=10),
            Contender(_NESTED, nested, factory.settle, every=10),
        ],
        settings.amount(2000, 30),
        seconds=_SECONDS,
    )


def _rates(settings: Settings, factory: ToolFactory) -> list[tuple[int, float, float]]:
    """Return (callers at a time, calls a second of a made tool, of one of the host)."""
    calls = settings.amount(250, 10)
    return [
        (
            clients,
            _rate(partial(factory.call, "double", {"n": 1}), clients, calls),
            _rate(partial(factory.call, "increment", {"n": 1}), clients, calls * 10),
        )
        for clients in _CLIENTS
    ]


def _rate(call: Any, clients: int, calls: int) -> float:
    def work() -> None:
        for _ in range(calls):
            call()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * calls / (time.perf_counter() - began)


def _registry_times(settings: Settings) -> list[tuple[str, float]]:
    """Return what a registry of many tools takes, in milliseconds."""
    count, added = (500, 20) if settings.smoke else (_SHELVED, _ADDED)
    with scratch_directory() as directory:
        path = str(Path(directory, "tools.db"))
        with contextlib.closing(ToolStore(path)) as store:
            store.fill(map(_spec, range(count - added)))
        with _REGISTRY(path) as registry:
            adding = seconds_of(
                lambda: [registry.add(_spec(count - n)) for n in range(1, added + 1)]
            )
        found: list[ToolSpec] = []
        with _REGISTRY(path) as registry:
            loading = seconds_of(lambda: found.extend(registry.list_tools()))
            if len(found) != count:
                raise RuntimeError(f"{len(found)} tools instead of {count}")
            looking = seconds_of(lambda: [registry.get(f"tool_{n}") for n in range(count)])
    return [
        (f"load {count:,} tools", loading * MS),
        ("find one by name, the first time", looking / count * MS),
        ("add one, on the disk", adding / added * MS),
    ]


def _spec(number: int) -> ToolSpec:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    return ToolSpec(
        name=f"tool_{number}",
        description=f"Do what number {number} does with a number",
        source_code=_SOURCE,
        parameters=parameters,
        function="double",
    )


def _report(
    times: dict[str, list[float]],
    languages: ReportTable,
    rates: list[tuple[int, float, float]],
    registry_times: list[tuple[str, float]],
) -> Report:
    ratios = {way: ratio(seconds, times[_EXECUTE]) for way, seconds in times.items()}
    calls = ReportTable(
        title="One call",
        columns=(Column("what"), *percentile_columns(3), Column("ratio", 2), Column("±, %", 0)),
        rows=tuple(
            (way, *percentile_row(seconds), ratios[way].value, ratios[way].spread * 100)
            for way, seconds in times.items()
        ),
        note="Calls from a cell are counted by the program itself, many in one cell.",
    )
    many = ReportTable(
        title="Calls a second",
        columns=(Column("callers", 0), Column(_MADE, 0), Column(_HOST, 0)),
        rows=tuple(rates),
    )
    kept = ReportTable(
        title="A registry", columns=(Column("what"), Column("ms", 3)), rows=tuple(registry_times)
    )
    return Report(
        name="tools",
        title="What a call of a tool costs",
        tables=(calls, languages, many, kept),
        verdicts=_verdicts(times, registry_times),
        notes=(
            "The profile `tool`, every layer on, audit trail in a file; in turn, in one process.",
        ),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )


def _verdicts(
    times: dict[str, list[float]], registry_times: list[tuple[str, float]]
) -> tuple[Criterion, ...]:
    slower = median(times[_MADE]) / median(times[_EXECUTE])
    loading = registry_times[0][1]
    return (
        Criterion(
            "a made tool takes less than twice as long as `1+1`", slower < 2, f"{slower:.2f} times"
        ),
        Criterion(
            "ten thousand tools load in less than a second", loading < MS, f"{loading:.0f} ms"
        ),
    )
