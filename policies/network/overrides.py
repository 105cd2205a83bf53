"""Headers and parameters by which servers take another request than the one that rules decide about.

Servers do not agree on names: CGI, WSGI and PHP make one variable of names that differ in case and in
other characters than letters and digits, so names are compared as those servers read them.
"""

import re
from collections.abc import Iterable

_OTHER = re.compile(r"[^a-z0-9]")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
# They frame a message or belong to its connection: the exact names are read, the others are not.
FRAMING = frozenset(
    (
        "connection", "content-length", "expect", "host", "http2-settings", "keep-alive",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    )
)  # fmt: skip
# Families: Forwarded (RFC 7239), X-Forwarded-*; X-Original-URL, -URI, -Host, -Method, X-Rewrite-URL
# (IIS, Symfony, Laminas, recipes for nginx); X-HTTP-Method, X-HTTP-Method-Override,
# X-HTTP-Host-Override, X-HTTP-Path-Override, X-HTTP-DestinationURL; X-Envoy-Original-Path.
_PREFIXES = (
    "forwarded", "x-envoy-original-", "x-forwarded", "x-http-", "x-original-", "x-override-",
    "x-rewrite-",
)  # fmt: skip
_SUFFIXES = ("-override",)
_OVERRIDES = frozenset(
    (
        # the method
        "-method", "x-method", "x-request-method", "x-requested-method", "x-rest-method",
        # the path; gunicorn takes SCRIPT_NAME and PATH_INFO of a proxy, Werkzeug's recipe X-Script-Name
        "path-info", "request-uri", "script-name", "uri", "url", "x-path", "x-path-info",
        "x-proxy-url", "x-real-url", "x-replaced-path", "x-request-uri", "x-request-url",
        "x-script-name", "x-uri", "x-url", "x-waws-unencoded-url",
        # host and scheme
        "front-end-https", "x-backend-host", "x-host", "x-proxy-host", "x-real-host", "x-scheme",
        "x-server-name", "x-url-scheme",
        # the client
        "cf-connecting-ip", "client-ip", "fastly-client-ip", "true-client-ip", "x-client-ip",
        "x-cluster-client-ip", "x-originating-ip", "x-real-ip", "x-remote-addr", "x-remote-ip",
    )
)  # fmt: skip
# A second path, of COPY and MOVE in WebDAV (RFC 4918, 10.3), and of copies in stores of objects.
_SECOND_PATHS = frozenset(("copy-source", "destination", "x-copy-from", "x-object-manifest"))
_COPIES = ("-copy-source",)  # x-amz-, x-ms-, x-goog-, x-oss-, x-cos-
_METHOD_PARAMETER = re.compile(
    r"-+method-*|-*x-(http-method|http-method-override|method-override)-*"
)


def canonical_header(name: str) -> str:
    """Return a name, in which everything but letters and digits is `-`, in lower case."""
    return _OTHER.sub("-", name.lower())


def overriding_header(names: Iterable[str]) -> str:
    """Return the first header by which servers may take another method, path, host or client than
    those of the request, or read its end elsewhere; empty if there is none."""
    return next(filter(_overrides, names), "")


def header_with_path(names: Iterable[str]) -> str:
    """Return the first header that names a second path, empty if there is none."""
    for name in names:
        canonical = canonical_header(name)
        if canonical in _SECOND_PATHS or canonical.endswith(_COPIES):
            return name
    return ""


def parameter_with_method(query: str) -> str:
    """Return the first parameter of a query by which servers may take another method, such as
    `_method`, empty if there is none."""
    for part in re.split("[?&;]", query):
        name = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), part.partition("=")[0])
        if _METHOD_PARAMETER.fullmatch(canonical_header(name)):
            return name
    return ""


def _overrides(name: str) -> bool:
    canonical = canonical_header(name)
    if canonical in FRAMING:
        return name.lower() != canonical
    return (
        canonical in _OVERRIDES or canonical.startswith(_PREFIXES) or canonical.endswith(_SUFFIXES)
    )
