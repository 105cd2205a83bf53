"""A user's program: calls, a session and tools."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cellwright import Broker, PoolSettings, Runs, Sandbox, SandboxResult, ToolFactory, Vault, tool


@tool
def look_up(word: str) -> str:
    """Return the meaning of a word."""
    return word.upper()


@tool(risky=True, tags=("mail",))
def send(to: str, text: str) -> None:
    """Send a mail."""


def run(codes: Sequence[str]) -> list[SandboxResult]:
    broker = Broker([look_up, send], vault=Vault({"token": lambda: "secret"}))
    with Sandbox(policy="standard", tools=broker, pool=PoolSettings(size=2)) as sandbox:
        results = [sandbox.execute(code, inputs={"n": 1}, timeout=5) for code in codes]
        with sandbox.session(language="python") as session:
            session.upload("a.txt", b"text")
            results.append(session.execute("open('a.txt').read()", on_output=print))
        return results


def made(folder: Path) -> object:
    """Make a tool in a file, and call it from a program."""
    with ToolFactory(registry=folder / "tools", maker="agent") as factory:
        source = "def double(n: int) -> int:\n    return 2 * n\n"
        spec = factory.create_tool("double", "Double a number.", source, tests=[({"n": 2}, 4)])
        with Sandbox(tools=factory, pool=0) as sandbox, Runs(folder / "runs") as runs:
            attempt = runs.start(sandbox, f"import tools\ntools.{spec.name}(n=n)", inputs={"n": 4})
            return attempt.result.value


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(made(Path(folder)))
    for result in run(["n + 1"]):
        word: str = result.stdout if result.ok else result.reason
        seconds: float = result.usage.wall_seconds
        print(word, seconds, result.value)
