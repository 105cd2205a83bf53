"""A request over plain HTTP must not name another one to its server than the one that a rule allowed.

`SBXT_WEB_PORT` is a port of `SBXT_NAME` on which a rule allows GET of /public/*; the server there answers
with the head of the request that it got.  Without it there is no way out.
"""

import contextlib
import json
import os
import re
import socket

NAME, PORT = os.environ.get("SBXT_NAME", ""), int(os.environ.get("SBXT_WEB_PORT", "0"))
HEADERS = (
    "X-HTTP-Method-Override: DELETE", "X_HTTP_Method_Override: DELETE", "X.HTTP.Method.Override: DELETE",
    "X-HTTP-Method: DELETE", "X-Method: DELETE", "_method: DELETE", "X-Original-URL: /secret", "X_Original_URL: /secret",
    "X~Rewrite~URL: /secret", "X-Override-URL: /secret", "Script_Name: /public", "Path-Info: /secret",
    "X-Forwarded-Host: other", "X_Forwarded_Host: other", "X-HTTP-Host-Override: other", "X-Host: other", "Forwarded: host=other",
    "Destination: /secret", "X-Amz-Copy-Source: /secret", "Content_Length: 40", "Transfer_Encoding: chunked",
)  # fmt: skip
TARGETS = (
    "/secret", "/public/../secret", "/public/%2e%2e/secret", "/public/..%2fsecret", "/public/..;/secret",
    "/public/%c0%ae%c0%ae/secret", "/public/%ef%bc%8e%ef%bc%8e/secret", "/public/..%ef%bc%8fsecret", "/public//../secret",
    "/public/%252e%252e/secret", "/public/..%20/secret", "/public/..%5csecret", "http://other/public/a", "/public/a?_method=DELETE",
    "/public/a?%5Fmethod=DELETE", "*",
)  # fmt: skip
HIDDEN = f"GET /secret HTTP/1.1\r\nHost: {NAME}:{PORT}\r\n\r\n"


def request(target: str = "/public/a", *headers: str, method: str = "GET", rest: str = "") -> str:
    lines = (f"{method} {target} HTTP/1.1", f"Host: {NAME}:{PORT}", *headers)
    return "\r\n".join([*lines, "", rest])


RAW = (
    request(method="DELETE"), request() + HIDDEN, request() * 2 + HIDDEN, request().replace(NAME, "other"),
    request(rest=HIDDEN).replace("\r\n\r\n", f"\r\nContent-Length: {len(HIDDEN)}\r\nTransfer-Encoding: chunked\r\n\r\n", 1),
    request("/public/a", "Content-Length: 0", f"Content-Length: {len(HIDDEN)}", rest=HIDDEN),
    request("/public/a", "Transfer-Encoding : chunked", rest="0\r\n\r\n" + HIDDEN),
    request("/public/a", "Transfer-Encoding:\x0bchunked", rest="0\r\n\r\n" + HIDDEN),
    request("/public/a", "X: a\rTransfer-Encoding: chunked"), request("/public/a", "X: a\nX-Host: other"),
    request("/public/a", "Host: other"), request("/public/a", " Host: other"), request().replace("1.1", "1.0", 1) + HIDDEN,
    request("/public/a", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk", rest=HIDDEN),
)  # fmt: skip


def answered(sent: str) -> str:
    """Return what the server got."""
    found = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((NAME, PORT), 5) as sock,
    ):
        sock.sendall(sent.encode("latin-1"))
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            found += data
    return found.decode("latin-1")


def is_other(found: str) -> bool:
    """Tell whether a server takes what it got, if anything, for another request than GET /public/a."""
    got = re.findall(r"<(.*?)>", found, re.DOTALL)
    names = {re.sub("[^A-Z0-9]", "_", line.partition(":")[0].upper())
             for head in got for line in head.split("\r\n")[1:] if line}  # fmt: skip
    lines = {head.partition("\r\n")[0] for head in got}
    return bool(names - {"HOST", "CONTENT_LENGTH", "TRANSFER_ENCODING", "CONNECTION", "X"}) or bool(
        lines - {"GET /public/a HTTP/1.1"}
    )


if PORT and "<GET /public/a" not in answered(request()):
    print(
        json.dumps(
            {"case": "LAY-28", "escaped": False, "detail": f"SKIP: {NAME} is not reached either"}
        )
    )
else:
    sent = [*(request("/public/a", each) for each in HEADERS), *map(request, TARGETS), *RAW]
    passed = [each for each in sent if PORT and is_other(answered(each))]
    print(json.dumps({"case": "LAY-28", "escaped": bool(passed), "detail": f"passed: {passed}"}))
