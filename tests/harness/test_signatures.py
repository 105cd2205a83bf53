"""The public methods name their parameters, so that an editor completes them and a mistake is told."""

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import msgspec
import pytest

import cellwright
from cellwright import (
    AuditLog,
    Fleet,
    HostSettings,
    Limits,
    Policy,
    PolicyError,
    PoolSettings,
    Runs,
    Sandbox,
    SandboxConfig,
    Session,
    ToolFactory,
    ToolRegistry,
    create_sandbox,
)
from cellwright.harness.sandbox.parameters import (
    CallArguments,
    CommandArguments,
    ProgramArguments,
    SessionArguments,
    TerminalArguments,
)
from cellwright.harness.sandbox.remote.call_frames import given_of, packed
from cellwright.harness.sandbox.remote.frames import ExecuteArguments
from cellwright.harness.sandbox.sandbox_arguments import SandboxArguments
from tests.conftest import OPTIONAL, policy_named

METHODS = [
    getattr(kind, name)
    for kind in (Sandbox, Session)
    for name in ("execute", "aexecute", "start", "session", "program", "run", "arun")
    if hasattr(kind, name)
]


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.__qualname__)
def test_every_parameter_has_a_name_a_type_and_a_default(method: Callable[..., Any]) -> None:
    _, *parameters = inspect.signature(method).parameters.values()
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            assert options_of(method), each
            continue
        assert each.annotation is not Any, each
        assert each.default is not each.empty or each.name in ("code", "argv", "command"), each


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the options that a function takes by `**options: Unpack[...]` (PEP 692)."""
    named = next(
        (each.annotation for each in inspect.signature(function).parameters.values()
         if each.kind is each.VAR_KEYWORD), None,
    )  # fmt: skip
    return get_type_hints(get_args(named)[0]) if get_origin(named) is Unpack else {}


def public_functions() -> Iterator[Callable[..., Any]]:
    for name in cellwright.__all__:
        found = getattr(cellwright, name)
        if not inspect.isclass(found):
            yield found
        elif found.__module__.startswith("cellwright") and not issubclass(found, Exception):
            yield from (
                each for each in vars(found).values()
                if inspect.isfunction(each) and (each.__name__ == "__init__" or each.__name__[0] != "_")
            )  # fmt: skip


# `tool` is overloaded, and its overloads name what it takes.  An entry of the trail has any fields.
ANY_KEYWORD = {"tool", "AuditLog.record"}


def test_no_public_function_takes_arguments_without_a_name() -> None:
    checked = 0
    for function in public_functions():
        for each in inspect.signature(function).parameters.values():
            has_name = each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            has_name = has_name or bool(options_of(function))
            assert has_name or function.__qualname__ in ANY_KEYWORD, function.__qualname__
            is_typed = each.annotation is not each.empty or each.name == "self"
            is_made = "dataclass" in str(function) or function.__name__ == "annotate"  # PEP 649
            assert is_typed or is_made, (function.__qualname__, each)
            checked += 1
    assert checked > 300


def named_as(function: Callable[..., Any], *own: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each parameter but `self` and its `own` ones."""
    parameters = inspect.signature(function).parameters.values()
    return {
        each.name: (each.annotation, None if each.default is each.empty else each.default)
        for each in parameters if each.name not in ("self", *own)
    }  # fmt: skip


def fields_of(kind: type[msgspec.Struct], **other: tuple[Any, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each field, as the source has them, but for the `other`."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    required = [None] * (len(names) - len(defaults))
    fields = {
        name: (kind.__annotations__[name], default)
        for name, default in zip(names, (*required, *defaults), strict=True)
    }
    assert set(other) <= set(fields)
    return fields | other


ALIAS = "requirements"  # another name for `packages`


@pytest.mark.parametrize(
    ("signature", "fields"),
    [
        (named_as(Sandbox.session, ALIAS), fields_of(SessionArguments)),
        (named_as(Sandbox.program), fields_of(ProgramArguments)),
    ],
    ids=["session", "program"],
)  # fmt: skip
def test_a_signature_has_the_names_types_and_defaults_of_its_struct(
    signature: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert list(signature) == list(fields)
    assert signature == fields


@pytest.mark.parametrize(
    ("methods", "struct", "own"),
    [
        (
            (Sandbox.execute, Sandbox.aexecute, Sandbox.start, Runs.start), CallArguments,
            {"code", "language", "on_output", "on_streams", "cancel"},
        ),
        ((Fleet.execute, Fleet.map), CallArguments, {"code", "language", "on_output", "on_streams", "cancel", "workspace", "clean"}),
        ((Sandbox.run, Sandbox.arun), CommandArguments, {"command"}),
        ((Session.terminal, Session.aterminal, Sandbox.terminal, Sandbox.aterminal), TerminalArguments, {"command"}),
    ],
    ids=["execute", "fleet", "run", "terminal"],
)  # fmt: skip
def test_options_have_the_names_and_types_of_their_struct(
    methods: tuple[Callable[..., Any], ...], struct: type[msgspec.Struct], own: set[str]
) -> None:
    fields = {name: kind for name, kind in get_type_hints(struct).items() if name not in own}
    for method in methods:
        options = options_of(method)
        options.pop(ALIAS, None)
        assert options == fields, method


@pytest.mark.parametrize("method", ["execute", "start", "run", "terminal"])
def test_an_unknown_option_is_named_with_the_one_that_was_meant(method: str) -> None:
    with Sandbox() as sandbox, pytest.raises(TypeError, match="unknown argument 'evn'.*env"):
        getattr(sandbox, method)("1", evn={})


def test_every_argument_reaches_the_daemon_as_it_was_given() -> None:
    """But for workspaces, of which a daemon keeps none, and what only this process has."""
    given = CallArguments(
        code="1", language="python3", stdin=b"s", inputs={"n": 1}, files={"f": b"x"},
        env={"A": "b"}, timeout=2.0, cpu_seconds=1.0, collect=("*.csv",), trace_id="t", plain=True,
        arguments=("a b",), filename="a.py", packages=("six",),
        flags=("-O0",), sources={"b.h": b"y"}, compile_timeout=3.0,
    )  # fmt: skip
    ours = {"workspace", "clean", "on_output", "on_streams", "cancel"}
    changed = {
        each.name for each in msgspec.structs.fields(CallArguments)
        if each.required or getattr(given, each.name) != each.default
    }  # fmt: skip
    assert changed == set(CallArguments.__struct_fields__) - ours
    assert given_of(packed(given, Limits())) == given
    assert set(ExecuteArguments.__struct_fields__) == changed - {"code", "language"}


def test_a_sandbox_has_at_most_15_arguments_and_the_settings_of_the_host() -> None:
    names = list(inspect.signature(Sandbox).parameters)
    assert (
        names
        == list(SandboxArguments.__struct_fields__)
        == list(inspect.signature(Sandbox.create).parameters)
    )
    assert len(names) <= 16
    assert names[0] == "config"
    assert "host" in names
    assert inspect.signature(Sandbox).parameters["pool"].annotation == int | PoolSettings


def test_an_unknown_argument_is_named_with_the_one_that_was_meant() -> None:
    wrong: dict[str, Any] = {"polic": "strict"}
    for make in (Sandbox, Sandbox.create):
        with pytest.raises(
            TypeError, match=r"Sandbox(.create)?: unknown argument 'polic'; did you mean policy"
        ):
            make(**wrong)
    with pytest.raises(
        TypeError, match="create_sandbox: unknown argument 'timeot'; did you mean timeout"
    ):
        create_sandbox(timeot=1)  # type: ignore[call-arg]


def test_create_sandbox_takes_the_fields_of_a_config() -> None:
    config = SandboxConfig()
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(SandboxConfig)}
    parameters = inspect.signature(create_sandbox).parameters
    given = {each.name: each.default for each in parameters.values()}
    assert given.pop("timeout") == fields.pop("timeout_seconds")
    assert given.keys() == fields.keys()
    with create_sandbox() as sandbox:
        assert sandbox.policy == config.policy()


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
        (
            {"policy": SandboxConfig()},
            r"policy: must be .*, got SandboxConfig\nhint: Sandbox\(config\)",
        ),
        ({"config": 5}, "config: must be a SandboxConfig, the name of a profile"),
        ({"policy": {"limits": {"wall_second": 5}}}, "did you mean wall_seconds"),
        ({"policy": {"extends": 5}}, "extends: must be a name, got 5"),
        ({"policy": Policy(), "config": SandboxConfig()}, "not both"),
        ({"pool": "8"}, "pool: must be a whole number or PoolSettings, got '8'"),
        ({"audit": "trail.jsonl"}, "audit: must be an AuditLog, True or False"),
        ({"sessions": {}}, "sessions: must be SessionSettings"),
        ({"host": "python3.12"}, "host: must be HostSettings, got 'python3.12'"),
        ({"host": HostSettings(interpreters="node")}, "interpreters: must be a mapping"),
        (
            {"host": HostSettings(python=5)},
            "python: must be a version such as '3.12', or a path, got 5",
        ),
        ({"host": HostSettings(cgroup_root=5)}, "cgroup_root: must be a path, got 5"),
        ({"host": HostSettings(spawned=5)}, "spawned: must be a Spawned, got 5"),
        ({"connect": 5}, "connect: must be a path, got 5"),
        ({"workspaces": 5}, "workspaces: must be Workspaces or their directory, got 5"),
        (
            {"tools": ToolRegistry()},
            r"tools: a ToolRegistry cannot .*\n.*ToolFactory\(registry=...\)",
        ),
        ({"config": SandboxConfig(environment=5)}, "environment: must be a mapping, got 5"),
        (
            {"config": SandboxConfig(allowed_paths="/usr", allow_file_read=True)},
            "allowed_paths: must be a list of names, got '/usr'",
        ),
    ],
)
def test_an_argument_of_an_unknown_form_is_refused_and_the_forms_are_named(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PolicyError, match=said):
        Sandbox(**given)


def test_a_path_in_the_place_of_content_is_told_how_to_be_read() -> None:
    with (
        Sandbox(policy=policy_named("strict"), pool=0) as sandbox,
        pytest.raises(PolicyError, match="read_bytes"),
    ):
        sandbox.execute(Path("program.py"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plain": "yes"}, "plain: must be True or False, got 'yes'"),
        ({"clean": "no"}, "clean: must be True or False, got 'no'"),
        ({"on_output": 5}, "on_output: must be a function, got 5"),
        ({"env": {"A": 1}}, "env: must map text to text, got 'A'"),
        ({"env": {"A=": "1"}}, "env: a name must not"),
        ({"arguments": "ab"}, "arguments: must be a list of text, got 'ab'"),
        ({"arguments": ["a", 1]}, "arguments: must be a list of text"),
        ({"arguments": ["a\0"]}, "arguments: .* holds a NUL character"),
        ({"arguments": ["\udc80"]}, "arguments: holds a lone surrogate"),
        ({"arguments": ["a"] * 10_001}, "arguments: must be at most 10000, got 10001"),
        ({"arguments": ["a" * 131_072]}, "arguments: must have at most 131071 bytes each"),
        ({"arguments": ["a" * 131_071] * 9}, "1048576 together, got 131071 and 1179639"),
    ],
)
def test_an_invalid_argument_is_named_as_the_caller_wrote_it(
    given: dict[str, Any], said: str
) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        with pytest.raises(PolicyError, match=said):
            sandbox.execute("1", **given)
        with pytest.raises(PolicyError, match=said):
            asyncio.run(sandbox.aexecute("1", **given))


def test_what_is_kept_in_files_takes_paths(tmp_path: Path) -> None:
    source = "def double(n: int) -> int:\n    return 2 * n\n"
    for path in (tmp_path / "tools", str(tmp_path / "tools")):
        with ToolFactory(registry=path, optional_layers=OPTIONAL) as factory:
            factory.create_tool("double", "Double a number.", source)
    with ToolRegistry(tmp_path / "tools") as registry:
        assert registry.get("double").version == 1
    Runs(tmp_path / "runs").close()
    with pytest.raises(PolicyError, match=r"sandbox: must be a Sandbox, got.*\n.*registry=path"):
        ToolFactory(str(tmp_path / "tools"))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"max_entries: must be .*\n.*AuditLog\(path=...\)"):
        AuditLog(tmp_path / "trail")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="timeout: must be a number, got '5'"):
        create_sandbox("5")  # type: ignore[arg-type]


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
