"""Requests of clients for a network, within a policy; and charts in the form of E2B."""

import pytest
from e2b_code_interpreter.charts import (
    BarChart,
    LineChart,
    PieChart,
    SuperChart,
    _deserialize_chart,
)

from cellwright import NetworkRule, Policy, PolicyError, Sandbox
from cellwright.harness.servers.e2b.code_interpreter import chart_of
from cellwright.harness.servers.e2b.control_messages import E2bNetwork, change, narrowed
from cellwright.policies.policy import Network
from cellwright.results import Chart, ChartAxis, ChartSeries

_RULES = (NetworkRule(host="files.example.com"), NetworkRule(host="*.example.org", ports=(80,)))
_POLICY = Policy(name="web", network=Network(allow=_RULES))
_ALL = ("0.0.0.0/0",)


def _hosts(asked: E2bNetwork | None, allow_internet: bool | None = None) -> list[str]:
    return [rule.host for rule in narrowed(_POLICY, asked, allow_internet).network.allow]


@pytest.mark.parametrize(
    ("asked", "allow_internet", "hosts"),
    [
        (None, None, ["files.example.com", "*.example.org"]),
        (None, True, ["files.example.com", "*.example.org"]),
        (None, False, []),
        (E2bNetwork(deny_out=_ALL), None, []),
        (E2bNetwork(deny_out=_ALL, allow_out=("files.example.com",)), None, ["files.example.com"]),
        (E2bNetwork(deny_out=_ALL, allow_out=("api.example.org",)), None, ["api.example.org"]),
        (E2bNetwork(allow_out=_ALL), None, ["files.example.com", "*.example.org"]),
    ],
)
def test_a_client_gets_no_more_than_the_policy_allows(
    asked: E2bNetwork | None, allow_internet: bool | None, hosts: list[str]
) -> None:
    assert _hosts(asked, allow_internet) == hosts


@pytest.mark.parametrize(
    "asked",
    [E2bNetwork(allow_out=("evil.example",)), E2bNetwork(allow_out=("example.org",)), E2bNetwork(allow_out=("*.org",)),
     E2bNetwork(allow_out=("notexample.org",)), E2bNetwork(deny_out=("10.0.0.0/8",))],
)  # fmt: skip
def test_what_the_policy_does_not_allow_or_cells_cannot_follow_is_refused(
    asked: E2bNetwork,
) -> None:
    with pytest.raises(PolicyError):
        _hosts(asked)


def test_denied_names_are_denials_of_the_sandbox() -> None:
    network = narrowed(_POLICY, E2bNetwork(deny_out=("secret.example.org",)), None).network
    assert [str(each) for each in network.deny] == ["deny secret.example.org"]


@pytest.mark.needs("cgroup")
def test_the_rules_of_a_running_sandbox_change() -> None:
    with Sandbox(policy=_POLICY, pool=0) as sandbox:
        change(
            sandbox, _POLICY.network, E2bNetwork(deny_out=_ALL, allow_out=("files.example.com",))
        )
        assert sorted(set(sandbox.network.rules)) == [
            "allow *.example.org:80",
            "allow files.example.com:443",
            "deny *.example.org:80",
        ]
        change(sandbox, _POLICY.network, E2bNetwork())
        assert sorted(set(sandbox.network.rules)) == [
            "allow *.example.org:80",
            "allow files.example.com:443",
        ]
        with pytest.raises(PolicyError):
            change(sandbox, _POLICY.network, E2bNetwork(allow_out=("evil.example",)))


def _chart(kind: str, points: tuple[tuple[object, ...], ...]) -> Chart:
    series = ChartSeries(type=kind, label="s", points=points)  # type: ignore[arg-type]
    return Chart(title="T", x=ChartAxis(label="t (s)", unit="s"), series=(series,))


def test_charts_are_those_of_the_sdk() -> None:
    line = _deserialize_chart(chart_of([_chart("line", ((0, 1), (1, 2)))]))
    assert isinstance(line, LineChart)
    assert (line.title, line.x_unit, line.elements[0].points) == (
        "T",
        "s",
        [(0.0, 1.0), (1.0, 2.0)],
    )
    bar = _deserialize_chart(chart_of([_chart("bar", (("a", 3),))]))
    assert isinstance(bar, BarChart)
    assert (bar.elements[0].label, bar.elements[0].value) == ("a", 3)
    pie = _deserialize_chart(chart_of([_chart("pie", (("a", 0.25),))]))
    assert isinstance(pie, PieChart)
    assert pie.elements[0].angle == 90.0
    both = _deserialize_chart(
        chart_of([_chart("line", ()), _chart("box", (("a", 1, 2, 3, 4, 5),))])
    )
    assert isinstance(both, SuperChart)
    assert both.elements[1].elements[0].median == 3
    assert chart_of([]) is None
