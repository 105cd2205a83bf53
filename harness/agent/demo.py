"""`DemoModel`: a model that is a script, for `cellwright agent run --demo`: it shows the loop offline.

Everything else is real: the search, the tool that is written, its failing test and its repair, the
cells.  The script looks at the conversation only, as a model does.
"""

from collections.abc import Sequence
from typing import Any

from .prompts import USUAL, Message, ModelReply, OnText, Sampling, estimated_tokens

TASKS = (
    "Is ann@example.org a valid e-mail address, and is bob@example?",
    "Check the e-mail address carol@example.net.",
)
_LOOK = """I look for a tool that checks e-mail addresses.
```python
found = find_tool("validates an e-mail address")
found
```"""
_BUILD = """There is none, so I have one built.
```python
build_tool(
    "email_validator",
    "Validates an e-mail address: takes the address and returns whether it has a local part, an @ "
    "and a domain with at least one dot.",
)
```"""
_USE = """There is one. I call it.
```python
final_answer({each: execute_tool("email_validator", {"email": each}) for each in ADDRESSES})
```"""
_PACKAGE_DRAFT = '''```python
from email_validator import EmailNotValidError, validate_email

def email_validator(email: str) -> bool:
    """Tell whether a text is an e-mail address."""
    try:
        return bool(validate_email(email, check_deliverability=False))
    except EmailNotValidError:
        return False
```
```tests
assert email_validator("ann@example.org")
assert not email_validator("ann@example")
assert not email_validator("ann@example..org")
```
```requirements
email-validator
```'''
_FIRST_DRAFT = '''```python
def email_validator(email: str) -> bool:
    """Tell whether a text is an e-mail address."""
    return "@" in email
```
```tests
assert email_validator("ann@example.org")
assert not email_validator("ann@example")
assert not email_validator("@example.org")
```'''
_SECOND_DRAFT = '''```python
def email_validator(email: str) -> bool:
    """Tell whether a text is an e-mail address."""
    local, _, domain = email.rpartition("@")
    return bool(local) and all(domain.split(".")) and "." in domain
```
```tests
assert email_validator("ann@example.org")
assert not email_validator("ann@example")
assert not email_validator("@example.org")
assert not email_validator("ann@example..org")
```'''


class DemoModel:
    """Answers the tasks of the demonstration, and nothing else."""

    name = "demo"
    context_tokens = 16_384

    def ask(
        self, messages: Sequence[Message], sampling: Sampling = USUAL, *,
        schema: dict[str, Any] | None = None, on_text: OnText | None = None,
    ) -> ModelReply:  # fmt: skip
        """Return the reply of the script at this point of the conversation."""
        text = _draft(messages) if "You write one tool" in messages[0].text else _step(messages)
        if on_text:
            on_text(text)
        asked = sum(estimated_tokens(each.text) for each in messages)
        said = estimated_tokens(text)
        return ModelReply(text=text, input_tokens=asked, output_tokens=said, is_estimated=True)


def _draft(messages: Sequence[Message]) -> str:
    """Return a draft with a package first; if there is none, one that forgets the domain."""
    why = messages[-1].text
    if "This failed" not in why:
        return _PACKAGE_DRAFT
    return _SECOND_DRAFT if "AssertionError" in why else _FIRST_DRAFT


def _step(messages: Sequence[Message]) -> str:
    if len(messages) == len(("system", "task")):
        return _LOOK
    if "email_validator" not in messages[-1].text:
        return _BUILD
    task = messages[1].text.partition("\n\n")[0]
    words = task.replace("?", " ").replace(",", " ").split()
    addresses = [each.rstrip(".") for each in words if "@" in each]
    return _USE.replace("ADDRESSES", repr(addresses))
