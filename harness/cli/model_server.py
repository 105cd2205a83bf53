"""The options that name a model's server, of `cellwright agent` and `cellwright web`."""

import argparse
from typing import TYPE_CHECKING

from ...policies.privacy import SOURCE_FORM
from ..sources import named_source

if TYPE_CHECKING:
    from ..agent.messages import ChatModel

CONTEXT_TOKENS = 16_384


def add_model_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that `model_client` reads, except --model."""
    parser.add_argument(
        "--model-name", default="", metavar="NAME", help="the model's name there; default none"
    )
    parser.add_argument(
        "--key", metavar="SOURCE",
        help=f"where the API key is: {SOURCE_FORM}; default env:OPENAI_API_KEY, if it is set",
    )  # fmt: skip


def model_client(options: argparse.Namespace, context_tokens: int = CONTEXT_TOKENS) -> "ChatModel":
    """Return a client of the model's server that the options name.

    Raises PolicyError for an invalid option, and if the extra is not installed.
    """
    key = None if options.key is None else named_source(options.key, "--key")
    from ..agent.model import ModelClient  # httpx2 takes 100 ms to import

    return ModelClient(options.model, options.model_name, key=key, context_tokens=context_tokens)
