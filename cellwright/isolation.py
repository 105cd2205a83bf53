"""The isolation backends, under the name that users know."""

from .harness.sandbox.isolation import (
    ContainerIsolation,
    IsolationBackend,
    IsolationConfig,
    ProcessIsolation,
)

__all__ = ["ContainerIsolation", "IsolationBackend", "IsolationConfig", "ProcessIsolation"]
