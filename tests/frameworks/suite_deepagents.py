"""The standard tests of LangChain for sandboxes of deepagents."""

from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from cellwright.harness.adapters.deepagents import CellBackend


class TestCellBackend(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[CellBackend]:
        with CellBackend(pool=0) as backend:
            yield backend
