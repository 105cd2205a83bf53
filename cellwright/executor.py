"""The code executor, under the name that users know."""

from .harness.sandbox.faces.executor import CodeExecutor, ExecutionContext, ExecutionResult

__all__ = ["CodeExecutor", "ExecutionContext", "ExecutionResult"]
