"""Bundles of MIME types that are safe to show: a notebook executes the scripts of its outputs.

A page of Jupyter may start kernels without a sandbox: a script in an output would be an escape.
HTML and SVG are shown in a frame that has no origin and runs no script; what pages would interpret
otherwise (Markdown, LaTeX, JavaScript, widgets) is shown as text or left out.
"""

import base64
import html
import re
from collections.abc import Mapping
from typing import Any

_LINE_PIXELS, _LEAST_PIXELS, _MOST_PIXELS = 26, 60, 600
_LINES = re.compile(r"<(?:tr|br|p|li|h[1-6]|div)\b|\n\n", re.IGNORECASE)
_AS_TEXT = ("text/markdown", "text/latex")
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MOST_CHARACTERS = 16 * 1024 * 1024
# No request leaves the frame: pictures and styles only from the document itself.
_CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:"


def safe_bundle(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a bundle that a notebook can show without executing anything."""
    shown: dict[str, Any] = {}
    for mime in _AS_TEXT:
        if isinstance(given.get(mime), str) and "text/html" not in given:
            shown["text/plain"] = given[mime]
    if isinstance(given.get("text/plain"), str):
        shown.setdefault("text/plain", given["text/plain"])
    for mime in _PICTURES:
        if isinstance(content := given.get(mime), str) and _is_base64(content):
            shown[mime] = content
    if isinstance(given.get("application/json"), dict | list):
        shown["application/json"] = given["application/json"]
    for mime in ("text/html", "image/svg+xml"):
        if isinstance(content := given.get(mime), str) and "text/html" not in shown:
            shown["text/html"] = framed(content)
    return shown


def picture_bundle(mime: str, data: bytes) -> dict[str, Any]:
    """Return the bundle of a picture that a program made."""
    return safe_bundle({mime: text_of(mime, data)})


def text_of(mime: str, data: bytes) -> str:
    """Return the content of a type as bundles have it: binary ones in base64."""
    if mime in _PICTURES:
        return base64.b64encode(data).decode()
    return data.decode("utf-8", "replace")


def framed(content: str) -> str:
    """Return HTML that shows `content` in a frame without scripts, forms, origin or network."""
    lines = 1 + len(_LINES.findall(content[:1_000_000]))
    height = 400 if "<svg" in content[:1000] else lines * _LINE_PIXELS
    pixels = max(_LEAST_PIXELS, min(_MOST_PIXELS, height))
    page = (
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">'
        "<style>body{font:13px sans-serif;margin:4px;background:#fff;color:#000}"
        "table{border-collapse:collapse}td,th{padding:3px 8px;text-align:right}</style>"
    )
    return (
        f'<iframe sandbox="" referrerpolicy="no-referrer" srcdoc="{html.escape(page + content)}" '
        f'style="width:100%;height:{pixels}px;border:0;resize:vertical"></iframe>'
    )


def _is_base64(content: str) -> bool:
    try:
        base64.b64decode(content[:_MOST_CHARACTERS], validate=True)
    except ValueError:
        return False
    return len(content) <= _MOST_CHARACTERS
