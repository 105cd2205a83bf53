"""Where a server listens, and who may come there."""

from typing import NamedTuple

from .tokens import Tokens


class HttpSettings(NamedTuple):
    """`made` is a token that nobody knows yet, empty if clients have theirs; `hosts` are the names that
    clients call us by, `origins` the web pages that may."""

    host: str
    port: int
    tokens: Tokens
    made: str
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
