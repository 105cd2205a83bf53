"""Idioms of notebooks and chats in Python programs: code fences, `!ls`, `%pip install`.  Pure.

No text that begins with a code fence is Python, so a fence around a whole program is removed.  Nor is a
program whose first statement is indented; its indentation is removed, as IPython does.  Other idioms
stay: the program fails with a SyntaxError, and its result says what to use instead.
"""

import re
import shlex
from collections.abc import Iterator

from ....policies.languages import PYTHON, language_called
from ....policies.policy import Policy

_FENCE = "```"
_IPYTHON = ("ipython", "ipython3")
_MOST_NOTICES, _MOST_NAMES, _SHOWN = 5, 20, 80
_MOST_READ, _MOST_SAID = 1 << 20, 2000  # characters of a program, and of one line
_LINE = re.compile(
    r"^[ \t]*+(?:[\w.]{1,80}[ \t]*+=[ \t]*+)?(?P<all>"
    r"!+(?P<shell>[^\n]*)"
    r"|%%?(?P<magic>\w+)(?P<rest>[^\n]*)"
    r"|(?P<bare>(?:python3? -m )?(?:pip3?|conda) install\b[^\n]*)"
    r"|(?P<object>\?{1,2}[\w.]{1,80}|[\w.]{1,80}\?{1,2})[ \t]*$"
    r")",
    re.MULTILINE,
)
_INSTALL = re.compile(r"(?:python3? -m |uv )?(?:pip3?|conda|mamba)(?: install| add)\b(?P<names>.*)")
_FIRST_STATEMENT = re.compile(r"(?:[ \t\f]*+(?:#[^\n]*+)?\r?\n)*+(?P<indent>[ \t]*+)(?=[^\s#])")
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,99})(?:\[[\w,. -]{0,99}\])?[ \w.,<>=!~*+-]{0,99}", re.ASCII
)
_IN_PYTHON = {
    "cat": "open(...).read()",
    "cd": "os.chdir(...)",
    "cp": "shutil.copy(...)",
    "ls": "os.listdir()",
    "mkdir": "os.makedirs(...)",
    "mv": "os.rename(...)",
    "pwd": "os.getcwd()",
    "rm": "os.remove(...)",
}
_LEAVE_OUT = "leave the line out"
_MAGICS = {
    "autoreload": _LEAVE_OUT,
    "config": _LEAVE_OUT,
    "env": "use os.environ[...], or pass variables with env= (--env)",
    "file": "write the file with open(..., 'w'), or pass it with files= (--file)",
    "load_ext": _LEAVE_OUT,
    "matplotlib": f"{_LEAVE_OUT}: figures that are open when a program ends become artifacts",
    "run": "use runpy.run_path(...)",
    "time": "use time.perf_counter()",
    "timeit": "use timeit.timeit(...)",
    "writefile": "write the file with open(..., 'w'), or pass it with files= (--file)",
}
_SUBPROCESSES = " under a policy that allows subprocesses, such as standard (--policy standard)"


def without_fence(code: str) -> tuple[str, str]:
    """Return a program without the code fence around it, and a notice about that; both unchanged and
    empty if there is no complete fence, or it names another language."""
    opening, _, rest = code.strip().partition("\n")
    inside, _, closing = rest.rpartition("\n")
    ticks, word = _opening(opening)
    is_closed = len(closing.strip()) >= ticks and not closing.strip().strip("`")
    if not (is_closed and inside.strip() and _is_python(word)):
        return code, ""
    shown = _shown(opening)
    return inside + "\n", f"the program was taken out of its code fence: line 1 follows {shown}"


def without_indent(code: str) -> str:
    """Return a program without the indentation of its first statement, as IPython does: each line that
    has it loses it, and all lines keep their numbers."""
    first = _FIRST_STATEMENT.match(code)
    indent = first["indent"] if first else ""
    return re.sub(f"^{indent}", "", code, flags=re.MULTILINE) if indent else code


def _opening(line: str) -> tuple[int, str]:
    """Return how many backticks a line begins with, and the first word after them."""
    word = line.lstrip("`")
    return len(line) - len(word), next(iter(word.split()), "")


def _is_python(word: str) -> bool:
    word = word.lower()
    return not word or word in _IPYTHON or language_called(word) == PYTHON


def has_idioms(code: str) -> bool:
    """Tell whether a line of a program looks like a command of IPython."""
    return _LINE.search(code[:_MOST_READ]) is not None


def notices_of(code: str, policy: Policy) -> tuple[str, ...]:
    """Return what to use instead of the idioms in a program that is not Python; for people and models,
    made from the words of the program."""
    if code.lstrip().startswith(_FENCE):
        return (_about_fence(code),)
    found = []
    for line in _LINE.finditer(code[:_MOST_READ]):
        number = code.count("\n", 0, line.start("all")) + 1
        found.append(f"line {number}: {_shown(line['all'].strip())}: {_instead(line, policy)}")
        if len(found) == _MOST_NOTICES:
            break
    return tuple(found)


def _about_fence(code: str) -> str:
    _, word = _opening(code.lstrip().partition("\n")[0])
    language = language_called(word.lower())
    if language and language != PYTHON:
        return (
            f"the program is a code block of {language}: pass its code with language={language!r} "
            f"(--language {language})"
        )
    return "the program is not one complete code block: pass only its code"


def _instead(line: re.Match[str], policy: Policy) -> str:
    if line["object"]:
        return f"use help({line['object'].strip('?.')})"
    magic = line["magic"] or ""
    said = line["shell"] or line["bare"] or f"{magic}{line['rest']}"
    if install := _INSTALL.match(said.strip()):
        return _packages(install["names"], policy)
    if line["shell"] is not None:
        return _command(said, policy)
    language = language_called(magic)
    if language and line["all"].startswith("%%"):
        return f"pass the other lines as a program with language={language!r}"
    if magic in _IN_PYTHON:
        return f"use {_IN_PYTHON[magic]}"
    return _MAGICS.get(magic, f"programs have no commands of IPython: {_LEAVE_OUT}")


def _command(said: str, policy: Policy) -> str:
    name = next(iter(said.split()), "")
    ways = "subprocess.run([...]), session.run(...) or language='bash'"
    if not policy.processes.subprocesses:
        ways += _SUBPROCESSES
    instead = f"{_IN_PYTHON[name]}, or " if name in _IN_PYTHON else ""
    return f"a program has no shell: use {instead}{ways}"


def _packages(said: str, policy: Policy) -> str:
    """Return which packages to ask for, as far as the policy allows them."""
    if "-r " in said:
        return (
            "a program installs nothing: pass the file as packages=Path(...) to Sandbox "
            "(--packages FILE)"
        )
    wanted = dict.fromkeys(_requirements(said))
    there = {_normalised(each) for each in policy.packages.require}
    allowed = {_normalised(each) for each in policy.packages.allow}
    missing = [each for each in wanted if _normalised(each) not in there]
    if wanted and not missing:
        return f"leave the line out: {', '.join(wanted)} can be imported"
    refused = [each for each in missing if allowed and _normalised(each) not in allowed]
    asked = [each for each in missing if each not in refused]
    parts = []
    if asked or not missing:
        options = "".join(f" --packages {shlex.quote(each)}" for each in asked) or " --packages"
        named = repr(asked) if asked else "[...]"
        parts.append(f"pass packages={named} to Sandbox ({options.strip()})")
    if refused:
        names = ", ".join(policy.packages.allow[:_MOST_NAMES])
        parts.append(f"packages.allow of the policy lacks {', '.join(refused)}, it has {names}")
    return f"a program installs nothing: {'; '.join(parts)}"


def _requirements(said: str) -> Iterator[str]:
    try:
        words = shlex.split(said[:_MOST_SAID], comments=True)
    except ValueError:  # a quote is missing
        words = said[:_MOST_SAID].split()
    found = [each for each in words if _REQUIREMENT.fullmatch(each)]
    yield from found[:_MOST_NAMES]


def _normalised(requirement: str) -> str:
    """Return the name in a requirement, in its one form (PEP 503)."""
    name = _REQUIREMENT.match(requirement)
    return re.sub(r"[-_.]+", "-", name["name"] if name else requirement).lower()


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
