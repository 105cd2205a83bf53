"""Options that the servers of programs share: the address, the tokens, the allowed names and origins,
and the number of sessions."""

import argparse
import logging
import sys
from collections.abc import Callable, Set

from ...policies.errors import PolicyError
from ...policies.policy import check_limit
from ..servers.owned_sessions import SessionLimits
from ..servers.tokens import HttpSettings, make_token, tokens_of
from ..text.terminal import harmless

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LAST_PORT = 65_535


def add_access(parser: argparse.ArgumentParser, variable: str, names: str) -> None:
    """Add --token-file, --remote and --origin; `names` says what a line of the file may be."""
    parser.add_argument(
        "--token-file", metavar="FILE",
        help=f"the tokens of HTTP clients, a line each: {names}; default the token in "
        f"{variable}, else a new one that is printed to stderr",
    )  # fmt: skip
    parser.add_argument(
        "--remote", action="append", default=[], metavar="NAME",
        help="accept clients from other hosts that call this host NAME; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--origin", action="append", default=[], metavar="URL",
        help="accept web pages from this origin; may be repeated; default none",
    )  # fmt: skip


def add_session_limits(parser: argparse.ArgumentParser) -> None:
    """Add --sessions and --session-idle."""
    defaults = SessionLimits()
    parser.add_argument(
        "--sessions", type=int, default=defaults.of_all, metavar="N",
        help="open sessions at most; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--session-idle", type=float, default=defaults.idle_seconds, metavar="S",
        help="seconds after which an idle session is closed; default %(default)g",
    )  # fmt: skip


def check_session_limits(options: argparse.Namespace) -> None:
    """Raise PolicyError naming the option whose value is invalid."""
    check_limit("--sessions", options.sessions, whole=True)
    check_limit("--session-idle", options.session_idle)


def http_settings(
    options: argparse.Namespace, option: str, address: str, variable: str,
    roles: Set[str] = frozenset(), make_token: Callable[[], str] = make_token,
) -> HttpSettings:  # fmt: skip
    """Return the address that `option` gave, the tokens, and the allowed names and origins.

    `roles` are those that a client may have.  `make_token` makes the token that is printed if none was
    given.  Raises PolicyError.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > _LAST_PORT:
        raise PolicyError(f"{option}: must be HOST:PORT, got {address!r}")
    if host not in _LOOPBACK and not options.remote:
        raise PolicyError(
            f"{option}: {host} is not a loopback address: other hosts could connect",
            "to allow that add --remote NAME, the name by which they call this host",
        )
    tokens, made = tokens_of(options.token_file, variable, roles, make_token)
    here = ["127.0.0.1", "localhost", "[::1]"] if host in _LOOPBACK else []
    return HttpSettings(
        host, int(port), tokens, made, (*here, *options.remote), tuple(options.origin)
    )


class _HarmlessFormatter(logging.Formatter):
    """Escapes hidden characters: a record may contain text of clients."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def log_to_stderr() -> None:
    """Write warnings of the server to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_HarmlessFormatter("cellwright: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
