"""Results of some MiB: a program gets them whole in every language, and an error beyond the cap."""

import json
from collections.abc import Iterator

import pytest

from cellwright import Broker, Sandbox
from cellwright.policies.tool_rules import Tools
from tests.conftest import policy_named

pytestmark = pytest.mark.needs("cgroup")
ROW = {"id": 7, "text": "row " * 20}
ROWS = 15_000  # 1.4 MiB of JSON


def rows(n: int = ROWS) -> list[dict[str, object]]:
    return [ROW] * n


def numbers(n: int) -> str:
    return "x" * n


BROKER = Broker([rows, numbers])
SMALL = Broker([rows], rules=Tools(result_bytes=4096))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), tools=BROKER, pool=0) as box:
        yield box


@pytest.fixture(scope="module")
def capped() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), tools=SMALL, pool=0) as box:
        yield box


WHOLE = {
    "python": "import tools\nlen(tools.rows())",
    "javascript": "tools.rows().length",
    "ruby": "Tools.rows.length",
}
BEYOND = {
    "python": (
        "import tools\ntry:\n    said = tools.rows()\nexcept tools.ToolError as error:\n"
        "    said = error.kind + ' ' + str(error)\n[said, len(tools.results.read_all())]"
    ),
    "javascript": (
        "let said; try { said = tools.rows() } catch (error) { said = error.kind + ' ' + error.message }\n"
        "[said, tools.results.read_all().length]"
    ),
    "ruby": (
        "begin\n  said = Tools.rows\nrescue ToolError => error\n  said = error.kind + ' ' + error.message\nend\n"
        "[said, Tools.results.read_all.length]"
    ),
}


LANGUAGES = [
    "python",
    pytest.param("javascript", marks=pytest.mark.needs("node")),
    pytest.param("ruby", marks=pytest.mark.needs("ruby")),
]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_gets_the_whole_of_a_result(sandbox: Sandbox, language: str) -> None:
    result = sandbox.execute(WHOLE[language], language)
    assert (result.value, result.error) == (ROWS, None)


@pytest.mark.parametrize("language", LANGUAGES)
def test_beyond_the_cap_there_is_an_error_and_a_way_to_read_it(
    capped: Sandbox, language: str
) -> None:
    result = capped.execute(BEYOND[language], language)
    assert result.error is None
    said, length = result.value
    assert said.startswith("too_large rows: the result has ")
    assert "results.read_all(" in said
    assert length == ROWS


def test_a_shell_prints_the_whole_of_a_result(sandbox: Sandbox, capped: Sandbox) -> None:
    call = "cellwright-call rows '{\"n\": 2000}'"
    result = sandbox.execute(f"{call} > rows.json", "bash", collect=["rows.json"])
    assert len(json.loads(result.artifacts[0].data)) == 2000
    code = f"{call} 2> why; echo $?; cellwright-call results.read_all > rows.json"
    result = capped.execute(code, "bash", collect=["rows.json", "why"])
    assert result.stdout == "1\n"
    files = {each.name: each.data for each in result.artifacts}
    assert files["why"].startswith(b"too_large: rows: the result has ")
    assert len(json.loads(files["rows.json"])) == 2000


def test_many_long_results_at_once_arrive(sandbox: Sandbox) -> None:
    code = (
        "import asyncio, tools\n"
        "async def main():\n"
        "    found = await asyncio.gather(*[tools.numbers(n=2_000_000) for _ in range(12)])\n"
        "    return [len(each) for each in found]\n"
        "asyncio.run(main())"
    )
    result = sandbox.execute(code)
    assert (result.value, result.error) == ([2_000_000] * 12, None)
