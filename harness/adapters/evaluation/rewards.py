"""Rewards for training: `CodeReward` for TRL, `compute_score` and `compute_scores` for verl.

The code of a completion is judged in cells.  A bad completion has the reward 0, whatever it is; a bad
row of the data set, or a host without cells, is an exception.
"""

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....policies.closing import Closing
from ....policies.errors import CellwrightError, LaunchError, PolicyError
from ...batch.result_file import RowResult
from ...batch.rows import BatchRow, row_of
from ...batch.running_rows import result_of
from ...sandbox.calls.background import mapped, width_of
from ...sandbox.judging.verdicts import JudgeLimits, Verdict
from ...sandbox.sandbox import Sandbox

_MOST_CHARACTERS = 256 * 1024  # longer code has the reward 0
_FENCE = "```"
_TRIES = 2  # when judging failed for reasons that are not the program's
_LABELS = {"python": ("python", "py", "python3"), "cpp": ("cpp", "c++"), "javascript": ("js",)}
# Calls the function of a completion with arguments that are JSON, a line each, and prints its result.
_CALL = """
import json as _json, sys as _sys
_stdout, _sys.stdout = _sys.stdout, _sys.stderr
_given = [_json.loads(line) for line in _sys.stdin.read().splitlines() if line.strip()]
_owner = globals().get("Solution")
_function = getattr(_owner(), {name!r}) if _owner else globals()[{name!r}]
print(_json.dumps(_function(*_given)), file=_stdout)
"""


class CodeReward(Closing):
    """A reward function for TRL: `GRPOTrainer(reward_funcs=CodeReward())`.

    `sandbox`: one of yours, else one is made of `options`, the arguments of `Sandbox`.  `language`: of
    completions for whose row the data set names none.  `limits`: of each case.  `partial`: the reward
    is the share of accepted cases, not 1 for all of them and else 0.  `at_once`: completions that are
    judged at once.
    """

    def __init__(
        self, sandbox: Sandbox | None = None, *, language: str = "python",
        limits: JudgeLimits | None = None, partial: bool = False, at_once: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        if sandbox is not None and options:
            raise PolicyError(
                f"{', '.join(options)}: cannot be combined with sandbox=",
                "give them to that Sandbox",
            )
        self.__name__ = "code_reward"  # TRL logs it
        self._sandbox, self._is_own = sandbox or Sandbox(**options), sandbox is None
        self._language, self._limits = language, limits or JudgeLimits()
        most = self._sandbox.policy.limits.wall_seconds
        self._wall_seconds = min(self._limits.backstop(), most)  # for tests that are no cases
        self._partial, self._width = partial, width_of(at_once)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the reward of each completion, a text or messages of which the last one counts.

        `columns`: lists as long as `completions`, of which those are used that a row of `cellwright
        batch` has as fields, and `ground_truth`.  Raises PolicyError for an invalid row, and
        LaunchError if no cell can be made.
        """
        rows = [
            {name: values[n] for name, values in columns.items() if _is_column(values, completions)}
            for n in range(len(completions))
        ]
        return self.scores(zip(completions, rows, strict=True))

    def scores(self, pairs: Iterable[tuple[Any, Mapping[str, Any]]]) -> list[float]:
        """Return the reward of each completion, which comes with the fields of its row."""
        numbered = ((number, *pair) for number, pair in enumerate(pairs))
        rewards: list[float] = []
        for each in mapped(self._score, numbered, self._width, return_errors=True):
            if isinstance(each, CellwrightError):
                raise each
            rewards.append(each)
        return rewards

    def _score(self, numbered: tuple[int, Any, Mapping[str, Any]]) -> float:
        number, completion, given = numbered
        fields = _fields(given)
        language = fields.setdefault("language", self._language)
        code = code_of(completion, language)
        called = _CALL.format(name=name) if (name := fields.get("fn_name")) else ""
        fields = {name: value for name, value in fields.items() if name not in ("code", "program")}
        fields["completion"] = (code or "") + called
        row = row_of({"timeout": self._wall_seconds, **fields}, number)
        if not row.proof and not (
            row.cases and all(each.expected is not None for each in row.cases)
        ):
            raise PolicyError(f"row {number + 1}: needs cases that say what is expected, or tests")
        if code is None:
            return 0.0
        done = self._judged(row)
        return done.score if self._partial else float(done.passed)

    def _judged(self, row: BatchRow) -> RowResult:
        error = ""
        for _ in range(_TRIES):
            done = result_of(self._sandbox, row, None, self._limits, every=self._partial)
            if done.outcome == "invalid":
                raise PolicyError(done.error)
            if done.outcome != Verdict.INTERNAL_ERROR.value:
                return done
            error = done.error
        raise LaunchError(f"row {row.line + 1}: its completion could not be judged: {error}")

    def close(self) -> None:
        """Close the sandbox, unless it was given."""
        if self._is_own:
            self._sandbox.close()


def code_of(completion: Any, language: str = "python") -> str | None:
    """Return the code of a completion: its last fenced block of that language, or else its last block,
    or else all of it; after `</think>`, if that occurs.  None for anything that is no such text."""
    if isinstance(completion, Sequence) and not isinstance(completion, str):
        last = completion[-1] if completion else None
        completion = last.get("content") if isinstance(last, Mapping) else last
    if not isinstance(completion, str):
        return None
    text = completion.rpartition("</think>")[2]
    blocks = text.split(_FENCE)[1::2]
    labelled = [each.partition("\n") for each in blocks]
    names = _LABELS.get(language, (language,))
    chosen = [body for label, _, body in labelled if label.strip().lower() in names]
    code = (chosen or [body for _, _, body in labelled] or [text])[-1]
    is_text = code.isascii() or not any("\ud800" <= each <= "\udfff" for each in code)
    return code if code.strip() and is_text and len(code) <= _MOST_CHARACTERS else None


def _is_column(values: Any, completions: Sequence[Any]) -> bool:
    return isinstance(values, list | tuple) and len(values) == len(completions)


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row; those of `ground_truth`, JSON or a mapping, count as its own."""
    truth = given.get("ground_truth")
    if isinstance(truth, str | bytes):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise PolicyError(f"ground_truth: must be JSON: {error}") from None
    if isinstance(truth, Sequence):
        truth = {"cases": truth}
    fields = {**given, **(truth or {})}
    if asserts := fields.pop("assert_case", None):
        return {**fields, "test_list": asserts}
    if isinstance(fields.get("inputs"), Sequence):
        fields["cases"] = _cases(fields.pop("inputs"), fields.pop("outputs", ()), fields)
    return fields


def _cases(inputs: Any, outputs: Any, fields: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the cases of lists of inputs and outputs, as APPS and verl have them."""
    if len(inputs) != len(outputs):
        raise PolicyError(f"ground_truth: {len(inputs)} inputs, but {len(outputs)} outputs")
    if not fields.get("fn_name"):
        pairs = [(_text(one), _text(other)) for one, other in zip(inputs, outputs, strict=True)]
    else:
        pairs = [
            (_arguments(one), _plain(other)) for one, other in zip(inputs, outputs, strict=True)
        ]
    return [{"input": one, "expected": other} for one, other in pairs]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(json.dumps, value))


def _plain(value: Any) -> str:
    """Return a value as `json.dumps` writes it, whatever way the data set wrote it."""
    try:
        return json.dumps(json.loads(value) if isinstance(value, str) else value)
    except ValueError:
        return json.dumps(value)


@functools.lru_cache(maxsize=8)
def _shared(process: int, language: str, partial: bool, time_seconds: float) -> CodeReward:
    limits = JudgeLimits(time_seconds=time_seconds)
    return CodeReward(language=language, partial=partial, limits=limits)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None, *, language: str = "python",
    partial: bool = False, time_seconds: float = 10.0, **_: Any,
) -> float:  # fmt: skip
    """Return the reward of one completion, as a `custom_reward_function` of verl.

    `ground_truth`: JSON or a mapping with `inputs` and `outputs`, `fn_name` too if a function is called
    with them; `assert_case`; or the fields of a row of `cellwright batch`.  The options are what
    `reward_kwargs` of the configuration can set.
    """
    return compute_scores(
        [data_source], [solution_str], [ground_truth], [extra_info or {}], language=language,
        partial=partial, time_seconds=time_seconds,
    )[0]  # fmt: skip


def compute_scores(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]] | None = None, *, language: str = "python",
    partial: bool = False, time_seconds: float = 10.0, **_: Any,
) -> list[float]:  # fmt: skip
    """Return the rewards of a batch, as verl's reward manager `batch` asks; see `compute_score`."""
    reward = _shared(os.getpid(), language, partial, time_seconds)
    rows = [{"ground_truth": each} for each in ground_truths]
    return reward.scores(zip(solution_strs, rows, strict=True))
