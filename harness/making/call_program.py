"""Programs of made tools: the source of the tool, followed by one call or one test."""

from ..schemas.functions import FunctionSchema

ARGUMENTS = "arguments_of_this_call"  # the input variable that holds them
# It follows the source, whose lines keep their numbers, and only if a type of the tool is not JSON.
_OBJECTS = r"""
def _cellwright_given(hint, value):
    import base64, dataclasses, datetime, decimal, enum, types, typing, uuid
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Annotated:
        return _cellwright_given(inside[0], value)
    if kind in (typing.Union, types.UnionType):
        for each in inside:
            made = _cellwright_given(each, value)
            if made is not value:
                return made
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        if value.keys() - hints.keys():
            return value
        return hint(**{name: _cellwright_given(hints[name], each) for name, each in value.items()})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value) if value in [each.value for each in hint] else value
    if isinstance(value, str) and isinstance(hint, type):
        if hint in (bytes, bytearray):
            return hint(base64.b64decode(value, validate=True))
        if hint in (datetime.datetime, datetime.date, datetime.time):
            return hint.fromisoformat(value)
        if hint is datetime.timedelta:
            return _cellwright_duration(value)
        if hint in (decimal.Decimal, uuid.UUID):
            return hint(value)
    if isinstance(value, dict) and len(inside) == 2:
        return {name: _cellwright_given(inside[1], each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        return hint(*map(_cellwright_given, hints.values(), value))
    if kind is tuple and not (len(inside) == 2 and inside[1] is ...):
        return tuple(map(_cellwright_given, inside, value))
    made = [_cellwright_given(inside[0], each) for each in value] if inside else value
    for plain in (tuple, set, frozenset):
        if kind is plain or hint is plain:
            return plain(made)
    return made

def _cellwright_duration(text):
    import datetime, re
    found = re.fullmatch(r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", text)
    if not found or text[-1] in "PT":
        raise ValueError(f"{text!r} is not an ISO 8601 duration, such as P1DT2H or PT90S")
    sign, days, hours, minutes, seconds = (part or 0 for part in found.groups())
    made = datetime.timedelta(int(days), float(seconds), 0, 0, int(minutes), int(hours))
    return -made if sign else made

def _cellwright_call(function, arguments):
    import typing
    hints = typing.get_type_hints(function, include_extras=True)
    made = {name: _cellwright_given(hints.get(name), each) for name, each in arguments.items()}
    return function(**made)
"""
_ALL = "async def _cellwright_all(items): return [each async for each in items]\n"


def program_of_call(source: str, described: FunctionSchema) -> str:
    """Return the program whose value is the tool's result."""
    function = described.function
    call = f"{function}(**{ARGUMENTS})"
    if described.has_objects:
        call = f"_cellwright_call({function}, {ARGUMENTS})"
    before = "import asyncio\n" if described.is_async else ""
    if described.is_async_generator:
        before += _ALL
        call = f"_cellwright_all({call})"
    if described.is_async:
        call = f"asyncio.run({call})"
    return f"{source}\n{_OBJECTS if described.has_objects else ''}{before}{call}"


def program_of_test(source: str, test: str, word: str) -> str:
    """Return the program that executes the source and then a test.

    Its value is `word` only if both ran to their end; a test cannot know the word.
    """
    return f"{source}\n{test}\n{word!r}"
