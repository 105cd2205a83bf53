"""A tool's spec can be stored and read back, and granted permissions stay unchanged."""

import msgspec
import pytest

from cellwright import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    PolicyError,
)
from cellwright.harness.schemas.spec import ToolSpec, ToolTest, grants_of


def test_a_spec_is_the_same_after_it_was_stored() -> None:
    granted = PermissionSet(
        [
            FilePermission(level=PermissionLevel.WRITE, allowed_paths=("/data/*",)),
            NetworkPermission(),
        ]
    )
    spec = ToolSpec(
        name="double", grants=grants_of(granted), tests=(ToolTest(input={"n": 1}, expected=2),)
    )
    again = msgspec.json.decode(msgspec.json.encode(spec), type=ToolSpec)
    assert msgspec.json.encode(again) == msgspec.json.encode(spec)
    assert again.permissions.permissions[0].level is PermissionLevel.WRITE


def test_what_was_granted_cannot_be_changed_through_a_spec() -> None:
    spec = ToolSpec(name="double")
    spec.permissions.add(NetworkPermission(allow_localhost=True))
    assert spec.permissions == PermissionSet()


def test_only_a_permission_set_grants_anything() -> None:
    with pytest.raises(PolicyError, match="PermissionSet"):
        grants_of({"allow_network": True})  # type: ignore[arg-type]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"name": "x", "admin": true}', type=ToolSpec)
