"""The life of the E2B server, from start to signal."""

import sys
from collections.abc import Callable

import anyio

from ....policies.policy import Policy
from ...sandbox.sandbox import Sandbox
from ..descriptors import allow_descriptors
from ..http_server import listening, serve_http, url_of
from ..signals import until_signalled
from ..tokens import HttpSettings
from .app import e2b_app
from .sandboxes import E2bLimits, E2bSandboxes


def run(
    policy: Policy,
    open_sandbox: Callable[[Policy], Sandbox],
    place: HttpSettings,
    limits: E2bLimits,
) -> None:
    """Serve until a signal; then all sandboxes end."""
    anyio.run(until_signalled, lambda ending: _serve(policy, open_sandbox, place, limits, ending))


async def _serve(
    policy: Policy, open_sandbox: Callable[[Policy], Sandbox], place: HttpSettings, limits: E2bLimits,
    ending: anyio.Event,
) -> None:  # fmt: skip
    allow_descriptors()
    sandboxes = E2bSandboxes(policy, open_sandbox, limits)
    app = e2b_app(sandboxes, place.tokens, place.hosts, place.origins)
    with listening(place.host, place.port) as listener, anyio.CancelScope(shield=True):
        url = url_of(listener)
        _report(f"cellwright: serving E2B's interface under {policy.name}; for its clients:")
        _report(f"export E2B_API_URL={url} E2B_SANDBOX_URL={url}")
        if place.made:
            _report(f"export E2B_API_KEY={place.made}")
        try:
            await serve_http(app, listener, ending)
        finally:
            await sandboxes.close()


def _report(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
