"""`Toolsmith`: has a model write a tool with its tests, and repairs it by the errors of its cell.

That the tests of a tool pass makes it TESTED, not TRUSTED: the same model wrote both.
"""

from collections.abc import Callable
from typing import NamedTuple

from ...policies.errors import (
    PackageError,
    PolicyError,
    ToolExists,
    ToolFailed,
    ToolInvalid,
    ToolNotFound,
)
from ..making.factory import ToolFactory
from ..schemas.spec import Provenance, ToolSpec, ToolState
from ..schemas.tool_names import normalised
from ..text.hidden import line, prose
from .messages import ChatModel, Message, Sampling
from .reply import Block, fenced_blocks

_INSTRUCTIONS = """\
You write one tool: a Python function with type annotations and a docstring. It uses the standard
library{packages}, has no access to files, programs or the network, and returns JSON-like data.

Reply with two blocks{third} and nothing else. The first is the function, with its imports:
```python
def name(argument: str) -> dict:
    \"\"\"What it does.\"\"\"
```
The second has tests, which call the function and assert:
```tests
assert name("x") == {{"y": 1}}
```"""
_REQUIREMENTS = """
The third, only if it imports packages, has a requirement in each line:
```requirements
package
```"""
_SHOWN = 2000  # characters of an error that the model gets
_PACKAGES = frozenset(("requirements", "requirements.txt"))
_TESTS = frozenset(("tests", "test", "python", "py"))


class Draft(NamedTuple):
    """The source of a tool, of its tests, and the packages that it imports, as a model wrote them."""

    source: str
    tests: str
    requirements: tuple[str, ...] = ()


class Toolsmith:
    """Makes tools in a ToolFactory, each with at most `attempts` drafts.

    `on_draft` is told what came of each draft, in a line.  `check` is called before each draft, and
    raises what forbids it.
    """

    def __init__(
        self, model: ChatModel, factory: ToolFactory, *, attempts: int = 4,
        on_draft: Callable[[str], None] = lambda told: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._model, self._factory, self._attempts = model, factory, attempts
        self._on_draft, self._check = on_draft, check

    def build_new_tool(self, name: str, description: str, *, task: str = "") -> ToolSpec:
        """Return a tested tool of that name, or the tool that does the same already.

        Raises ToolInvalid for a name that no tool can have, ToolFailed if no draft passes its tests,
        ModelError, and what `check` raises.
        """
        name = normalised(name)  # first: it is shown to the model
        if known := self._known(name):
            return known
        asked = f"Name: {name}\nWhat it must do: {prose(description, 4000)}"
        messages = [
            Message("system", _instructions(self._factory.packages)),
            Message("user", asked),
        ]
        provenance = Provenance(task=task[:1000], model=self._model.name)
        why = ""
        for attempt in range(self._attempts):
            self._check()
            sampling = Sampling(temperature=0.2 * attempt, seed=attempt)
            reply = self._model.ask(messages, sampling)
            try:
                draft = _draft_of(reply.text)
                made = self._factory.create_tool(
                    name, prose(description, 1000), draft.source, tests=[draft.tests],
                    requirements=draft.requirements, provenance=provenance, is_new=True,
                )  # fmt: skip
                self._on_draft(f"{made.reference} is made; its tests pass")
                return made
            except ToolExists as exists:
                return self._factory.get_tool(exists.existing)
            except (ToolInvalid, PolicyError, PackageError) as error:  # ToolTestFailed among them
                why = str(error)[:_SHOWN]
                self._on_draft(f"draft {attempt + 1} of {name}: {line(why)}")
            messages = [*messages[:2], *_repair(reply.text, why)]
        raise ToolFailed(
            f"{name}: no draft of {self._attempts} passed its tests; the last: {why}",
            "describe the tool more exactly, or do without it",
            tool=name,
        )

    def _known(self, name: str) -> ToolSpec | None:
        try:
            known = self._factory.get_tool(name)
        except ToolNotFound:
            return None
        return self._factory.registry.successor(name) if known.state is ToolState.RETIRED else known


def _instructions(packages: tuple[str, ...] | None) -> str:
    """Return the first message, which names the packages that the tool may have, as far as they fit."""
    if packages == ():
        return _INSTRUCTIONS.format(packages=" only", third="")
    named = "packages" if packages is None else ", ".join(packages)[:_SHOWN]
    return (
        _INSTRUCTIONS.format(packages=f" and, where they help, {named}", third=", or three,")
        + _REQUIREMENTS
    )


def _repair(text: str, why: str) -> list[Message]:
    return [
        Message("assistant", text),
        Message("user", f"This failed:\n{why}\n\nReply with both blocks again, mended."),
    ]


def _draft_of(text: str) -> Draft:
    """Return the blocks of a reply; raises ToolInvalid if the source or its tests are missing."""
    blocks, _ = fenced_blocks(text)
    named = [each for each in blocks if each.name in _PACKAGES]
    blocks = [each for each in blocks if each.name not in _PACKAGES]
    code = next((each for each in blocks if each.name != "tests" and "def " in each.text), None)
    tests = next((each for each in blocks if _is_tests(each) and each is not code), None)
    if code is None:
        raise ToolInvalid("the reply has no block with a function")
    if tests is None:
        raise ToolInvalid("the reply has no block with tests")
    lines = [each.partition("#")[0].strip() for block in named for each in block.text.splitlines()]
    return Draft(code.text, tests.text, tuple(each for each in lines if each))


def _is_tests(block: Block) -> bool:
    return block.name in _TESTS and "assert" in block.text
