"""The page: its parts put together, and the policy that a browser holds it to.

The page has no external part.  Its only script and its only style are allowed by their hashes, data
is in a script element of the type application/json, which no browser executes, and the script writes
texts by `textContent` alone; Trusted Types refuse any other way.
"""

import base64
import functools
import hashlib
import re
from importlib.resources import files
from typing import Literal

from .encoding import encoded
from .overview import Overview

Connections = Literal["'none'", "'self'"]
_NOTHING = b"null"
_PLACE = re.compile(rb"\{(?:policy|style|script|data)\}")


def static_page(overview: Overview) -> bytes:
    """Return the page with an overview inside; it connects to nothing."""
    return _page(encoded(overview), "'none'")


@functools.cache
def live_page() -> bytes:
    """Return the page without data; it asks the server that it came from."""
    return _page(_NOTHING, "'self'")


def policy(connections: Connections) -> str:
    """Return the Content-Security-Policy of the page, for a header.

    A browser heeds `frame-ancestors` in a header only, so the page itself does not have it.
    """
    return f"{_policy(connections)}; frame-ancestors 'none'"


def _policy(connections: Connections) -> str:
    return (
        f"default-src 'none'; script-src '{_hash('page.js')}'; style-src '{_hash('page.css')}'; "
        f"connect-src {connections}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _page(data: bytes, connections: Connections) -> bytes:
    parts = {
        b"{policy}": _policy(connections).encode(), b"{style}": _part("page.css"),
        b"{script}": _part("page.js"), b"{data}": data,
    }  # fmt: skip
    return _PLACE.sub(lambda place: parts[place[0]], _part("page.html"))


def _hash(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_part(name)).digest()).decode()


@functools.cache
def _part(name: str) -> bytes:
    return files(__package__).joinpath(name).read_bytes()
