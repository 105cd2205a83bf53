"""The blueprint's programs, with the import changed."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.agent import (
    AlitaConfig,
    AlitaError,
    HierarchicalMemorySystem,
    HybridPlanner,
    ManagerAgent,
    MCPSystem,
    Orchestrator,
    SandboxExecutor,
    ToolCreationError,
    ToolExecutionError,
    ToolExecutionResult,
    ToolRegistry,
    WebAgent,
)
from cellwright.harness.agent.demo import TASKS, DemoModel
from tests.conftest import policy_named
from tests.harness.agent.scripted import ScriptedModel, answer


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AlitaConfig:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return AlitaConfig()


def test_the_tools_of_the_blueprint_are_there(config: AlitaConfig) -> None:
    model = ScriptedModel(["a short tale"])
    with Orchestrator(config, model=model) as orchestrator:
        get = orchestrator.tool_registry.get

        async def use() -> None:
            wrote = get("FileWriteTool").run({"filepath": "a.csv", "content": "n\n1\n"})
            assert await wrote == {"success": True}
            assert await get("FileReadTool").run({"filepath": "a.csv"}) == {"content": "n\n1\n"}
            rows = await get("CsvProcessor").run({"filepath": "a.csv"})
            assert rows["rows"] == [{"n": "1"}]
            given = {"filepath": "a.csv", "operation": {"select": ["n"], "filter": {"n": "1"}}}
            assert await get("CsvProcessor").run(given) == {"result_json": '[{"n": "1"}]'}
            short = await get("TextSummarizer").run({"text": "long", "length": 20})
            assert short == {"summary": "a short tale"}
            with pytest.raises(ToolExecutionError):
                await get("ApiQueryTool").run({"url": "https://example.org/"})

        asyncio.run(use())
        model.script = [answer("execute_tool('file_read', {'filepath': 'a.csv'})['content']")]
        assert asyncio.run(orchestrator.process_task("read it")) == "n\n1\n"


def test_the_story_of_the_blueprint(config: AlitaConfig) -> None:
    with Orchestrator(config, model=DemoModel()) as orchestrator:
        registry, toolsmith = orchestrator.tool_registry, orchestrator.toolsmith

        async def story() -> None:
            assert await registry.find_tool_by_description("validates email addresses") is None
            tool = await toolsmith.build_new_tool("EmailValidator", "Validates an email address.")
            assert tool.name == registry.get("email_validator").name == "email_validator"
            assert registry.get("EmailValidator").name == tool.name
            assert await tool.run({"email": "ann@example.org"}) is True
            found = await registry.find_tool_by_description("validates email addresses")
            assert found is not None
            assert found.name == tool.name
            with pytest.raises(ToolExecutionError):
                await tool.run({})
            with pytest.raises(ToolExecutionError):
                registry.get("nothing")

        asyncio.run(story())
        answer = asyncio.run(orchestrator.process_task(TASKS[1]))
        assert answer == {"carol@example.net": True}
    tools = Path("workspace/tools")
    (source,) = tools.glob("*.py")
    assert source.name == "EmailValidator.py"
    with ToolRegistry(config.mcp_box_path) as box:
        assert asyncio.run(box.get("EmailValidator").run({"email": "ann@example.org"})) is True
        found = asyncio.run(box.find_tool_by_description("validates email addresses"))
        assert found is not None
    about = json.loads(source.with_suffix(".mcp.json").read_text())
    assert "def email_validator" in source.read_text()
    assert about["description"] == "Validates an email address."
    assert about["state"] == "tested"
    assert about["requirements"] == []


def test_the_manager_says_whether_it_succeeded(config: AlitaConfig) -> None:
    with ManagerAgent(config, model=DemoModel()) as manager:
        told = asyncio.run(manager.process_task(TASKS[0]))
        assert told == {"success": True, "result": {"ann@example.org": True, "bob@example": False}}
    with ManagerAgent(config, model=ScriptedModel(["nothing"], ["nothing"])) as manager:
        told = asyncio.run(manager.process_task("t"))
        assert told["success"] is False
        assert "unusable" in told["error"]
    with Orchestrator(config, model=ScriptedModel(["nothing"], ["nothing"])) as orchestrator:
        with pytest.raises(AlitaError):
            asyncio.run(orchestrator.process_task("t"))
        with pytest.raises(ToolCreationError):
            asyncio.run(orchestrator.toolsmith.build_new_tool("f", "d"))


SCRIPT = """
import json

def execute(params: dict):
    print("Executing")
    return {"status": "success", "params": params}

if __name__ == "__main__":
    import sys
    print(json.dumps(execute(json.load(sys.stdin))))
"""  # as the blueprint's mock writes it


def test_the_executor_of_the_blueprint(config: AlitaConfig) -> None:
    assert config.security["allowed_imports"] == ["json", "aiohttp", "math", "random"]
    config.mcp["execution_timeout"] = 5
    with SandboxExecutor(config, policy=policy_named("strict")) as executor:

        async def use() -> None:
            assert await executor.validate_code(SCRIPT)
            assert not await executor.validate_code("def f(:")
            done = await executor.execute_code(SCRIPT, {"query": "x"})
            assert done == ToolExecutionResult(
                True, {"status": "success", "params": {"query": "x"}}, None
            )
            bad = await executor.execute_code("print('no JSON')", {})
            assert bad.error == "Failed to decode tool output as JSON."
            raised = await executor.execute_code("1 / 0", {})
            assert not raised.success
            assert "ZeroDivisionError" in str(raised.error)
            result = await executor.run_in_container("print(input()); exit(3)", (), "{}")
            assert (result.stdout, result.exit_code) == ("{}\n", 3)
            config.mcp["execution_timeout"] = 0.2
            late = await executor.execute_code("while True: pass", {})
            assert late.error == "Execution timed out."

        asyncio.run(use())


def test_tools_are_made_and_called_by_the_system_of_the_blueprint(config: AlitaConfig) -> None:
    with MCPSystem(config, WebAgent(config), model=DemoModel()) as system:

        async def use() -> None:
            assert await system.get_tool("EmailValidator") is None
            with pytest.raises(ToolExecutionError):
                await system.execute_tool("EmailValidator", {})
            await system.create_tool("EmailValidator", "Validates an email address.")
            assert await system.get_tool("EmailValidator") == {
                "name": "email_validator", "description": "Validates an email address.",
            }  # fmt: skip
            done = await system.execute_tool("EmailValidator", {"email": "ann@example.org"})
            assert done == ToolExecutionResult(True, True, None)
            assert not (await system.execute_tool("EmailValidator", {"e": 1})).success

        asyncio.run(use())
    with ManagerAgent(config, model=DemoModel()) as manager:
        assert isinstance(manager.mcp_system, MCPSystem)


def test_settings_come_from_the_environment_and_from_an_own_file(
    config: AlitaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.openai_api_key is None
    assert config.planning["max_react_steps"] == 10
    Path(".env").write_text('OPENAI_API_KEY="k"\nOPENAI_BASE_URL=http://127.0.0.1:1/v1\n')
    Path(".env").chmod(0o600)
    assert AlitaConfig().openai_api_key == "k"
    assert AlitaConfig().model_url == "http://127.0.0.1:1/v1"
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    assert AlitaConfig(model_url="http://127.0.0.1:2/v1").openai_api_key == "mine"
    Path(".env").chmod(0o666)  # another user could send the key elsewhere
    assert AlitaConfig().model_url == "https://api.openai.com/v1"


@pytest.mark.parametrize("name", ["plain", "${OPENAI_API_KEY}"])
def test_a_file_that_names_the_server_does_not_get_the_key_of_the_environment(
    config: AlitaConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    Path(".env").write_text(f"OPENAI_BASE_URL=http://{name}.example/v1\n")
    Path(".env").chmod(0o600)
    config = AlitaConfig()
    assert config.model_url == f"http://{name}.example/v1"
    assert config.openai_api_key is None
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:2/v1")
    assert AlitaConfig().openai_api_key == "mine"


def test_a_file_that_is_a_pipe_is_not_waited_for(config: AlitaConfig) -> None:
    os.mkfifo(".env", 0o600)
    assert AlitaConfig().model_url == "https://api.openai.com/v1"


def test_nothing_runs_outside_cells(config: AlitaConfig) -> None:
    with pytest.raises(PolicyError, match="sandbox_enabled"):
        AlitaConfig(security={"sandbox_enabled": False})


def test_the_parts_stand_alone(config: AlitaConfig) -> None:
    with HierarchicalMemorySystem(config) as memory:
        memory.keep_fact("Ann is the administrator.")
    assert Path("workspace/memory/memory.db").is_file()
    found = asyncio.run(WebAgent(config).search("fast serialization and validation library"))
    assert {"title", "source", "text"} == found[0].keys()
    assert HybridPlanner(AlitaConfig(planning={"plans": 2, "seed": 7}))
