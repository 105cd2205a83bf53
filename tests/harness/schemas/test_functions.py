"""Schemas of functions: from source text as from functions of the host, and nothing is run for them."""

import dataclasses
import enum
import typing
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.errors import ToolInvalid
from cellwright.harness.schemas.functions import describe_function, describe_source, read_docstring
from cellwright.harness.schemas.validation import compile_schema
from cellwright.harness.tools.tool import Caller

PRELUDE = """
import enum, typing
from dataclasses import dataclass
from typing import *
class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"
@dataclass
class Node:
    value: int
    label: str = ""
    children: "list[Node]" = ()
class Options(TypedDict, total=False):
    depth: Required[int]
    width: int
class Pair(NamedTuple):
    left: int
    right: str
Alias = list[int]
"""
INTEGER, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
HINTS = {
    "int": INTEGER,
    "str": TEXT,
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "None": NULL,
    "list": {"type": "array"},
    "list[int]": {"type": "array", "items": INTEGER},
    "typing.List[str]": {"type": "array", "items": TEXT},
    "Sequence[list[int]]": {"type": "array", "items": {"type": "array", "items": INTEGER}},
    "set[int]": {"type": "array", "uniqueItems": True, "items": INTEGER},
    "dict": {"type": "object"},
    "dict[str, int]": {"type": "object", "additionalProperties": INTEGER},
    "Mapping[str, Any]": {"type": "object"},
    "tuple[int, ...]": {"type": "array", "items": INTEGER},
    "tuple[int, str]": {
        "type": "array",
        "prefixItems": [INTEGER, TEXT],
        "items": False,
        "minItems": 2,
    },
    "Pair": {"type": "array", "prefixItems": [INTEGER, TEXT], "items": False, "minItems": 2},
    "Optional[int]": {"anyOf": [INTEGER, NULL]},
    "int | None": {"anyOf": [INTEGER, NULL]},
    "Union[int, str, None]": {"anyOf": [INTEGER, TEXT, NULL]},
    "int | int": INTEGER,
    "int | Any": {},
    "Literal['a', -1, True]": {"enum": ["a", -1, True]},
    "Literal[b'a']": {},
    "Color": {"enum": ["red", "blue"]},
    "Annotated[int, 'how many']": {"type": "integer", "description": "how many"},
    "Alias": {"type": "array", "items": INTEGER},
    "'int'": INTEGER,
    "'list[\"int\"]'": {"type": "array", "items": INTEGER},
    "Any": {},
    "object": {},
    "Unknown[int]": {},
    "lambda: 1": {},
    "print('ran')": {},
    "1": {},
    "'not : a hint'": {},
}


@pytest.mark.parametrize(("hint", "schema"), HINTS.items(), ids=HINTS)
def test_an_annotation_in_source_text_has_its_schema(hint: str, schema: dict[str, Any]) -> None:
    found = describe_source(f"{PRELUDE}\ndef f(x: {hint}) -> {hint}: ...", "f")
    assert found.parameters["properties"]["x"] == schema
    assert found.parameters["required"] == ["x"]
    assert found.output == (schema or None)
    compile_schema(found.parameters)


def test_classes_of_the_source_are_definitions_and_may_hold_themselves() -> None:
    found = describe_source(f"{PRELUDE}\ndef f(x: Node, y: Options) -> list[Node]: ...", "f")
    assert found.parameters["$defs"]["Node"]["required"] == ["value"]
    assert found.parameters["$defs"]["Options"]["required"] == ["depth"]
    assert found.has_objects
    validator = compile_schema(found.parameters)
    assert (
        validator.complaints({"x": {"value": 1, "children": [{"value": 2}]}, "y": {"depth": 1}})
        == ()
    )
    assert validator.complaints({"x": {"value": 1, "children": [{}]}, "y": {"depth": 1}})


def test_what_has_a_default_is_not_required() -> None:
    source = "def f(a, b: int = 2, c: int = None, d=[], *, e, g: str = 'x', h=print): ..."
    found = describe_source(source, "f").parameters
    assert found["required"] == ["a", "e"]
    assert found["properties"]["b"] == {"type": "integer", "default": 2}
    assert found["properties"]["c"] == {"anyOf": [INTEGER, NULL], "default": None}
    assert found["properties"]["h"] == {}
    assert found["additionalProperties"] is False


def test_further_named_arguments_may_be_allowed() -> None:
    found = describe_source("def f(**rest: int): ...", "f").parameters
    assert found["additionalProperties"] == INTEGER


DOCSTRINGS = {
    "google": "Do it.\n\nAt length.\n\nArgs:\n    a (int): the first\n        of them\n    b: the second\n\nReturns:\n    int: c: d",
    "numpy": "Do it.\n\nAt length.\n\nParameters\n----------\na : int\n    the first\n    of them\nb : str, optional\n    the second\n\nReturns\n-------\nint",
    "rest": "Do it.\n\nAt length.\n\n:param int a: the first\n    of them\n:type a: int\n:param b: the second\n:returns: c",
}  # fmt: skip


@pytest.mark.parametrize("docstring", DOCSTRINGS.values(), ids=DOCSTRINGS)
def test_a_docstring_describes_the_function_and_its_parameters(docstring: str) -> None:
    said = read_docstring(docstring)
    assert said.text == "Do it.\n\nAt length."
    assert said.parameters == {"a": "the first of them", "b": "the second"}


@given(st.text(alphabet="Args:\n -param_x()\t*", max_size=300))
def test_any_docstring_can_be_read(docstring: str) -> None:
    read_docstring(docstring)


def test_the_function_of_the_tools_name_is_taken_or_the_only_public_one() -> None:
    two = "def helper(a): ...\ndef send_mail(b): ...\ndef send_mail(c): ..."
    assert list(describe_source(two, "Send-Mail").parameters["properties"]) == ["c"]
    assert describe_source("def _private(): ...\ndef other(x): ...", "tool").function == "other"
    assert describe_source("async def f(): ...", "f").is_async


@pytest.mark.parametrize(
    "source",
    ["", "x = 1", "def f(: ...", "def a(): ...\ndef b(): ...", "class f: ...", "def f(a, /): ...",
     "def f(*a): ...", "if True:\n def f(): ...", "f = lambda: 1", "def f(" + ",".join(f"a{n}" for n in range(300)) + "): ...",
     "(" * 5000, "\0"],
    ids=lambda source: source[:20],
)  # fmt: skip
def test_a_source_without_a_function_that_can_be_called_is_refused(source: str) -> None:
    with pytest.raises(ToolInvalid, match="source"):
        describe_source(source, "f")


TEN = {n: ", ".join([f"A{n + 1}"] * 10) for n in range(60)}
BOMB = "\n".join(f"A{n} = tuple[{TEN[n]}]" for n in TEN) + "\nA60 = int"


@pytest.mark.parametrize(
    "source",
    [
        f"{BOMB}\ndef f(x: A0): ...",
        "A = list[A]\ndef f(x: A): ...",
        "def f(x: " + "list[" * 80 + "int" + "]" * 80 + "): ...",
        "def f(x: " + " | ".join(f"Literal[{n}]" for n in range(500)) + "): ...",
        "def f(x=" + "-" * 500 + "1): ...",
        "def f(x=" + "9" * 4000 + "): ...",
        "def f(x: Literal[" + "9" * 4000 + "]): ...",
    ],
    ids=[
        "aliases that double",
        "an alias of itself",
        "deep",
        "wide",
        "minus",
        "large",
        "large literal",
    ],
)
def test_annotations_cannot_be_made_to_take_long_or_grow(source: str) -> None:
    found = describe_source(source, "f")
    assert len(str(found.parameters)) < 300_000


def test_nothing_of_a_source_is_run(tmp_path: Any) -> None:
    """Every place that Python evaluates when it defines a function makes a directory, if it is run."""
    touch = f"__import__('os').mkdir({str(tmp_path / 'ran')!r})"
    source = (
        f"{touch}\n@{touch}\ndef f(x: {touch} = {touch}) -> {touch}: ...\n"
        f"class M(type):\n    def __new__(*a): {touch}\nclass C(metaclass=M): ...\n"
    )
    describe_source(source, "f")
    assert list(tmp_path.iterdir()) == []
    exec(source.splitlines()[0], {})
    assert list(tmp_path.iterdir()) != []


# functions of the host


class Shade(enum.Enum):
    DARK = "dark"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Mode(typing.TypedDict):
    fast: bool


def draw(
    at: Point, mode: Mode, caller: Caller, times: Annotated[int, "how often"] = 1,
    *, shade: Shade = Shade.DARK, style: Literal["a", "b"] = "a", other: typing.IO[str] | None = None,
) -> list[Point]:  # fmt: skip
    """Draw it.

    Args:
        at: where
    """
    return [at]


def test_a_function_of_the_host_has_its_schema() -> None:
    found = describe_function(draw, filled_in=Caller)
    properties = found.parameters["properties"]
    assert properties["at"] == {"$ref": "#/$defs/Point", "description": "where"}
    assert properties["times"] == {"type": "integer", "description": "how often", "default": 1}
    assert properties["style"] == {"enum": ["a", "b"], "default": "a"}
    assert properties["shade"]["default"] == "dark"
    assert "caller" not in properties
    assert found.parameters["required"] == ["at", "mode"]
    assert found.description == "Draw it."
    validator = compile_schema(found.parameters)
    assert validator.complaints({"at": {"x": 1}, "mode": {"fast": True}, "shade": "dark"}) == ()
    assert validator.complaints({"at": {"x": "1"}, "mode": {"fast": True}})
    assert found.output is not None
    assert found.output["items"] == {"$ref": "#/$defs/Point"}


def test_what_cannot_be_called_by_name_is_no_tool() -> None:
    def positional(a: int, /) -> None: ...
    def many(*a: int) -> None: ...

    for function in (positional, many, 5, None):
        with pytest.raises(ToolInvalid):
            describe_function(function, filled_in=Caller)  # type: ignore[arg-type]


def test_an_annotation_that_cannot_be_evaluated_allows_anything() -> None:
    def f(x: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert describe_function(f, filled_in=Caller).parameters["properties"] == {"x": {}}
