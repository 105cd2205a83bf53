"""The self-check of Inspect for sandboxes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

CANNOT = {"test_exec_as_user": "a cell has one user, and no root who could add another"}


@pytest_asyncio.fixture(scope="module")
async def opened() -> AsyncIterator[SandboxEnvironment]:
    kind = registry_find_sandboxenv("cellwright")
    await kind.task_init("check", None)
    environments = await kind.sample_init("check", None, {})
    yield environments["default"]
    await kind.sample_cleanup("check", None, environments, False)
    await kind.task_cleanup("check", None, True)


@pytest_asyncio.fixture
async def sandbox_env(
    opened: SandboxEnvironment, request: pytest.FixtureRequest
) -> SandboxEnvironment:
    if reason := CANNOT.get(request.node.originalname):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    return opened
