"""Arguments of the tools, one struct each: they validate calls, and the tools' schemas come from
them."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....policies.errors import PolicyError

NEW = "new"
_MAX_NAMES = 20
_MAX_FILES = 1000

# Bounds left out of the schemas, which cost tokens in every conversation; they are enforced
# nevertheless.
_LEFT_OUT = (
    "title", "maxLength", "maxItems", "minItems", "maxProperties", "propertyNames", "minimum",
    "maximum", "exclusiveMinimum",
)  # fmt: skip
_MAY_BE_EMPTY = ("default", "required")

_Name = Annotated[str, Meta(max_length=256)]
_Id = Annotated[str, Meta(max_length=64)]
_Path = Annotated[str, Meta(max_length=1024)]


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arguments of one call."""


class SearchToolsArguments(Arguments, frozen=True):
    query: Annotated[str, Meta(max_length=4096)]
    limit: Annotated[int, Meta(ge=1, le=50)] = 5


class DescribeToolsArguments(Arguments, frozen=True):
    names: Annotated[list[_Name], Meta(min_length=1, max_length=_MAX_NAMES)]


class RunCodeArguments(Arguments, frozen=True):
    code: str
    language: _Name = "python"
    session: Annotated[_Id, Meta(description='"new", or the id of one; else a fresh cell')] = ""
    files: Annotated[
        dict[_Path, str],
        Meta(max_length=_MAX_FILES, description="path -> text, put in place first"),
    ] = {}
    collect: Annotated[
        list[_Path], Meta(max_length=64, description="globs of files to return")
    ] = []
    timeout: Annotated[float, Meta(gt=0, description="seconds")] | UnsetType = UNSET
    packages: Annotated[
        list[_Name], Meta(max_length=64, description="of python, that this server allows")
    ] = []


class CallToolArguments(Arguments, frozen=True):
    name: _Name
    arguments: dict[str, Any] = {}


class CreateToolArguments(Arguments, frozen=True):
    name: _Name
    source_code: Annotated[str, Meta(description="Python that defines a function of that name")]
    description: str = ""
    tests: (
        Annotated[
            list[str],
            Meta(
                max_length=64,
                description="programs that assert, run after the source; default the last version's",
            ),
        ]
        | UnsetType
    ) = UNSET
    calls: Annotated[list[_Name], Meta(max_length=64, description="tools that it may call")] = []
    requirements: Annotated[list[_Name], Meta(max_length=64, description="packages")] = []
    allow_similar: bool = False


class LoadSkillArguments(Arguments, frozen=True):
    name: _Name
    path: Annotated[_Path, Meta(description="of a file; default the instructions")] = ""


class SaveSkillArguments(Arguments, frozen=True):
    session: _Id
    name: Annotated[_Name, Meta(description="of a-z, 0-9 and hyphens")]
    description: Annotated[
        str, Meta(max_length=1024, description="what it does, and when to use it")
    ]
    files: (
        Annotated[
            list[_Path],
            Meta(
                max_length=64, description="globs; default the programs that succeeded, as a script"
            ),
        ]
        | UnsetType
    ) = UNSET
    body: Annotated[str, Meta(max_length=65_536, description="instructions in markdown")] = ""
    tests: Annotated[str, Meta(description="a program that asserts")] = ""
    task: Annotated[str, Meta(max_length=4096)] = ""


class SessionsArguments(Arguments, frozen=True):
    close: Annotated[_Id, Meta(description="id of one to end first")] = ""
    branch: Annotated[_Id, Meta(description="id of one to copy")] = ""
    branches: Annotated[int, Meta(ge=1, le=8)] = 1
    pause: Annotated[_Id, Meta(description="id of one to keep on disk until used")] = ""


class ListFilesArguments(Arguments, frozen=True):
    session: _Id


class DownloadFileArguments(Arguments, frozen=True):
    session: _Id
    path: _Path


class UploadFileArguments(Arguments, frozen=True):
    session: _Id
    path: _Path
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


def read_arguments(kind: type[Arguments], given: dict[str, Any] | None) -> Arguments:
    """Return the validated arguments; raises PolicyError that names the field and the problem."""
    try:
        return msgspec.convert(given or {}, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PolicyError(f"arguments: {error}{_fields_of(kind, given)}") from None


def _fields_of(kind: type[Arguments], given: object) -> str:
    """Return which fields are unknown, which are missing and which there are, if names are wrong."""
    if not isinstance(given, dict):
        return ""
    fields = {each.name: each.required for each in msgspec.structs.fields(kind)}
    unknown = sorted(set(given) - set(fields))
    missing = [name for name, required in fields.items() if required and name not in given]
    parts = [
        f"unknown: {', '.join(each[:64] for each in unknown[:10])}" if unknown else "",
        f"missing: {', '.join(missing)}" if missing else "",
        f"the fields are {', '.join(fields)}",
    ]
    return "; " + "; ".join(filter(None, parts)) if unknown or missing else ""


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the lean JSON Schema of a struct."""
    _, components = msgspec.json.schema_components([kind])
    schema = components[kind.__name__]
    schema.pop("description", None)  # the docstring is for readers of the code
    return _lean(schema)


def _lean(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a model does not need: titles, bounds, and empty defaults."""
    lean = {key: value for key, value in schema.items() if key not in _LEFT_OUT}
    for key in ("items", "additionalProperties"):
        if isinstance(lean.get(key), dict):
            lean[key] = _lean(lean[key])
    if "properties" in lean:
        lean["properties"] = {name: _lean(each) for name, each in lean["properties"].items()}
    return {key: value for key, value in lean.items() if value or key not in _MAY_BE_EMPTY}
