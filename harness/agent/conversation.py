"""`Conversation`: what a model is sent, within its context, however many steps a run has.

The beginning stays the same from request to request, as far as possible, so that a server can reuse
what it computed for it: old steps are shortened, and then left out, in groups.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .messages import CountTokens, Message, estimated_tokens
from .prompts import shortened

_GROUP = 8  # steps that are shortened or left out together
_UNUSABLE = "(a reply that could not be used)"


class ConversationTurn(NamedTuple):
    """One step in the conversation: a program, or the word for an unusable reply, and what followed."""

    said: str
    observed: str
    tokens: int


class Conversation:
    """The messages of one run.  Only the steps that may still be sent are in memory."""

    def __init__(
        self, system: str, task: str, most_tokens: int,
        count_tokens: CountTokens = estimated_tokens,
    ) -> None:  # fmt: skip
        """`most_tokens`: of all messages together, as `count_tokens` counts those of a text."""
        self._head = (Message("system", system), Message("user", task))
        self._count_tokens = count_tokens
        self._room = most_tokens - sum(count_tokens(each.text) for each in self._head)
        self._left_out = 0  # steps
        self._short: deque[ConversationTurn] = deque()
        self._whole: deque[ConversationTurn] = deque()

    def add(self, code: str | None, observed: str) -> None:
        """Add a step; without `code` its reply was unusable, and is not repeated to the model."""
        said = _UNUSABLE if code is None else f"```python\n{code}\n```"
        self._whole.append(self._turn(said, observed))
        while self._tokens() > self._room and self._shrink():
            pass

    def messages(self, note: str = "") -> Sequence[Message]:
        """Return the messages for the next request; `note` is added to the last one."""
        found = list(self._head)
        if self._left_out:
            words = f"(the first {self._left_out} steps are left out; their variables still exist)"
            found.append(Message("user", words))
        for said, observed, _ in (*self._short, *self._whole):
            found += [Message("assistant", said), Message("user", observed)]
        if note:
            last = found.pop()
            found.append(last._replace(text=f"{last.text}\n\n{note}"))
        return found

    def _turn(self, said: str, observed: str) -> ConversationTurn:
        tokens = self._count_tokens(said) + self._count_tokens(observed)
        return ConversationTurn(said, observed, tokens)

    def _shortened(self, turn: ConversationTurn) -> ConversationTurn:
        return self._turn(shortened(turn.said), shortened(turn.observed))

    def _tokens(self) -> int:
        return sum(each.tokens for each in (*self._short, *self._whole))

    def _shrink(self) -> bool:
        """Shorten the oldest group, or leave it out; return False if only the last step is left."""
        if len(self._whole) > _GROUP:
            self._short.extend(
                self._shortened(turn) for turn in (self._whole.popleft() for _ in range(_GROUP))
            )
        elif self._short:
            for _ in range(min(_GROUP, len(self._short))):
                self._short.popleft()
                self._left_out += 1
        elif len(self._whole) > 1:
            self._whole.popleft()
            self._left_out += 1
        else:
            only = self._whole.pop()
            self._whole.append(self._shortened(only))
            return False
        return True
