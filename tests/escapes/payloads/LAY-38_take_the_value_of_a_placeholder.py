"""A program must not get the value of a credential, of which it has a placeholder in SBXT_TOKEN.

`SBXT_KEY_PORT` is a port of `SBXT_KEY_NAME` whose server gets the value, and answers with the head of the
request that it got; `SBXT_KEY_SHA256` is the digest of the value.  Without them there is none.
"""

import base64
import contextlib
import glob
import hashlib
import json
import os
import re
import socket

NAME, OTHER = os.environ.get("SBXT_KEY_NAME", ""), os.environ.get("SBXT_NAME", "")
TOKEN = os.environ.get("SBXT_TOKEN", "")
PORT, WEB = (int(os.environ.get(f"SBXT_{each}_PORT", "0")) for each in ("KEY", "WEB"))
DIGEST = os.environ.get("SBXT_KEY_SHA256", "")
LENGTH = len(TOKEN)
HOST = f"Host: {NAME}:{PORT}"
WORD = base64.b64encode(f"me:{TOKEN}".encode()).decode()


def request(*headers: str, target: str = "/a", host: str = HOST, rest: str = "") -> str:
    return "\r\n".join([f"GET {target} HTTP/1.1", host, *headers, "", rest])


KEY = f"X-Key: {TOKEN}"
SENT = (
    request(KEY), request(f"Authorization: Basic {WORD}"), request(target=f"/{TOKEN}?{TOKEN}"),
    request(KEY, "Range: bytes=0-59"), request(KEY, "Range: bytes=60-"),
    request(KEY, "Accept-Encoding: gzip, br"), request(KEY, "Connection: X-Key"),
    request(KEY, "Connection: Upgrade", "Upgrade: websocket"),
    request(KEY, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    request(KEY) * 3, request(KEY, "Content-Length: 4", "Transfer-Encoding: chunked"),
    request(KEY, "Transfer-Encoding: chunked", rest=f"{LENGTH:x}\r\n{TOKEN}\r\n0\r\n\r\n"),
    request(KEY, target=f"http://{NAME}:{PORT}/a"), request(KEY, host="Host: other.example"),
    request(KEY, "Host: other.example"), request(f"X-Key:\r\n {TOKEN}"),
    f"CONNECT {OTHER}:{WEB} HTTP/1.1\r\n{HOST}\r\n{KEY}\r\n\r\n", f"PRI * HTTP/2.0\r\n{KEY}\r\n\r\n",
    *(request(KEY, f"X-Fill: {'x' * size}") for size in (60_000, 65_400, 65_500, 70_000)),
)  # fmt: skip


def answered(sent: str, name: str, port: int) -> bytes:
    found = b""
    with contextlib.suppress(OSError), socket.create_connection((name, port), 5) as sock:
        sock.sendall(sent.encode())
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            found += data
    return found


def forms(data: bytes) -> list[bytes]:
    """Return the data as it is, and what in it could be base64 or hexadecimal."""
    found = [data]
    for word in re.findall(rb"[A-Za-z0-9+/_-]{20,}", data):
        for start in range(4):
            part = word[start:].translate(bytes.maketrans(b"-_", b"+/"))
            with contextlib.suppress(ValueError):
                found.append(base64.b64decode(part[: len(part) // 4 * 4]))
    found += [
        bytes.fromhex(each.decode()) for each in re.findall(rb"(?:[0-9a-fA-F]{2}){20,}", data)
    ]
    return found


def is_there(data: bytes) -> bool:
    """Tell whether the value is in there."""
    return any(
        hashlib.sha256(text[start : start + LENGTH]).hexdigest() == DIGEST
        for text in forms(data)
        for start in range(len(text) - LENGTH + 1)
    )


def places() -> dict[str, bytes]:
    found = {name: value.encode() for name, value in os.environ.items()}
    for path in (
        *glob.glob("/proc/*/environ"),
        *glob.glob("/proc/*/cmdline"),
        *glob.glob("/etc/*"),
    ):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            found[path] = file.read(65536)
    return found


gained = []
if PORT:
    first = answered(SENT[0], NAME, PORT)
    if b"<GET /a" not in first:
        gained.append(f"SKIP: {NAME} is not reached either")
    got = {f"{number} {each[:60]}": answered(each, NAME, PORT) for number, each in enumerate(SENT)}
    own, other = f"{NAME}:{PORT}", f"{OTHER}:{WEB}"
    got["to another host"] = answered(
        request(KEY, target="/public/a").replace(own, other), OTHER, WEB
    )
    gained += [name for name, data in (got | places()).items() if is_there(data)]
print(json.dumps({"case": "LAY-38", "escaped": bool(gained), "detail": f"gained: {gained}"}))
