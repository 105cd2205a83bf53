"""The program of one call: a tool's source, and one expression after it."""

from .schema import Described

ARGUMENTS = "arguments_of_this_call"  # the variable that they come in
# After the source, so that its lines keep their numbers; only for tools whose types are more than JSON.
_OBJECTS = """
def _cellwright_given(hint, value):
    import dataclasses, enum, types, typing
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

def _cellwright_plain(value):
    import dataclasses, enum
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cellwright_plain(dataclasses.asdict(value))
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {name: _cellwright_plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_cellwright_plain(each) for each in value]
    return value

def _cellwright_call(function, arguments):
    import typing
    hints = typing.get_type_hints(function, include_extras=True)
    made = {name: _cellwright_given(hints.get(name), each) for name, each in arguments.items()}
    return function(**made)
"""


def program_of_call(source: str, described: Described) -> str:
    """Return the program whose value is a list with the tool's result in it.

    In a list, because a value that is no JSON then comes as text, which is no list.
    """
    function = described.function
    call = f"{function}(**{ARGUMENTS})"
    if described.has_objects:
        call = f"_cellwright_call({function}, {ARGUMENTS})"
    if described.is_async:
        call = f"asyncio.run({call})"
    if described.has_objects:
        call = f"_cellwright_plain({call})"
    before = "import asyncio\n" if described.is_async else ""
    return f"{source}\n{_OBJECTS if described.has_objects else ''}{before}[{call}]"


def program_of_test(source: str, test: str, word: str) -> str:
    """Return the program that runs a test after the source; its value is `word` only if both ran to
    their end."""
    return f"{source}\n{test}\n{word!r}"
