"""The public methods name their parameters, so that an editor completes them and a mistake is told."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright import PolicyError, Sandbox, SandboxConfig, Session
from cellwright.harness.sandbox.request import CallArguments
from cellwright.policies.policy import Policy
from tests.conftest import OPTIONAL, policy_named

METHODS = [
    getattr(kind, name)
    for kind in (Sandbox, Session)
    for name in ("execute", "aexecute", "start", "session", "program")
    if hasattr(kind, name)
]


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.__qualname__)
def test_every_parameter_has_a_name_a_type_and_a_default(method: Callable[..., Any]) -> None:
    _, *parameters = inspect.signature(method).parameters.values()
    for each in parameters:
        assert each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL), each
        assert each.annotation is not each.empty, each
        assert each.annotation is not Any, each
        assert each.default is not each.empty or each.name in ("code", "argv"), each


def test_the_three_ways_to_execute_take_what_one_struct_carries() -> None:
    fields = {each.name: each.default for each in msgspec.structs.fields(CallArguments)}
    for name in ("execute", "aexecute", "start"):
        parameters = inspect.signature(getattr(Sandbox, name)).parameters
        keywords = {
            each.name: each.default
            for each in parameters.values()
            if each.kind is each.KEYWORD_ONLY and each.name not in ("on_output", "cancel")
        }
        assert keywords == fields, name


@pytest.mark.parametrize("way", ["config", "policy"])
def test_a_policy_may_be_given_in_every_form_that_it_has(tmp_path: Path, way: str) -> None:
    (tmp_path / "p.toml").write_text('extends = "strict"\n[limits]\nwall_seconds = 7\n')
    optional = {"optional_layers": list(OPTIONAL)}
    forms: tuple[Any, ...] = (
        {**optional, "extends": "strict", "limits": {"wall_seconds": 7}},
        msgspec.structs.replace(
            policy_named("strict"),
            limits=msgspec.structs.replace(policy_named("strict").limits, wall_seconds=7),
        ),
        *(() if OPTIONAL else (tmp_path / "p.toml", str(tmp_path / "p.toml"))),
    )
    for form in forms:
        with Sandbox(**{way: form}, pool=0) as sandbox:
            assert sandbox.policy.limits.wall_seconds == 7
            assert sandbox.execute("1").value == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": 5}, "policy: must be the name of a profile"),
        ({"config": 5}, "config: must be the name of a profile"),
        ({"policy": {"limits": {"wall_second": 5}}}, "did you mean wall_seconds"),
        ({"policy": {"extends": 5}}, "extends: must be one name"),
        ({"policy": Policy(), "config": SandboxConfig()}, "not both"),
        ({"pool": "8"}, "pool: must be a whole number or PoolSettings, not '8'"),
        ({"audit": "trail.jsonl"}, "audit: must be an AuditLog, True or False"),
        ({"sessions": {}}, "sessions: must be SessionSettings"),
        ({"interpreters": "node"}, "interpreters: must be a mapping"),
    ],
)
def test_what_is_none_of_the_forms_is_refused_with_those_that_are(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PolicyError, match=said):
        Sandbox(**given)


def test_a_path_in_the_place_of_content_is_told_how_to_be_read() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        with pytest.raises(PolicyError, match="read_bytes"):
            sandbox.execute(Path("program.py"))  # type: ignore[arg-type]
        with pytest.raises(PolicyError, match=r"files: 'a'.*\n.*read_bytes"):
            sandbox.execute("1", files={"a": Path("a")})  # type: ignore[dict-item]


def test_an_async_on_output_is_awaited_or_refused() -> None:
    seen: list[tuple[str, bytes]] = []

    async def on_output(stream: str, data: bytes) -> None:
        await asyncio.sleep(0)
        seen.append((stream, data))

    class Listener:
        async def __call__(self, stream: str, data: bytes) -> None:
            await on_output(stream, data)

    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        for listener in (on_output, Listener(), functools.partial(on_output)):
            asyncio.run(sandbox.aexecute("print('hi')", on_output=listener))
            assert seen.pop() == ("stdout", b"hi\n")
        for listener in (on_output, Listener(), functools.partial(on_output)):
            with pytest.raises(PolicyError, match="on_output.*coroutine"):
                sandbox.execute("print('hi')", on_output=listener)  # type: ignore[arg-type]
    assert seen == []


def test_a_call_of_a_session_has_no_workspace_of_its_own(tmp_path: Path) -> None:
    with (
        Sandbox(policy=policy_named("strict"), pool=0, workspaces=tmp_path) as sandbox,
        sandbox.session() as session,
        pytest.raises(PolicyError, match=r"sandbox\.session\(workspace=\.\.\.\)"),
    ):
        session.execute("1", workspace="mine")
