"""Texts of schemas, made fit to stand in comments and docstrings: cut, and nothing in them unseen."""

from .hidden import visible


def prose(text: object, limit: int = 2000) -> str:
    """Return a text in lines, without what nobody sees, at most `limit` characters; "" for none."""
    if not isinstance(text, str):
        return ""
    lines = visible(text, limit * 2).replace("\t", " ").split("\n")
    return cut("\n".join(each.rstrip() for each in lines).strip(), limit)


def line(text: object, limit: int = 300) -> str:
    """Return a text in one line."""
    return cut(" ".join(prose(text, limit * 2).split()), limit)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
