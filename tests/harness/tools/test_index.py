"""Search over a registry: it finds what is there now, and nothing that is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import PolicyError, ToolRegistry
from cellwright.harness.schemas.spec import ToolSpec, ToolState
from cellwright.harness.tools.tool_search import ToolSearch


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ToolRegistry]:
    with ToolRegistry(str(tmp_path / "tools.db")) as opened:
        yield opened


def made(name: str, description: str, **about: object) -> ToolSpec:
    return ToolSpec(name=name, description=description, **about)  # type: ignore[arg-type]


def names(search: ToolSearch, query: str, **asked: object) -> list[str]:
    return [each["name"] for each in search.search(query, **asked)["tools"]]  # type: ignore[arg-type]


def test_the_index_follows_the_registry(registry: ToolRegistry, tmp_path: Path) -> None:
    search = ToolSearch(registry)
    assert names(search, "weather") == []
    registry.add(made("get_weather", "Tell the weather of a city.", tags=("sky",)))

    def forecast(city: str) -> str:
        """Tell what the weather will be."""
        return city

    registry.register(forecast)
    assert sorted(names(search, "weather")) == ["forecast", "get_weather"]
    assert names(search, "weather", tags=("sky",)) == ["get_weather"]
    registry.set_state("get_weather", ToolState.RETIRED)
    assert names(search, "weather") == ["forecast"]
    with ToolRegistry(str(tmp_path / "tools.db")) as elsewhere:
        elsewhere.set_state("get_weather", ToolState.TRUSTED)
    trusted = names(search, "weather", states=(ToolState.TRUSTED,))
    assert sorted(trusted) == ["forecast", "get_weather"]
    registry.remove("get_weather")
    assert names(search, "get_weather") == ["forecast"]


def test_a_new_version_is_found_by_what_it_says(registry: ToolRegistry) -> None:
    search = ToolSearch(registry)
    registry.add(made("convert", "Convert miles to kilometres."))
    assert names(search, "miles") == ["convert"]
    registry.add(made("convert", "Convert pounds to kilograms."))
    assert names(search, "pounds") == ["convert"]
    assert names(search, "miles") == []


def test_what_nothing_answers_has_a_hint_and_pages_have_more(registry: ToolRegistry) -> None:
    search = ToolSearch(registry)
    for number in range(7):
        registry.add(made(f"weather_{number}", "Tell the weather."))
    first = search.search("weather", limit=5, detail="name")
    assert (len(first["tools"]), first["more"]) == (5, True)
    assert set(first["tools"][0]) == {"name"}
    rest = search.search("weather", limit=5, offset=5, detail="full")
    assert (len(rest["tools"]), rest["more"]) == (2, False)
    assert rest["tools"][0]["kind"] == "made"
    nothing = search.search("convert currency")
    assert nothing["tools"] == []
    assert nothing["hint"]
    with pytest.raises(PolicyError, match="detail"):
        search.search("weather", detail="everything")
