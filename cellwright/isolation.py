"""The isolation backends, under the name that users know."""

from .harness.sandbox.faces.executor import (
    ContainerIsolation,
    IsolationBackend,
    IsolationConfig,
    ProcessIsolation,
)

__all__ = ["ContainerIsolation", "IsolationBackend", "IsolationConfig", "ProcessIsolation"]
