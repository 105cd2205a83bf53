"""Options that several servers share, and what they open: the address with its tokens, names and
origins; sessions; cells and tools; what operators see; and the server of a model.
"""

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Set
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....policies.extras import how_to_install
from ....policies.policy import Policy, check_limit
from ....policies.privacy_rules import SOURCE_FORM
from ....runner.launching.spawn import Spawned
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings
from ...search.search import Model
from ...servers.client_quota import HttpSettings, make_token, tokens_of
from ...servers.services import SessionLimits
from ...text.terminal_text import harmless
from ...tools.registry import ToolRegistry
from ...user_data import named_source
from ..keeping.marked_files import register_marked
from ..options import backend_of, image_of
from ..package_options import packages_of_server

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ...agent.prompts import ChatModel

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LAST_PORT = 65_535


def add_access(parser: argparse.ArgumentParser, variable: str, names: str) -> None:
    """Add --token-file, --remote and --origin; `names` describes a line of the file."""
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


def add_tools(parser: argparse.ArgumentParser) -> None:
    """Add --registry, --tools and --languages, which `opened_cells` reads."""
    parser.add_argument(
        "--languages", metavar="FILE", help="a TOML file of further languages; default none"
    )
    parser.add_argument(
        "--registry", metavar="FILE",
        help="the file of created tools; default none: they are lost when the server ends",
    )  # fmt: skip
    parser.add_argument(
        "--tools", action="append", default=[], metavar="FILE",
        help="offer the functions that this Python file marks @tool; it runs on the host; may be "
        "repeated",
    )  # fmt: skip


@contextlib.contextmanager
def opened_cells(
    options: argparse.Namespace, policy: Policy, limits: SessionLimits, spawned: Spawned | None,
    audit: "AuditLog | None", model: Model | None = None,
) -> Iterator[tuple[Sandbox, ToolRegistry]]:  # fmt: skip
    """Open the cells and the tools that the options name, and close them at the end."""
    packages, store = packages_of_server(options, policy)
    host = HostSettings(
        spawned=spawned, pauses=limits.pauses, package_store=store, languages=options.languages,
        **backend_of(options),
    )  # fmt: skip
    with (
        Sandbox(
            policy=policy,
            pool=0,
            audit=audit or False,
            packages=packages,
            host=host,
            **image_of(options),
        ) as cells,
        ToolRegistry(options.registry, model=model) as registry,
    ):
        for file in options.tools:
            register_marked(registry, file)
        yield cells, registry


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


def require_web() -> None:
    """Raise PolicyError if the extra `web` is not installed."""
    if any(find_spec(each) is None for each in ("anyio", "starlette", "uvicorn")):
        raise PolicyError("the extra `web` is not installed", how_to_install("web"))


class _HarmlessFormatter(logging.Formatter):
    """Escapes hidden characters: a record may contain text of clients."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def log_to_stderr() -> None:
    """Write warnings of the server to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_HarmlessFormatter("cellwright: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


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
    from ...agent.model import ModelClient  # httpx2 takes 100 ms to import

    return ModelClient(options.model, options.model_name, key=key, context_tokens=context_tokens)
