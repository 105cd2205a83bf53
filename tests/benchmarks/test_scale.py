"""The model of growth, on what was measured elsewhere, and on made-up numbers."""

import pytest

from cellwright.benchmarks import scale, scale_model
from cellwright.benchmarks.scale_model import Machine, MeasuredRate, Parameters
from cellwright.benchmarks.tables import as_markdown
from cellwright.harness.sandbox.checks import worker_count
from tests.documents import rows_of, text_of

MADE_UP = Parameters(
    supervisor_ms=1.0, cell_ms=4.0, serial_share=0.0, new_ms=0.5, used_ms=0.0, calling_ms=0.1
)
RATES = [(machine, rate) for machine in scale_model.machines() for rate in machine.rates]


@pytest.mark.parametrize(("machine", "rate"), RATES, ids=[rate.of for _, rate in RATES])
def test_a_rate_that_was_measured_is_predicted(machine: Machine, rate: MeasuredRate) -> None:
    off = machine.predicted(rate) / rate.measured - 1
    assert (abs(off) > scale_model.WITHIN) == bool(rate.beyond)


def test_the_readme_says_what_was_measured_and_is_predicted_for_16_processors() -> None:
    (row,) = (row for row in rows_of("benchmarks/README.md") if row[:2] == ["16", "predicted"])
    text = text_of("README.md").replace("\n", " ")
    assert f"On 16 processors {row[7]} a second were measured" in text
    assert f"predicts {row[3]}:" in text


def test_few_rates_are_beyond_the_model() -> None:
    assert [rate.supervisors for _, rate in RATES if rate.beyond] == [16, 1]


def test_serial_parts_are_found_again() -> None:
    serial, parallel = 0.2, 0.8
    rates = {n: 1000 / (serial + parallel / n) for n in (1, 4, 16)}
    assert scale_model.serial_ms(rates) == pytest.approx(serial)
    assert scale_model.serial_share(rates) == pytest.approx(serial / (serial + parallel))
    assert scale_model.serial_ms({1: 5.0}) == 0
    assert scale_model.serial_ms({1: 1.0, 2: 3.0}) == 0  # noise


@pytest.mark.parametrize(
    ("processors", "supervisors", "lock", "placed", "rate", "limit"),
    [
        (1, 1, 0.0, False, 250, scale_model.PROCESSORS),
        (16, 1, 0.0, False, 1000, scale_model.SUPERVISOR),
        (16, 8, 0.0, False, 4000, scale_model.PROCESSORS),
        (64, 32, 0.0, True, 10_000, scale_model.CALLER),
        (16, 8, 0.5, False, 1000 / 0.75, scale_model.CGROUPS),
    ],
)
def test_the_longest_part_limits(
    processors: int, supervisors: int, lock: float, placed: bool, rate: float, limit: str
) -> None:
    found = scale_model.predicted(MADE_UP, processors, supervisors, lock_ms=lock, placed=placed)
    assert found.rate == pytest.approx(rate)
    assert found.limit == limit


def test_the_model_has_as_many_workers_as_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in scale_model.SIZES:
        monkeypatch.setattr("os.sched_getaffinity", lambda _, count=count: set(range(count)))
        assert scale_model.workers_for(count) == worker_count("auto")


def test_the_document_has_the_growth_of_the_largest_machine() -> None:
    document = text_of("benchmarks/README.md")
    largest = max(scale_model.machines(), key=lambda machine: machine.processors)
    assert as_markdown(scale.growth_of(largest)) in document
