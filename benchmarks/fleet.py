"""Programs over nodes of a fleet: what Ray costs a call, rates by number of nodes, and a lost node.

The nodes are processes on this host, so that they share its processors.
"""

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..harness.fleet.cell_node import CellNode, NodeSettings
from ..harness.fleet.fleet import Fleet
from ..harness.fleet.ray_nodes import LocalCluster
from ..policies.errors import OutcomeUnknown
from ..runner.requests.result import SandboxResult
from .measuring import (
    Contender,
    Times,
    distribution,
    median,
    percentile_columns,
    percentile_row,
    quartile_columns,
    quartiles,
    side_by_side,
)
from .programs import SUM
from .report import Column, Criterion, Curves, Report, ReportTable
from .scratch import scratch_directory
from .settings import Settings, sandbox
from .throughput import Round, ThroughputContender, turn

_NODES = (1, 2, 4)
_SLOTS, _CLIENTS = 4, 8
_OWN = "own sandbox"
_HERE, _RAY = "fleet, its node in this process", "fleet, its node on Ray"
Rates = dict[str, list[Round]]


class Loss(NamedTuple):
    """What became of programs among which a node was killed."""

    programs: int
    right: int
    wrong: int
    unknown: int
    twice: int  # programs that began more than once, by the trails of both nodes


def measure(settings: Settings) -> Report:
    """Return the cost of a call, rates and a node's loss; nothing where Ray is not installed."""
    if not importlib.util.find_spec("ray"):
        return Report(
            name="fleet", title="Cells on many hosts",
            notes=("Not measured: Ray is not installed (extra fleet).",),
        )  # fmt: skip
    with LocalCluster(1):
        times = _times(settings)
        rates = _rates(settings)
    return _report(times, rates, _loss(settings))


@contextmanager
def _on_ray(settings: Settings, nodes: int) -> Iterator[Fleet]:
    """Give a fleet whose nodes write a trail each."""
    with (
        scratch_directory() as directory,
        Fleet.on_ray(
            policy=settings.policy, slots=_SLOTS, pool=8, nodes_per_host=nodes,
            audit=f"{directory}/{{node}}.jsonl",
        ) as fleet,
    ):  # fmt: skip
        yield fleet


class _NodeHere:
    """A node of a fleet in this process."""

    name = "here"

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._node = CellNode(
            NodeSettings(
                name=self.name, policy=settings.policy, slots=_SLOTS, pool=8, sessions=4,
                audit=f"{directory}/here.jsonl",
            )
        )  # fmt: skip

    def ask(self, data: bytes, timeout: float) -> bytes:
        return self._node.answer(data)

    def close(self) -> None:
        self._node.close()


def _times(settings: Settings) -> Times:
    """Return the seconds of the same call by each way, in turn."""
    with (
        sandbox(settings) as own,
        scratch_directory() as directory,
        Fleet([_NodeHere(settings, Path(directory))], _SLOTS) as here,
        _on_ray(settings, 1) as ray,
    ):
        return side_by_side(
            [
                Contender(_OWN, partial(own.execute, SUM.source)),
                Contender(_HERE, partial(here.execute, SUM.source)),
                Contender(_RAY, partial(ray.execute, SUM.source)),
            ],
            settings.amount(1000, 20),
        )


def _rates(settings: Settings) -> Rates:
    """Return the rates of eight clients, by number of nodes and beside a sandbox of their own."""
    rounds, seconds = (1, 0.2) if settings.smoke else (5, 1.5)
    rates: Rates = {}
    with sandbox(settings) as own:
        contender = ThroughputContender(_OWN, partial(own.execute, SUM.source), float)
        rates[_OWN] = [turn(contender, _CLIENTS, seconds) for _ in range(rounds)]
    for nodes in _NODES:
        name = f"fleet, {nodes} {'nodes' if nodes > 1 else 'node'}"
        with _on_ray(settings, nodes) as fleet:
            contender = ThroughputContender(name, partial(fleet.execute, SUM.source), float)
            rates[name] = [turn(contender, _CLIENTS, seconds) for _ in range(rounds)]
    return rates


def _loss(settings: Settings) -> Loss:
    """Run programs on two Ray nodes, and kill one with everything on it after half of them."""
    programs = 300 if settings.smoke else 10_000
    with LocalCluster(2) as cluster, scratch_directory() as directory:
        trails = f"{directory}/{{node}}.jsonl"
        with Fleet.on_ray(policy=settings.policy, slots=_SLOTS, audit=trails) as fleet:

            def run(number: int) -> SandboxResult | OutcomeUnknown:
                try:
                    name = f"p{number}"
                    return fleet.execute(f"{number} * 7", key=name, trace_id=name)
                except OutcomeUnknown as error:
                    return error

            found: Counter[str] = Counter()
            with ThreadPoolExecutor(2 * _SLOTS) as threads:
                for number, outcome in enumerate(threads.map(run, range(programs))):
                    found[_kind_of(outcome, number * 7)] += 1
                    if number == programs // 2:
                        cluster.kill(cluster.hosts[1])
        began = _began(Path(directory))
    twice = sum(count > 1 for count in began.values())
    return Loss(programs, found["right"], found["wrong"], found["unknown"], twice)


def _kind_of(outcome: SandboxResult | OutcomeUnknown, value: int) -> str:
    if isinstance(outcome, OutcomeUnknown):
        return "unknown"
    return "right" if outcome.value == value else "wrong"


def _began(directory: Path) -> Counter[str]:
    """Return how often each program began, by its trace id; the killed node's last line may be cut."""
    lines = [
        line for path in directory.glob("*.jsonl") for line in path.open() if line.endswith("\n")
    ]
    entries = [json.loads(line) for line in lines]
    return Counter(
        each["trace_id"] for each in entries
        if each["category"] == "execution" and each["action"] == "start"
    )  # fmt: skip


def _report(times: Times, rates: Rates, loss: Loss) -> Report:
    own = median(times[_OWN])
    cost = ReportTable(
        title="One call of `1+1`",
        columns=(Column("way"), *percentile_columns(), Column("more than one's own, ms")),
        rows=tuple(
            (way, *percentile_row(seconds), (median(seconds) - own) * 1000)
            for way, seconds in times.items()
        ),
    )
    rate = ReportTable(
        title=f"Programs a second, {_CLIENTS} clients, {_SLOTS} slots a node",
        columns=(Column("contender"), *quartile_columns("runs/s", 0)),
        rows=tuple(
            (name, *quartiles([each.rate for each in found])) for name, found in rates.items()
        ),
    )
    lost = ReportTable(
        title="Programs on two nodes, of which one is killed after half of them",
        columns=tuple(
            Column(name, 0)
            for name in ("programs", "right", "wrong", "outcome unknown", "began more than once")
        ),
        rows=(tuple(loss),),
    )
    chart = Curves(
        title="One call: how many took how long", x="milliseconds", y="% of calls",
        lines=tuple(distribution(way, seconds) for way, seconds in times.items()), logarithmic=True,
    )  # fmt: skip
    return Report(
        name="fleet", title="Cells on many hosts", tables=(cost, rate, lost), charts=(chart,),
        verdicts=_verdicts(loss),
        notes=("All nodes are processes of this host, on its loopback. Trails in files.",),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )  # fmt: skip


def _verdicts(loss: Loss) -> tuple[Criterion, ...]:
    total = loss.right + loss.wrong + loss.unknown
    return (
        Criterion(
            "every program has one outcome, none is wrong and none began twice",
            total == loss.programs and not loss.wrong and not loss.twice,
            f"{total:,} of {loss.programs:,}, {loss.wrong} wrong, {loss.twice} twice",
        ),
        Criterion(
            "no more outcomes are unknown than the killed node had slots",
            loss.unknown <= _SLOTS,
            f"{loss.unknown} of {_SLOTS}",
        ),
    )
