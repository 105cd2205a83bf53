"""Pictures: what values show of themselves besides text, as in notebooks, and figures that are open."""

import contextlib
import io
import sys
import warnings
from typing import Any

from ..messages import CHARTS, MOST_PICTURES
from .charts import NumberedChart, charts, packed

# The methods that IPython calls (its documentation, "Rich display"), and what they return.
_METHODS = {
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_svg_": "image/svg+xml",
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
}
Pictures = tuple[tuple[str, bytes], ...]
_displayed: list[tuple[str, bytes]] = []  # since the last program ended


def display(*values: object) -> None:
    """Show values as the last one of a program is shown: their text on stdout, and their pictures."""
    for value in values:
        print(value if isinstance(value, str) else repr(value))  # noqa: T201 - the program's output
        _displayed.extend(_of_value(value))


def pictures(value: object, limit: int) -> Pictures:
    """Return (MIME type, content) of each, the first 64 and as many as fit into `limit` bytes, and then
    the data of charts; a method that fails gives none."""
    found = [*_displayed, *([] if value is None else _of_value(value))]
    _displayed.clear()
    numbered: list[NumberedChart] = []
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for drawn, data in _figures(pyplot):
            found.append(("image/png", drawn))
            numbered += [(len(found), chart) for chart in data]
    kept = []
    for mime, content in found[:MOST_PICTURES]:
        if (limit := limit - len(content)) < 0:
            break
        kept.append((mime, content))
    told = packed(numbered) if numbered and len(kept) < MOST_PICTURES else b""
    return (*kept, (CHARTS, told)) if told else tuple(kept)


def _of_value(value: object) -> list[tuple[str, bytes]]:
    found = []
    for name, mime in _METHODS.items():
        if method := getattr(type(value), name, None):
            with contextlib.suppress(Exception):  # the program's own code
                content = method(value)
                content = content[0] if isinstance(content, tuple) else content  # and metadata
                if isinstance(content, str | bytes):
                    found.append((mime, content.encode() if isinstance(content, str) else content))
    return found


def _figures(pyplot: object) -> list[tuple[bytes, list[dict[str, Any]]]]:
    """Return every open figure as PNG, with the data of its charts, and close it: it belongs to this
    program, not to the next."""
    found: list[tuple[bytes, list[dict[str, Any]]]] = []
    seen: list[warnings.WarningMessage] | None = None
    # The program may have done anything to both modules.  A warning, such as one of a font without a
    # character, would name our file and line.
    with contextlib.suppress(Exception), warnings.catch_warnings(record=True) as told:
        seen = told
        for number in pyplot.get_fignums():  # type: ignore[attr-defined]
            drawn, figure = io.BytesIO(), pyplot.figure(number)  # type: ignore[attr-defined]
            figure.savefig(drawn, format="png", bbox_inches="tight")
            data = charts(figure)  # the names of categories are there once it is drawn
            pyplot.close(number)  # type: ignore[attr-defined]
            found.append((drawn.getvalue(), data))
    with contextlib.suppress(Exception):  # the guest's to close, replace or delete
        sys.stderr.writelines(f"{each.category.__name__}: {each.message}\n" for each in seen or ())
    return found
