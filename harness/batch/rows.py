"""`BatchRow`: one program of a batch, of a JSON-lines file in one of several forms.

Plain rows have `code` (or `program`) and what `execute` takes, or `cases`.  Rows of HumanEval have
`prompt`, `test` and `entry_point`, those of MBPP `test_list`; both with a `completion`, or else the
solution that comes with them.
"""

import gzip
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...policies.errors import PolicyError
from ...runner.channel import refuse_large_json
from ..sandbox.judging.verdicts import Case

_MOST_ROW_BYTES = 64 * 1024 * 1024


class BatchCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case in a row: standard input and what is to be printed."""

    input: str = ""
    expected: str | None = None
    output: str | None = None  # another name of `expected`
    name: str = ""

    def case(self) -> Case:
        expected = self.output if self.expected is None else self.expected
        return Case(input=self.input, expected=expected, name=self.name)


_OPTIONS = (
    "stdin", "inputs", "files", "arguments", "env", "timeout", "flags", "compile_timeout",
)  # fmt: skip


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """The known fields of a row; other fields are left alone."""

    id: str | int | None = None
    task_id: str | int | None = None
    code: str | None = None
    program: str | None = None
    completion: str | None = None
    language: str | None = None
    stdin: str | None = None
    inputs: dict[str, Any] | None = None
    files: dict[str, str] | None = None
    arguments: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    timeout: float | None = None
    flags: tuple[str, ...] = ()
    compile_timeout: float | None = None
    expected: str | None = None
    cases: tuple[BatchCase, ...] | None = None
    checker: str | None = None
    prompt: str | None = None
    canonical_solution: str | None = None
    test: str | None = None
    entry_point: str | None = None
    text: str | None = None
    test_list: tuple[str, ...] | None = None
    test_setup_code: str = ""
    test_imports: tuple[str, ...] = ()


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One program to run, or with `cases` to judge.

    line: its number in the file, from 0
    task: the task that it solves; rows of one task are samples of it
    digest: of the row as it stands in the file
    """

    line: int
    task: str
    digest: str
    code: str
    language: str | None = None
    cases: tuple[Case, ...] | None = None
    checker: str | None = None
    proof: str = ""  # the value of a program whose own tests were run to their end
    options: dict[str, Any] = {}


def rows_of(path: str) -> Iterator[BatchRow]:
    """Yield the rows of a file, which may be compressed by gzip; raises PolicyError naming the line of
    one that is wrong."""
    for number, line in _numbered(path):
        yield _row(number, line, _decoded(number, line, path), path)


def with_completions(tasks: str, completions: str) -> Iterator[BatchRow]:
    """Yield a row for each of the `completions`, which names its task by `task_id`; raises
    PolicyError."""
    by_task = {
        _task_of(given, number): (given, hashlib.sha256(line.strip()).digest())
        for number, line in _numbered(tasks)
        for given in [_decoded(number, line, tasks)]
    }
    for number, line in _numbered(completions):
        given = _decoded(number, line, completions)
        task, digest = by_task.get(_task_of(given, number), (None, b""))
        if task is None or given.completion is None:
            raise PolicyError(
                f"{completions}: line {number + 1}: needs a completion, and a task_id of {tasks}"
            )
        sample = msgspec.structs.replace(task, completion=given.completion, code=None, program=None)
        # the digest covers the task: its tests may change
        yield _row(number, line.strip() + digest, sample, completions)


def row_of(given: Mapping[str, Any], number: int) -> BatchRow:
    """Return the row with these fields, unknown ones ignored; raises PolicyError."""
    known = {name: given[name] for name in _Given.__struct_fields__ if given.get(name) is not None}
    where = "row"
    try:
        return _row(number, b"", msgspec.convert(known, _Given), where)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{where} {number + 1}: {error}") from None


def _numbered(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        open_file = gzip.open if path.endswith(".gz") else open
        with open_file(path, "rb") as file:
            for number, line in enumerate(_lines(file, path)):
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise PolicyError(f"cannot read {path}: {error}") from None


def _lines(file: Any, path: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(_MOST_ROW_BYTES + 1):
        number += 1
        if len(line) > _MOST_ROW_BYTES:
            raise PolicyError(f"{path}: line {number} is longer than {_MOST_ROW_BYTES} bytes")
        yield line


def _decoded(number: int, line: bytes, path: str) -> _Given:
    try:
        refuse_large_json(line)
        return msgspec.json.decode(line, type=_Given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"{path}: line {number + 1}: {error}") from None


def _task_of(given: _Given, number: int) -> str:
    task = given.task_id if given.task_id is not None else given.id
    return str(number + 1) if task is None else str(task)


def _row(number: int, line: bytes, given: _Given, path: str) -> BatchRow:
    proof = ""
    try:
        code, cases = _program(given)
        if given.test is not None or given.test_list is not None:
            proof = secrets.token_hex(16)  # a completion that ends early, by os._exit(0), has none
            code = f"{code}\n{proof!r}\n"
    except ValueError as error:
        raise PolicyError(f"{path}: line {number + 1}: {error}") from None
    options = {name: value for name in _OPTIONS if (value := getattr(given, name))}
    return BatchRow(
        line=number, task=_task_of(given, number),
        digest=hashlib.sha256(line.strip()).hexdigest()[:16], code=code, language=given.language,
        cases=cases, checker=given.checker, proof=proof, options=options,
    )  # fmt: skip


def _before(prompt: str, entry_point: str, body: str) -> str:
    """Return the prompt, or what it has before the function that `body` defines itself."""
    head = f"def {entry_point}("
    return prompt.partition(head)[0] if f"\n{head}" in f"\n{body}" else prompt


def _program(given: _Given) -> tuple[str, tuple[Case, ...] | None]:
    """Return the program of a row, and its cases; raises ValueError for a row that has none."""
    code = given.code if given.code is not None else given.program
    if given.test is not None and given.entry_point is not None:  # HumanEval
        body = given.completion if given.completion is not None else given.canonical_solution
        if code is None and body is not None:
            code = _before(given.prompt or "", given.entry_point, body) + body
        if code is not None:
            return f"{code}\n\n{given.test}\n\ncheck({given.entry_point})\n", None
    if given.test_list is not None:  # MBPP
        code = given.completion if given.completion is not None else code
        if code is not None:
            setup = "\n".join((*given.test_imports, given.test_setup_code))
            return "\n".join((setup, code, *given.test_list, "")), None
    code = given.completion if code is None else code
    if code is None:
        raise ValueError("has no code, program or completion")
    if given.cases is not None:
        return code, tuple(each.case() for each in given.cases)
    if given.expected is not None:
        return code, (Case(input=given.stdin or "", expected=given.expected),)
    return code, None
