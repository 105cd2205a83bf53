"""The conformance suite of Pydantic AI for workspaces."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from pydantic_ai.workspaces import WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from cellwright import Sandbox
from cellwright.harness.adapters.pydantic_ai import CellWorkspace


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy="workshop", pool=0) as made:
        yield made


class TestCellWorkspace(WorkspaceBackendSuite):
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def backend(self, sandbox: Sandbox) -> Iterator[CellWorkspace]:
        made = CellWorkspace(sandbox)
        yield made
        asyncio.run(made.destroy())

    @pytest.fixture
    def fresh_backend(self, sandbox: Sandbox) -> Callable[[], CellWorkspace]:
        return lambda: CellWorkspace(sandbox)

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], CellWorkspace]:
        return lambda ref: CellWorkspace(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[CellWorkspace], object]:
        return CellWorkspace.destroy
