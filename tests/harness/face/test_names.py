"""The public names: where they are, what they call themselves, and that nothing breaks by that."""

import importlib
import pickle
import pydoc

import msgspec
import pytest

import cellwright
from cellwright import errors
from cellwright.policies.errors import CellwrightError

ROOMS = {room: importlib.import_module(f"cellwright.{room}") for room in cellwright._ROOMS}
MOVED = sorted(
    (name, room) for room, module in ROOMS.items() for name in module.__all__
    if name not in cellwright.__all__
)  # fmt: skip


def test_a_name_has_one_place_but_the_common_errors() -> None:
    assert len(cellwright.__all__) <= 100
    names = [name for module in ROOMS.values() for name in module.__all__]
    assert len(set(names)) == len(names)
    both = set(names) & set(cellwright.__all__)
    assert both == set(errors.__all__) & set(cellwright.__all__)


def test_every_error_is_in_the_module_of_errors() -> None:
    def below(kind: type[CellwrightError]) -> set[str]:
        return {kind.__name__}.union(*map(below, kind.__subclasses__()))

    own = {name for name in below(CellwrightError) if hasattr(cellwright.policies.errors, name)}
    assert own == set(errors.__all__)


@pytest.mark.parametrize("name", cellwright.__all__)
def test_a_name_says_where_it_is_imported_from(name: str) -> None:
    value = getattr(cellwright, name)
    if name in errors.__all__:
        assert value.__module__ == "cellwright.errors"
    elif name != "Caller":  # whose annotations are text
        assert value.__module__ == "cellwright"
    assert pickle.loads(pickle.dumps(value)) is value
    assert pydoc.render_doc(value)


def test_records_are_still_encoded_decoded_and_pickled() -> None:
    policy = cellwright.Policy(limits=cellwright.Limits(processes=5))
    assert msgspec.json.decode(msgspec.json.encode(policy), type=cellwright.Policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    status = cellwright.SandboxStatus.FAILED
    assert pickle.loads(pickle.dumps(status)) is status
    error = pickle.loads(
        pickle.dumps(cellwright.PolicyError("limits: must be a table", "write one"))
    )
    assert (error.what, error.hint) == ("limits: must be a table", "write one")


@pytest.mark.parametrize(
    "kind",
    [
        value for name in cellwright.__all__
        if isinstance(value := getattr(cellwright, name), msgspec.StructMeta)
        and name not in ("Caller", "Plan")  # never decoded
    ],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_the_types_of_the_fields_of_a_record_are_found(kind: type[msgspec.Struct]) -> None:
    msgspec.structs.fields(kind)


@pytest.mark.parametrize(("name", "room"), MOVED)
def test_an_old_name_goes_on_with_a_warning_that_names_its_module(name: str, room: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"import it from cellwright.{room}$") as seen:
        value = getattr(cellwright, name)
    assert value is getattr(ROOMS[room], name)
    assert seen[0].filename == __file__


def test_an_unknown_name_is_an_attribute_error() -> None:
    for name in ("Sandbx", "_private", "__wrapped__", "x"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(cellwright, name)
