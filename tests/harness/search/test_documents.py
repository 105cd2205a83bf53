"""Documents of tools are bounded and clean, and shown at three levels."""

import msgspec
import pytest

from cellwright import PolicyError
from cellwright.harness.search.documents import (
    Document,
    Parameter,
    document_of,
    parameters_of,
    shown,
    summary,
)

TEXT = "Read a file.  It is given back as text. Long files are cut."
READ = document_of(
    "files/read", "read", TEXT, {"properties": {"path": {"description": "where it is"}}},
    tags=("io",), server="files", kind="mcp",
)  # fmt: skip


def test_each_level_shows_more() -> None:
    assert shown(READ, "name") == {"name": "files.read"}
    assert shown(READ) == {"name": "files.read", "description": "Read a file."}
    assert shown(READ, "full") == {
        "name": "files.read", "description": TEXT, "parameters": {"path": "where it is"},
        "tags": ["io"], "kind": "mcp",
    }  # fmt: skip
    assert shown(READ, "brief") == shown(READ, "summary")
    assert shown(READ, "detailed") == shown(READ, "full")


def test_a_level_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        PolicyError, match="detail: must be one of name, summary, full, .*got 'all'"
    ):
        shown(READ, "all")


def test_a_summary_is_one_sentence_on_one_line() -> None:
    assert summary("Read\n  a file.\n\nMore.") == "Read a file."
    assert summary("e.g") == "e.g"
    assert len(summary("word " * 1000)) <= 200


def test_parameters_are_found_where_schemas_keep_them() -> None:
    schema = {
        "properties": {
            "filter": {
                "anyOf": [{"properties": {"from": {"description": "a sender"}}}, {"type": "null"}]
            },
            "rows": {"type": "array", "items": {"properties": {"cell": {}}}},
        }
    }
    names = [each.name for each in parameters_of(schema)]
    assert names == ["filter", "rows", "from", "cell"]
    assert Parameter("from", "a sender") in parameters_of(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 7},
        {"properties": {1: {}, "a": 3, "b": {"description": ["x"]}}},
        {"anyOf": "text", "items": [None, 4, {"properties": None}]},
        {"properties": True, "allOf": [{}], "prefixItems": {}},
    ],
)
def test_a_schema_may_be_anything(schema: dict[str, object]) -> None:
    assert {each.name for each in parameters_of(schema)} <= {"a", "b"}


def test_a_schema_without_end_is_left_unread() -> None:
    endless: dict[str, object] = {}
    endless["properties"] = {f"p{n}": endless for n in range(500)}
    endless["anyOf"] = [endless] * 500
    assert len(parameters_of(endless)) <= 64
    wide: dict[str, object] = {"properties": {"a": {}}}
    wide["anyOf"] = [wide] * 500
    assert [each.name for each in parameters_of(wide)] == ["a"]
    deep: dict[str, object] = {}
    for n in range(100_000):
        deep = {"properties": {f"p{n}": deep}}
    assert len(parameters_of(deep)) <= 4


def test_what_an_author_hides_is_not_kept() -> None:
    made = document_of(
        "x", "re\u202ead", "a\u200bb" * 1_000_000, {"properties": {"p\x00": {}}},
        server="s\u200b", tags=("t\u2066", *["more"] * 1000),
    )  # fmt: skip
    assert (made.server, made.tags[0], len(made.tags)) == ("s", "t", 32)
    assert made.name == "read"
    assert made.parameters == (Parameter("p"),)
    assert len(made.description) < 5000
    msgspec.json.encode(made)
    msgspec.json.encode(shown(document_of("y", "n\ud800", "d\udfff"), "full"))


def test_a_document_that_knows_more_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": "a", "name": "a", "more": 1}, Document)
