"""Reward functions: the signatures of TRL and verl, and what no completion can do."""

import inspect
import json
from collections.abc import Iterator

import pytest

from cellwright import PolicyError, Sandbox
from cellwright.harness.adapters.evaluation.rewards import (
    CodeReward,
    code_of,
    compute_score,
    compute_scores,
)
from cellwright.judging import JudgeLimits

pytestmark = pytest.mark.needs("cgroup")
SUM = "print(sum(map(int, input().split())))"
CASES = {"inputs": ["1 2\n", "20 22\n"], "outputs": ["3\n", "42\n"]}
CALL = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, '"ab"']}
DOUBLE = ["assert double(2) == 4", "assert double(-1) == -2"]
HOSTILE = (
    None, 5, b"bytes", "", "\n", [], [{}], [{"content": None}], [[[]]], "\ud800", "\0", "print('\0')",
    "```python\n\ud800\n```", "x" * 10**7, "```" * 10**5, "(" * 10**5, "def f(:", "while True: pass",
    "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)", "x = [0] * 10**10",
    "import os\nwhile True: os.fork()", "print('x' * 10**9)", "print(open('/etc/shadow').read())",
    "import os; os.write(3, b'{}')", "raise SystemExit(0)", "'\\ud800'; print('\\ud800')",
)  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with CodeReward(limits=JudgeLimits(time_seconds=0.5, wall_seconds=1.0)) as made:
        yield made


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("1", "1"),
        ("a\n```python\n1\n```\nb\n```\n2\n```", "1\n"),
        ("```\n1\n```\n```text\n2\n```", "2\n"),
        ("```py\n1", "1"),
        ("<think>```python\n1\n```</think>```python\n2\n```", "2\n"),
        ([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "2"),
        (["1", "2"], "2"),
        ("```python\n```", None),
        (None, None),
    ],
)
def test_the_code_of_a_completion_is_its_last_block(completion: object, code: str | None) -> None:
    assert code_of(completion) == code


def test_trl_calls_it_with_lists_of_the_columns_and_other_things(reward: CodeReward) -> None:
    """As `GRPOTrainer._calculate_rewards` of TRL 1.16 does, after `get_callable_name`."""
    assert reward.__name__ == "code_reward"
    assert not inspect.iscoroutinefunction(reward.__call__)
    completions = [
        f"```python\n{SUM}\n```", "print(3)", "def double(n):\n    return 2 * n",
        [{"role": "assistant", "content": "def double(n): return n"}], "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b):\n        print('noise')\n        return a + b",
    ]  # fmt: skip
    rewards = reward(
        prompts=["p"] * 6, completions=completions, completion_ids=[[1]] * 6,
        ground_truth=[json.dumps(CASES), CASES, None, None, CALL, CALL],
        test_list=[None, None, DOUBLE, DOUBLE, None, None], level=["easy"] * 6,
        trainer_state=object(), log_extra=print, log_metric=print,
    )  # fmt: skip
    assert rewards == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]


def test_a_completion_may_repeat_the_function_of_its_prompt(reward: CodeReward) -> None:
    row = {
        "prompt": "import math\n\ndef double(n):\n", "entry_point": "double",
        "test": "def check(f):\n    assert f(2) == 4",
    }  # fmt: skip
    whole = "```python\ndef double(n):\n    return math.prod((2, n))\n```"
    answers = ["    return 2 * n", whole, "    return n", whole.replace("2", "3")]
    assert reward.scores((each, row) for each in answers) == [1.0, 1.0, 0.0, 0.0]


def test_verl_calls_it_with_one_completion_or_a_batch() -> None:
    """As `NaiveRewardManager` and `BatchRewardManager` of verl 0.9 do."""
    truth = json.dumps(CASES)
    given = {"data_source": "codes", "ground_truth": truth, "extra_info": {"num_turns": 1}}
    assert compute_score(solution_str=SUM, reward_router_address="x", **given) == 1.0
    assert compute_score(solution_str="print(3)", **given) == 0.0
    assert compute_score(solution_str="print(3)", partial=True, **given) == 0.5
    assert compute_scores(
        data_sources=["codes"] * 3, solution_strs=[SUM, "def f(): 1 +", "def double(n): return 2*n"],
        ground_truths=[truth, truth, {"assert_case": DOUBLE}], extra_infos=[{}] * 3,
    ) == [1.0, 0.0, 1.0]  # fmt: skip


def test_no_completion_raises_or_is_rewarded(reward: CodeReward) -> None:
    count = len(HOSTILE)
    assert reward([*HOSTILE, SUM], ground_truth=[CASES] * (count + 1)) == [0.0] * count + [1.0]
    tests = [["assert f(1) == 1"]] * count
    assert reward(HOSTILE, test_list=tests) == [0.0] * count


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "row 2: needs cases that say what is expected, or tests"),
        ({"cases": [[{"input": "1"}]] * 2}, "needs cases that say what is expected"),
        ({"cases": [[]] * 2}, "needs cases that say what is expected"),
        ({"ground_truth": ["{"] * 2}, "ground_truth: must be JSON"),
        ({"ground_truth": [{"inputs": ["1"], "outputs": []}] * 2}, "1 inputs, but 0 outputs"),
        ({"cases": [5, 5]}, "row 1: Expected `array"),
    ],
)
def test_a_row_that_says_nothing_is_an_error_and_no_reward(
    reward: CodeReward, columns: dict[str, list[object]], words: str
) -> None:
    with pytest.raises(PolicyError, match=words.replace("row 2", "row [12]")):
        reward(["print(1)", None], **columns)


def test_another_language_and_a_sandbox_of_ones_own(strict: Sandbox) -> None:
    with CodeReward(strict, language="javascript") as made:
        assert made(["```js\nconsole.log(3)\n```"], cases=[[{"expected": "3"}]]) == [1.0]
    assert strict.execute("1").value == 1
    with pytest.raises(PolicyError, match=r"^pool: cannot be combined with sandbox="):
        CodeReward(strict, pool=0)
    with pytest.raises(PolicyError, match="unknown language 'klingon'"):
        CodeReward(strict, language="klingon")(["1"], cases=[[{"expected": "3"}]])
