"""Failures, paths and envelopes of streams, which the services of the cell's part share."""

import contextlib
import itertools
import json
import os
import struct
from collections.abc import Iterator
from typing import Any

HOME = os.environ.get("HOME", "/workspace")
CHUNK = 64 * 1024
KEEPALIVE_SECONDS = 30.0
NUMBERS = itertools.count(1)  # of processes and watchers
STATUS = {
    "invalid_argument": 400, "unauthenticated": 401, "permission_denied": 403, "not_found": 404,
    "already_exists": 409, "resource_exhausted": 429, "unimplemented": 501, "internal": 500,
    "deadline_exceeded": 504,
}  # fmt: skip


class CallFailed(Exception):  # noqa: N818 - it becomes an answer
    """A call that fails, with a code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Turn the errors of the system into those of the protocol."""
    try:
        yield
    except FileNotFoundError as error:
        raise CallFailed("not_found", str(error)) from None
    except FileExistsError as error:
        raise CallFailed("already_exists", str(error)) from None
    except PermissionError as error:
        raise CallFailed("permission_denied", str(error)) from None
    except OSError as error:
        code = "resource_exhausted" if error.errno in (28, 122) else "invalid_argument"
        raise CallFailed(code, str(error)) from None


def path_of(given: Any) -> str:
    if not isinstance(given, str) or "\0" in given:
        raise CallFailed("invalid_argument", "path: must be text")
    if given == "~" or given.startswith("~/"):
        given = given[2:]
    return os.path.normpath(os.path.join(HOME, given))


def messages_of(body: bytes) -> list[dict[str, Any]]:
    """Return the messages in the envelopes of a request."""
    found = []
    while body:
        flags, size = struct.unpack_from(">BI", body)
        if not flags & 2:
            found.append(json.loads(body[5 : 5 + size] or b"{}"))
        body = body[5 + size :]
    return found
