"""The HumanEval programs: 164 pieces of ordinary Python, each in a cell of its own."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import Sandbox, SandboxStatus
from tests.conftest import SHARED


@pytest.mark.needs("shared")
def test_every_humaneval_program_completes_in_its_own_cell(strict: Sandbox) -> None:
    with gzip.open(SHARED / "data" / "HumanEval.jsonl.gz", "rt") as file:
        problems = [json.loads(line) for line in file]
    assert len(problems) == 164

    def run(problem: dict[str, str]) -> str | None:
        program = problem["prompt"] + problem["canonical_solution"] + "\n" + problem["test"]
        result = strict.execute(f"{program}\ncheck({problem['entry_point']})")
        ended = (result.status, result.exit_code, result.violations)
        if ended == (SandboxStatus.COMPLETED, 0, ()):
            return None
        return f"{problem['task_id']}: {ended} {result.reason} {result.error}"

    with ThreadPoolExecutor(4) as pool:
        failed = [why for why in pool.map(run, problems) if why]
    assert failed == []


@pytest.mark.needs("shared")
def test_a_humaneval_check_that_fails_is_seen(strict: Sandbox) -> None:
    """The test above would be hollow if a wrong solution completed as well."""
    with gzip.open(SHARED / "data" / "HumanEval.jsonl.gz", "rt") as file:
        problem = json.loads(next(file))
    program = problem["prompt"] + "    return 'wrong'\n" + problem["test"]
    result = strict.execute(f"{program}\ncheck({problem['entry_point']})")
    assert (result.status, result.reason) == (SandboxStatus.FAILED, "exception")
