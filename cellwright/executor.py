"""The code executor, under the name that users know."""

from .harness.executor import CodeExecutor, ExecutionContext, ExecutionResult

__all__ = ["CodeExecutor", "ExecutionContext", "ExecutionResult"]
