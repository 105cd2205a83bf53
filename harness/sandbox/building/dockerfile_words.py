"""Words of a Dockerfile: quotes, escapes, and variables in the place of $NAME and ${NAME}.

They follow BuildKit's shell lexer.  A Dockerfile may be hostile: results and nesting are bounded.
"""

from collections.abc import Mapping

_MOST = 1 << 20  # characters of a result; variables could double it with every line
_DEEPEST = 20
_SPECIAL = "@*#?-$!0"


class LineError(Exception):
    """A line of a Dockerfile is invalid; `build_image` adds the name of the file."""

    def __init__(self, number: int, what: str, hint: str = "") -> None:
        super().__init__(number, what, hint)
        self.number, self.what, self.hint = number, what, hint


def split_words(text: str, escape: str) -> tuple[str, ...]:
    """Split at spaces outside quotes; quotes and escapes stay."""
    words, word, quote, at = [], "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'":
            word += text[at : at + 2] if at + 1 < len(text) else ""
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace():
            words += [word] if word else []
            word, at = "", at + 1
            continue
        word, at = word + char, at + 1
    return tuple([*words, word] if word else words)


def expand(
    text: str, variables: Mapping[str, str], escape: str, *, keeps_quotes: bool = False
) -> str:
    """Return `text` without quotes and escapes, and with variables replaced; an unknown one is empty.

    `keeps_quotes`: they mean themselves, as in a here-document.  Raises ValueError.
    """
    return _Expansion(text, variables, escape, keeps_quotes=keeps_quotes).until("", 0)


class _Expansion:
    def __init__(
        self, text: str, variables: Mapping[str, str], escape: str, *, keeps_quotes: bool
    ) -> None:
        self._text, self._variables, self._escape = text, variables, escape
        self._keeps_quotes = keeps_quotes
        self._at = 0

    def _next(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        return char

    def until(self, end: str, level: int) -> str:
        """Read to the character `end`, or to the end of the text."""
        if level > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} substitutions within each other")
        found, size = list[str](), 0
        while char := self._next():
            if char == end:
                return "".join(found)
            if char in "'\"" and self._keeps_quotes:
                piece = char
            elif char == "'":
                piece = self._single_quoted()
            elif char == '"':
                piece = self._double_quoted(level)
            elif char == "$":
                piece = self._variable(level)
            else:
                piece = self._next() if char == self._escape else char
            found.append(piece)
            size += len(piece)
            if size > _MOST:
                raise ValueError(f"it becomes longer than {_MOST} characters")
        if end:
            raise ValueError("a closing } is missing")
        return "".join(found)

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise ValueError("a closing ' is missing")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def _double_quoted(self, level: int) -> str:
        found = []
        while (char := self._next()) != '"':
            if not char:
                raise ValueError('a closing " is missing')
            if char == "$":
                found.append(self._variable(level))
                continue
            if char == self._escape and self._text[self._at : self._at + 1] in (
                '"', "$", self._escape,
            ):  # fmt: skip
                char = self._next()
            found.append(char)
        return "".join(found)

    def _variable(self, level: int) -> str:
        if self._text[self._at : self._at + 1] != "{":
            name = self._name()
            return self._variables.get(name, "") if name else "$"
        self._at += 1
        name, operator = self._name(), self._next()
        if not name or not operator:
            raise ValueError("bad substitution: ${ needs a name and }")
        value = self._variables.get(name)
        if operator == "}":
            return value or ""
        if operator == ":":
            value, operator = value or None, self._next()
        if operator not in ("-", "+", "?"):
            raise ValueError(f"unknown substitution ${{{name}{operator}...}}")
        word = self.until("}", level + 1)
        if operator == "?" and value is None:
            raise ValueError(f"{name}: {word or 'must be set'}")
        if operator == "+":
            return "" if value is None else word
        return word if value is None else value

    def _name(self) -> str:
        start = self._at
        first = self._text[start : start + 1]
        if first and first in _SPECIAL:
            self._at += 1
        else:
            is_number = first.isdigit()
            while (char := self._text[self._at : self._at + 1]) and (
                char.isdigit() if is_number else char.isalnum() or char == "_"
            ):
                self._at += 1
        return self._text[start : self._at]
