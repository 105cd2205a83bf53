"""The permission model, under the name that its users know."""

from .policies.permission_sets import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    ProcessPermission,
)

__all__ = [
    "FilePermission", "NetworkPermission", "PermissionLevel", "PermissionSet", "ProcessPermission",
]  # fmt: skip
