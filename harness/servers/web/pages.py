"""Pages for a browser: fixed content that is served without a token, so it holds no data of anybody.

A page asks the endpoints for data, with a token that its user gives it.
"""

from collections.abc import Mapping

from starlette.responses import Response

from ..http_server import App, Receive, Scope, Send

_HEADERS = {
    "cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
# No inline script or style: a page of several files, or one that names the hashes of its parts.
OWN_FILES_ONLY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(data: bytes, media_type: str, security_policy: str = OWN_FILES_ONLY) -> App:
    """Return an app that answers GET and HEAD with `data`; `security_policy` is its
    Content-Security-Policy."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = _HEADERS | {"content-security-policy": security_policy}
        if scope["method"] not in ("GET", "HEAD"):
            found = Response(status_code=405, headers=headers | {"allow": "GET, HEAD"})
        else:
            found = Response(data, 200, headers, media_type)
        await found(scope, receive, send)

    return answer


class PagesFirst:
    """ASGI middleware that answers the paths of pages itself."""

    def __init__(self, pages: Mapping[str, App], app: App) -> None:
        self._pages = pages
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the page of the exact path, else pass the request on."""
        is_page = scope["type"] == "http" and scope["path"] in self._pages
        app = self._pages[scope["path"]] if is_page else self._app
        await app(scope, receive, send)
