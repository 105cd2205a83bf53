"""Messages to a model and its replies, and `ChatModel`, the protocol of what can be asked."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

OnText = Callable[[str], None]
CountTokens = Callable[[str], int]  # of a text


class Message(NamedTuple):
    """One message of a conversation; only text, so that no reply of a model is sent back as data."""

    role: Literal["system", "user", "assistant"]
    text: str


class ToolRequest(msgspec.Struct, frozen=True):
    """A call in the format of tool calling; `arguments` is the text of the model, JSON if valid."""

    name: str
    arguments: str


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a model.

    `finish` is the server's word for why it ended, such as `stop` or `length`.  Tokens are those that
    the server counted, or with `is_estimated` a quarter of the bytes.
    """

    text: str
    requests: tuple[ToolRequest, ...] = ()
    finish: str = "stop"
    input_tokens: int = 0
    output_tokens: int = 0
    is_estimated: bool = False


class Sampling(NamedTuple):
    """How the next reply is chosen: after an unusable one, another choice must be possible."""

    temperature: float = 0.0
    seed: int | None = None


USUAL = Sampling()


class ChatModel(Protocol):
    """A model that answers a conversation; `ModelClient`, or a test's own."""

    @property
    def name(self) -> str:
        """The name of the model, for the record and the price table."""

    @property
    def context_tokens(self) -> int:
        """The number of tokens that a conversation with its reply may have."""

    def ask(
        self, messages: Sequence[Message], sampling: Sampling = USUAL, *,
        schema: dict[str, Any] | None = None, on_text: OnText | None = None,
    ) -> ModelReply:  # fmt: skip
        """Return the reply to a conversation; raises ModelError."""


def estimated_tokens(text: str) -> int:
    """Return an upper estimate of the tokens of a text: a third of its bytes.

    Tokenizers of current models need 0.2 to 0.3 tokens a byte of English and of code; a text that is
    mostly other scripts can need more.
    """
    return len(text.encode(errors="replace")) // 3 + 4
