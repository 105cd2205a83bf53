"""Tools of the host: programs call your functions, and a person approves the risky one."""

from cellwright import Broker, Sandbox, tool
from cellwright.harness.tools.approval import ask_terminal

PROGRAM = """
import tools
balance = tools.balance(account="ann")
tools.pay(account="bob", amount=balance // 2)
"""


@tool
def balance(account: str) -> int:
    """Return what is in an account."""
    return {"ann": 80, "bob": 5}[account]


@tool(risky=True)
def pay(account: str, amount: int) -> str:
    """Pay an amount into an account."""
    return f"paid {amount} to {account}"


def main() -> None:
    with Sandbox(tools=Broker([balance, pay], approve=ask_terminal)) as sandbox:
        result = sandbox.execute(PROGRAM)
        print(result.status.name, result.value or result.error)


if __name__ == "__main__":
    main()
