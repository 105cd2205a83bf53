"""`TerminalFilter`: the escape sequences of a guest that a person's terminal may get.

A list of what is allowed: moving, drawing, colours, and modes that can be switched back.  Everything
else is dropped: sequences that a terminal answers with text, which the next program would read as if it
were typed (DA, DSR, DECRQSS, ENQ; CVE-2003-0063 and many since), that change the clipboard (OSC 52) or
the title, that print, and that move windows.
"""

import codecs
import re

_TOKEN = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)(?P<middle>[ -/]*)(?P<final>[@-~])"  # CSI
    r"|\x1b(?P<string>[\]PX^_])"  # OSC, DCS, SOS, PM, APC: up to the next terminator
    r"|\x1b(?P<short>[ -/]+[0-~]|(?![\[\]PX^_])[0-~])"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]+)"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f-\x9f])"
)
_STRING_END = re.compile(r"\x1b\\|[\x07\x18\x1a\x9c]|\x1b(?=[^\\])")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[ -/]*)?\Z")
_LONGEST = 256  # characters of one sequence
_CONTROLS = frozenset("\a\b\t\n\v\f\r\x0e\x0f")
_SHORT = frozenset(("7", "8", "=", ">", "D", "E", "H", "M", "(0", "(B", ")0", ")B"))
_PLAIN = frozenset("@ABCDEFGHIJKLMPSTXZ`abdefgmrsu")  # CSI with parameters of digits only
_DIGITS = re.compile(r"[0-9;:]*")
_SHAPE, _RESET = " q", "!p"  # DECSCUSR: the shape of the cursor; DECSTR: a soft reset
# DECSET: keys, reverse, origin, wrap, blinking, cursor, other screen, mouse, pasting
_MODES = frozenset(
    (1, 5, 6, 7, 12, 25, 47, 66, 1000, 1002, 1003, 1005, 1006, 1015, 1047, 1048, 1049, 2004)
)
_ON = frozenset((7, 12, 25))  # by default


class TerminalFilter:
    """Passes on the harmless part of a guest's output, which comes in pieces."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""  # the beginning of a sequence
        self._in_string = False
        self._changed: dict[int, bool] = {}  # modes that are not as they were

    def feed(self, data: bytes) -> bytes:
        """Return what of `data`, and of what came before it, may be written now."""
        text, passed, at = self._rest + self._decode(data), [], 0
        while at < len(text):
            if self._in_string:
                end = _STRING_END.search(text, at)
                if end is None:
                    at = len(text) - text.endswith("\x1b")
                    break
                at, self._in_string = end.end(), False
                if end[0] == "\x1b":  # another sequence, which ends the string
                    at -= 1
            elif token := _TOKEN.match(text, at):
                passed.append(self._passed(token))
                at = token.end()
            elif _UNFINISHED.match(text, at) and len(text) - at < _LONGEST:
                break
            else:
                at += 1  # an escape that begins nothing
        self._rest = text[at:]
        return "".join(passed).encode()

    def restore(self) -> bytes:
        """Return the sequences that undo the modes, colours and character sets of the guest."""
        modes = "".join(f"\x1b[?{n}{'h' if n in _ON else 'l'}" for n in self._changed)
        return f"\x0f\x1b(B\x1b[m{modes}".encode()

    def _passed(self, token: re.Match[str]) -> str:
        kind, value = token.lastgroup, token[0]
        if kind == "text":
            return value
        if kind == "control":
            return value if value in _CONTROLS else ""
        if kind == "short":
            return value if token["short"] in _SHORT else ""
        if kind == "string":
            self._in_string = True
            return ""
        return (
            value if self._is_harmless(token["parameters"], token["middle"], token["final"]) else ""
        )

    def _is_harmless(self, parameters: str, middle: str, final: str) -> bool:
        if parameters[:1] == "?" and final in "hl" and not middle:
            return self._notes_modes(parameters[1:], is_set=final == "h")
        if not _DIGITS.fullmatch(parameters):
            return False
        if middle:
            return middle + final in (_SHAPE, _RESET)
        return final in _PLAIN or (final in "hl" and parameters == "4")  # IRM: insert

    def _notes_modes(self, parameters: str, *, is_set: bool) -> bool:
        modes = parameters.split(";")
        if not all(mode.isdecimal() and mode.isascii() and int(mode) in _MODES for mode in modes):
            return False
        for mode in map(int, modes):
            if is_set == (mode in _ON):
                self._changed.pop(mode, None)
            else:
                self._changed[mode] = True
        return True
