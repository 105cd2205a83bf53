"""`TerminalFilter`: the escape sequences of a guest that a person's terminal may get.

Allowed sequences: moving, drawing, colours, and modes that can be switched back. Everything else is
dropped: sequences that a terminal answers with text of a program's choice, which the next program would
read as if it were typed (DECRQSS, titles, ENQ; CVE-2003-0063 and many since), that change the clipboard
(OSC 52) or the title, that print, and that move windows.

Full-screen programs ask a terminal for its attributes, the cursor and its colours before they draw.
With `TerminalQuestions` these few questions are passed on: no answer to them holds text that a program
chose.  The caller must not let an answer arrive after the guest has ended.
"""

import codecs
import re
from collections import deque

_TOKEN = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)(?P<middle>[ -/]*)(?P<final>[@-~])"  # CSI
    r"|\x1b\](?P<colour>1[0-2]);\?(?:\x07|\x1b\\)"  # OSC: the colours of text, background, cursor
    r"|\x1b(?P<string>[\]PX^_])"  # OSC, DCS, SOS, PM, APC: up to the next terminator
    r"|\x1b(?P<short>[ -/]+[0-~]|(?![\[\]PX^_])[0-~])"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]+)"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f-\x9f])"
)
_STRING_END = re.compile(r"\x1b\\|[\x07\x18\x1a\x9c]|\x1b(?=[^\\])")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[ -/]*)?\Z")
_UNFINISHED_COLOUR = re.compile(r"\x1b\](?:1(?:[0-2](?:;(?:\?\x1b?)?)?)?)?\Z")
_LONGEST = 256  # characters of one sequence
_CONTROLS = frozenset("\a\b\t\n\v\f\r\x0e\x0f")
_SHORT = frozenset(("7", "8", "=", ">", "D", "E", "H", "M", "(0", "(B", ")0", ")B"))
_PLAIN = frozenset("@ABCDEFGHIJKLMPSTXZ`abdefgmrsu")  # CSI with parameters of digits only
_DIGITS = re.compile(r"[0-9;:]*")
_SHAPE, _RESET = " q", "!p"  # DECSCUSR: the shape of the cursor; DECSTR: a soft reset
# Sequences that undo insert mode, keypad, G1, tab stops (by DECST8C), the cursor's shape and the
# scrolling region. Changing the region moves the cursor, so the cursor is saved and restored.
_TABS = "\x1b[?5W"
_UNDOING = {
    "4h": "\x1b[4l", "\x1b=": "\x1b>", "\x1b)0": "\x1b)B", "\x1bH": _TABS, "g": _TABS,
    _SHAPE: "\x1b[0 q", "r": "\x1b7\x1b[r\x1b8",
}  # fmt: skip
# DECSET: keys, reverse, origin, wrap, blinking, cursor, other screen, mouse, pasting
_MODES = frozenset(
    (1, 5, 6, 7, 12, 25, 47, 66, 1000, 1002, 1003, 1005, 1006, 1015, 1047, 1048, 1049, 2004)
)
_ON = frozenset((7, 12, 25))  # modes that are on by default
_LONGEST_MODE = 4  # digits
# Queries: DA, secondary DA, DSR, cursor position. Their answers, and those about colours, hold numbers.
_QUESTIONS = {"c": "c", "0c": "c", ">c": ">c", ">0c": ">c", "5n": "n", "6n": "R"}
_ANSWER = re.compile(
    rb"\x1b(?:\[(?P<mark>[?>]?)[0-9;]{1,64}(?P<final>[cnR])"
    rb"|\](?P<colour>1[0-2]);[0-9A-Za-z:/#]{1,64}(?:\x07|\x1b\\))"
)
_MOST_ASKED = 64


class TerminalQuestions:
    """The questions that a terminal was asked and has not answered, the oldest first.

    A terminal answers in order, so an answer also ends earlier questions, which some terminals do not
    know.
    """

    def __init__(self) -> None:
        self._asked: deque[str] = deque()
        self._rest = b""  # the end of the input, which may be the beginning of an answer

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, kind: str) -> bool:
        """Note a question; return False if so many wait that it must not be asked."""
        if len(self._asked) < _MOST_ASKED:
            self._asked.append(kind)
            return True
        return False

    def read(self, data: bytes) -> None:
        """Look for answers in the terminal's input."""
        if not self._asked:
            self._rest = b""
            return
        self._rest += data
        end = 0
        for found in _ANSWER.finditer(self._rest):
            end = found.end()
            mark, final, colour = found["mark"], found["final"], found["colour"]
            kind = (colour or (b">c" if mark == b">" else final)).decode()
            while kind in self._asked and self._asked.popleft() != kind:
                pass
        self._rest = self._rest[end:][-_LONGEST:]


class TerminalFilter:
    """Passes on the harmless part of a guest's output, which comes in pieces.

    `questions` are noted there and passed on too; default none are.
    """

    def __init__(self, questions: TerminalQuestions | None = None) -> None:
        self._questions = questions
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""  # the beginning of a sequence
        self._in_string = False
        self._changed: dict[int, bool] = {}  # changed modes
        self._undoing: dict[str, None] = {}  # sequences that undo changes

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data`, and of held data, that may be written now."""
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
            elif _UNFINISHED_COLOUR.match(text, at):
                break
            elif token := _TOKEN.match(text, at):
                passed.append(self._passed(token))
                at = token.end()
            elif _UNFINISHED.match(text, at) and len(text) - at < _LONGEST:
                break
            else:
                at += 1  # an escape that begins no sequence
        self._rest = text[at:]
        return "".join(passed).encode()

    def restore(self) -> bytes:
        """Return the sequences that undo the modes, colours and character sets of the guest."""
        modes = "".join(f"\x1b[?{n}{'h' if n in _ON else 'l'}" for n in self._changed)
        return f"{modes}{''.join(self._undoing)}\x0f\x1b(B\x1b[m".encode()

    def resume(self) -> bytes:
        """Return the sequences that set the modes of the guest again, after `restore`."""
        return "".join(f"\x1b[?{n}{'l' if n in _ON else 'h'}" for n in self._changed).encode()

    def _passed(self, token: re.Match[str]) -> str:
        kind, value = token.lastgroup, token[0]
        if kind == "text":
            return value
        if kind == "control":
            return value if value in _CONTROLS else ""
        if kind == "short":
            return self._undoable(value, value) if token["short"] in _SHORT else ""
        if kind == "colour":
            return value if self._may_ask(token["colour"]) else ""
        if kind == "string":
            self._in_string = True
            return ""
        parameters, end = token["parameters"], token["middle"] + token["final"]
        if self._is_harmless(parameters, token["middle"], token["final"]):
            return self._undoable(value, parameters + end if end == "h" else end)
        asked = _QUESTIONS.get(value.removeprefix("\x1b["))
        return value if asked and self._may_ask(asked) else ""

    def _may_ask(self, kind: str) -> bool:
        return self._questions is not None and self._questions.ask(kind)

    def _undoable(self, sequence: str, kind: str) -> str:
        """Return an allowed sequence, and record the sequence that undoes it."""
        if undoing := _UNDOING.get(kind):
            self._undoing[undoing] = None
        return sequence

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
        if not all(_is_mode(each) for each in modes):
            return False
        for mode in map(int, modes):
            if is_set == (mode in _ON):
                self._changed.pop(mode, None)
            else:
                self._changed[mode] = True
        return True


def _is_mode(text: str) -> bool:
    """Tell whether `text`, of any length, is the number of a mode that may be changed."""
    return (
        len(text) <= _LONGEST_MODE and text.isascii() and text.isdecimal() and int(text) in _MODES
    )
