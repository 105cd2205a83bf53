"""A look behind a sandbox, for tests and benchmarks only: everything here may change at any time."""

from .harness.sandbox.inspection import Inspection, LauncherPids, inspect

__all__ = ["Inspection", "LauncherPids", "inspect"]
