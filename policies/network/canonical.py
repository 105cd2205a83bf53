"""Host names, paths and headers of requests in one canonical spelling, which no two servers read
differently: by it cellwright decides, records and dials.

A canonical name is ASCII, in lower case, without a trailing dot, and has at most 253 characters.
Addresses are never names, however they are written: programs disagree about `127.1`, `0x7f.1` and
`2130706433`.
"""

import re
from collections.abc import Iterable

_LONGEST = 253  # characters (RFC 1035, 2.3.4, without the root's dot)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# inet_aton(3) and browsers read a name as an IPv4 address if its last label is a number.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# Characters that IDNA 2003, which Python has, and IDNA 2008 encode differently: sharp s, final sigma.
_DISPUTED = "\u00df\u1e9e\u03c2"
_REASONS = {
    "[": "has brackets",
    "]": "has brackets",
    ":": "is a URL or an IPv6 address, or has a port",
    "%": "has a zone id or percent-encoding",
    "/": "has a slash",
    "\\": "has a backslash",
    "@": "has user information",
    "*": "has a wildcard",
}


class HostNameError(ValueError):
    """A text is not a host name; the message has the text and the reason."""


def canonical_name(text: str) -> str:
    """Return the canonical spelling of a host name; raises HostNameError.

    Names that are not ASCII are encoded by IDNA 2003 (Python's codec).  Names on which IDNA 2008
    differs are refused: write them in ASCII, as `xn--...`.
    """
    if len(text) > _LONGEST + 1:
        raise HostNameError(f"{text[:60]!a}...: is longer than {_LONGEST} characters")
    for character, reason in _REASONS.items():
        if character in text:
            raise HostNameError(f"{text!a}: {reason}")
    name = (text if text.isascii() else _encoded(text)).lower().removesuffix(".")
    if not name or len(name) > _LONGEST:
        raise HostNameError(f"{text!a}: must have from 1 to {_LONGEST} characters")
    labels = name.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise HostNameError(
                f"{text!a}: each part must have 1 to 63 letters, digits, '_' or '-', "
                "and no '-' at its ends"
            )
    if _NUMBER.fullmatch(labels[-1]):
        raise HostNameError(f"{text!a}: is an address, not a name")
    return name


def _encoded(text: str) -> str:
    """Return the ASCII form of a name (RFC 3490)."""
    import stringprep  # few names are not ASCII

    for character in text:
        if character in _DISPUTED:
            raise HostNameError(
                f"{text!a}: IDNA 2003 and IDNA 2008 encode {character!a} differently: write xn--..."
            )
        if stringprep.in_table_b1(character):
            raise HostNameError(f"{text!a}: has an invisible character, {character!a}")
    try:
        return text.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise HostNameError(f"{text!a}: cannot be encoded by IDNA: {error}") from None


# Paths of HTTP requests.
_LONGEST_PATH = 8192
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/%-]+")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
# `/`, and characters that some code pages of Windows turn into `/` or a backslash.
_SEPARATOR = re.compile("[/\\\\\u2044\u2215\u2216\u29f5\u29f8\u00a5\u20a9]")


class PathError(ValueError):
    """A path is invalid or ambiguous; the message has the path and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path[:60]!a}: {reason}")
        self.reason = reason


def canonical_path(path: str) -> str:
    """Return the canonical spelling of an absolute path without its query; raises PathError.

    Escaped letters, digits, `.`, `-`, `_` and `~` are decoded, as RFC 3986 6.2.2.2 says; other escapes
    get upper case. Refuses paths that servers and proxies read differently: dot segments, empty
    segments, slashes, backslashes, percent signs, semicolons and control characters that are escaped,
    and escapes that are not UTF-8.
    """
    if not path.startswith("/") or len(path) > _LONGEST_PATH:
        raise PathError(path, f"must begin with / and have at most {_LONGEST_PATH} characters")
    if not _PLAIN.fullmatch(path) or "%" in _ESCAPE.sub("", path):
        raise PathError(path, "has a character that must be escaped, or an invalid escape")
    found = _ESCAPE.sub(lambda escape: _decoded(path, escape[1]), path)
    if _has_dot_segment(found):
        raise PathError(path, "has a dot segment")
    if "//" in found:
        raise PathError(path, "has an empty segment")
    return found


def _has_dot_segment(path: str) -> bool:
    """Tell whether some server takes a segment of a canonical path for `.` or `..`.

    Servers fold characters such as the full-width dot (NFKC), cut parameters off, and remove spaces.
    Raises PathError for escapes that are not UTF-8, by which `%C0%AE` was a dot.
    """
    try:
        text = _ESCAPED.sub(
            lambda escape: bytes.fromhex(escape[1].decode()), path.encode()
        ).decode()
    except UnicodeDecodeError:
        raise PathError(path, "has escapes that are not UTF-8") from None
    readings = [text] if text.isascii() else [text, _folded(text)]
    segments = (segment for each in readings for segment in _SEPARATOR.split(each))
    return any(each.partition(";")[0].rstrip(" ") in (".", "..") for each in segments)


def _folded(text: str) -> str:
    """Return `text` by NFKC, with plain dots for those of names, without invisible characters."""
    import unicodedata  # few paths are not ASCII

    text = unicodedata.normalize("NFKC", text).replace("\u3002", ".")
    return "".join(each for each in text if unicodedata.category(each) != "Cf")


def _decoded(path: str, digits: str) -> str:
    code = int(digits, 16)
    character = chr(code)
    if code < 0x20 or code == 0x7F or character in "/\\%;":
        raise PathError(path, f"has an escaped {character!a}")
    return character if _UNRESERVED.fullmatch(character) else f"%{digits.upper()}"


# Headers and parameters that make servers execute another request than the rules decided about. CGI,
# WSGI and PHP map names that differ only in case and punctuation to one variable, so names are compared
# in that form.
_OTHER = re.compile(r"[^a-z0-9]")
# Headers that frame a message or belong to its connection; only their exact names are read.
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
    """Return the first header that may make servers use another method, path, host or client than
    the request's, or another end of it; empty if there is none."""
    return next(filter(_overrides, names), "")


def header_with_path(names: Iterable[str]) -> str:
    """Return the first header that names a second path, empty if there is none."""
    for name in names:
        canonical = canonical_header(name)
        if canonical in _SECOND_PATHS or canonical.endswith(_COPIES):
            return name
    return ""


def parameter_with_method(query: str) -> str:
    """Return the first parameter of a query that may make servers use another method, such as
    `_method`; empty if there is none."""
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
