"""Privacy: a program works with tokens in place of personal data; one tool gets the value."""

from cellwright import Privacy, Sandbox, tool

PROGRAM = """
import tools
customer = tools.find_customer(number=17)
tools.send_mail(to=customer["mail"], body="Your order was sent.")
print("the program sees", customer["mail"][:10] + "...")
"""


@tool
def find_customer(number: int) -> dict[str, str]:
    """Find a customer."""
    return {"mail": "ann@example.org"}


@tool
def send_mail(to: str, body: str) -> str:
    """Send a mail."""
    print("the tool sends to", to)
    return "sent"


def main() -> None:
    privacy = Privacy(restore=["send_mail:to"])
    with Sandbox(tools=[find_customer, send_mail], privacy=privacy) as sandbox:
        print(sandbox.execute(PROGRAM).stdout, end="")


if __name__ == "__main__":
    main()
