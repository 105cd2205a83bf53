"""A user's program: calls, a session and tools."""

from collections.abc import Sequence

from cellwright import Broker, PoolSettings, Sandbox, SandboxResult, Vault, tool


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


if __name__ == "__main__":
    for result in run(["n + 1"]):
        word: str = result.stdout if result.ok else result.reason
        seconds: float = result.usage.wall_seconds
        print(word, seconds, result.value)
