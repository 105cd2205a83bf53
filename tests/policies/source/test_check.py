"""Source checks: tables of programs and what is found in them."""

import ast
import contextlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cellwright.policies.source.check as checking
from cellwright.policies.source.check import MAX_CHARACTERS, check, validate_code
from cellwright.policies.source.findings import (
    BLOCKED_BUILTINS,
    BLOCKED_IMPORTS,
    MAX_FINDINGS,
    Finding,
    Rules,
)
from tests.conftest import ROOT

FOUND = {
    "import os; os.system('x')": ["import: os@1:0", "attribute: os.system@1:11"],
    "import os.path": ["import: os@1:0"],
    "import json, os": ["import: os@1:0"],
    "import os as o\no.system": ["import: os@1:0", "attribute: os.system@2:0"],
    "from os import system as s\ns('x')": ["import: os@1:0", "attribute: os.system@2:0"],
    "from os import path": ["import: os@1:0"],
    "from os import *": ["import: os@1:0"],
    "import os\no = os\no.system": ["import: os@1:0", "attribute: os.system@3:0"],
    "import os\ng = getattr(os, 'system')": ["import: os@1:0", "attribute: os.system@2:4"],
    "import os\ngetattr(os, 'sys' + 'tem')": ["import: os@1:0", "dynamic: getattr@2:0"],
    "import os\ngetattr(os, name)": ["import: os@1:0", "dynamic: getattr@2:0"],
    "eval('1')": ["builtin: eval@1:0"],
    "e = eval\ne('1')": ["builtin: eval@1:4", "builtin: eval@2:0"],
    "list(map(eval, x))": ["builtin: eval@1:9"],
    "open('x')": ["builtin: open@1:0"],
    "__import__('os').system('x')": ["import: os@1:0", "attribute: os.system@1:0", "builtin: __import__@1:0"],
    "__import__('o' + 's')": ["import: os@1:0", "builtin: __import__@1:0"],
    "__import__(x)": ["dynamic: __import__@1:0", "builtin: __import__@1:0"],
    "import importlib\nimportlib.import_module('socket')": [
        "import: importlib@1:0", "import: socket@2:0", "attribute: importlib.import_module@2:0",
    ],
    "().__class__.__bases__[0].__subclasses__()": ["dunder: __subclasses__@1:0", "dunder: __bases__@1:0"],
    "getattr(x, '__globals__')": ["dunder: __globals__@1:0"],
    "__builtins__['eval']": ["dunder: __builtins__@1:0"],
    "f = lambda: eval": ["builtin: eval@1:12"],
    "f'{eval}'": ["builtin: eval@1:3"],
    "@eval\ndef f(): pass": ["builtin: eval@1:1"],
    "[eval for _ in x]": ["builtin: eval@1:1"],
    "def f(x=eval): pass": ["builtin: eval@1:8"],
    "if (o := __import__('os')): o.system": [
        "import: os@1:9", "builtin: __import__@1:9", "attribute: os.system@1:28",
    ],
    "match x:\n    case 1: eval": ["builtin: eval@2:12"],
    "import \uff4f\uff53": ["import: os@1:0"],
    "async def f():\n    import socket": ["import: socket@2:4"],
    "import os, json\na, b = os, json\na.system": ["import: os@1:0", "attribute: os.system@3:0"],
    "import os.path\nos.path.join": ["import: os@1:0", "attribute: os.path.join@2:0"],
    "import os\nclass A:\n    def f(self): return os.system": ["import: os@1:0", "attribute: os.system@3:24"],
    "from importlib import import_module as i\ni('os').system": [
        "import: importlib@1:0", "import: os@2:0", "attribute: os.system@2:0", "attribute: importlib.import_module@2:0",
    ],
    "import json as j, importlib\nimportlib.import_module(j)": [
        "import: importlib@1:0", "dynamic: importlib.import_module@2:0", "attribute: importlib.import_module@2:0",
    ],
    "f'{__import__(\"os\")}'": ["import: os@1:3", "builtin: __import__@1:3"],
    "__import__(f'{1}')": ["dynamic: __import__@1:0", "builtin: __import__@1:0"],
    "getattr(getattr(x, '__self__'), 'eval')": ["dunder: __self__@1:8"],
    "print.__self__.eval": ["dunder: __self__@1:0"],
    "from operator import attrgetter as a\na('x.__globals__')(f)": ["dunder: __globals__@2:0"],
    "import operator\noperator.methodcaller(n)(f)": ["dynamic: operator.methodcaller@2:0"],
    "match f:\n    case object(__globals__=g): pass": ["dunder: __globals__@2:9"],
    "# -*- coding: utf-7 -*-\neval": ["builtin: eval@2:0"],
    "é = 'ß'; eval": ["builtin: eval@1:9"],
    "x = 1\r\né; eval\rü; eval": ["builtin: eval@2:3", "builtin: eval@3:3"],
    "'''é\n\x0c\u2028'''; eval": ["builtin: eval@2:7"],
    "while True:\n\tbreakpoint()": ["builtin: breakpoint@2:1"],
    # The same by another name: what a module imported itself, its twin in C, a function that does the same.
    "import tempfile\ntempfile._os.system": ["attribute: tempfile._os@2:0"],
    "import numpy as n\nn.os.system": ["attribute: numpy.os@2:0"],
    "from logging import os\nos.system": ["import: logging.os@1:0"],
    "import logging.handlers as h\nh.socket.AF_INET": ["attribute: logging.handlers.socket@2:0"],
    "import logging\ngetattr(logging, 'os')": ["attribute: logging.os@2:0"],
    "import operator\noperator.attrgetter('os.system')(x)": ["attribute: os@2:0"],
    "import posix\nposix.system": ["import: posix@1:0", "attribute: posix.system@2:0"],
    "__import__('_socket')": ["import: _socket@1:0", "builtin: __import__@1:0"],
    "import io\nio.open('x')": ["builtin: io.open@2:0"],
    "from codecs import open as o\no('x')": ["builtin: codecs.open@2:0"],
    "import pkgutil\npkgutil.resolve_name('os:system')": ["builtin: pkgutil.resolve_name@2:0"],
    "__loader__.load_module('x')": ["dunder: __loader__@1:0"],
    "__spec__.loader": ["dunder: __spec__@1:0"],
    "vars()['eval']": ["builtin: vars@1:0"],
    "def (": ["syntax: SyntaxError@1:4"],
    "x = '": ["syntax: SyntaxError@1:4"],
}  # fmt: skip
NOTHING = [
    "1 + 1", "import json\njson.dumps(1)", "'import os; eval(1)'", "# import os", "import math as os\nos.sqrt(2)",
    "def evaluate(): pass", "x.system('y')", "self.open", "from . import os", "from .os import x", "class A:\n    def open(self): pass",
    "getattr(x, 'name', None)", "from operator import attrgetter\nattrgetter('name')", "'\\d'", "1 is 1",
    "from operator import methodcaller\nmethodcaller('f', '__globals__')", "import xml.etree\nxml.etree.x",
    "match x:\n    case A(b=1): pass", "os = 1\nos.system", "error.__traceback__", "b'import os'", "f'import os'",
    "class os: pass", "'é'; x = 1",
    "import scipy.signal\nscipy.signal.butter", "from scipy import signal\nsignal.butter", "import io\nio.StringIO()", "x.os.y",
    "vars(x)", "import tempfile\ntempfile.mkdtemp()", "from typing import Any\nAny", "import pickle\npickle.dumps(1)",
    "getattr(x, 'name')", "x.__class__.__name__", "import osmosis", "",
]  # fmt: skip


@pytest.mark.parametrize("code", FOUND)
def test_what_is_blocked_is_found_where_it_is(code: str) -> None:
    found = [f"{each.rule}: {each.what}@{each.line}:{each.column}" for each in check(code)]
    assert found == FOUND[code]
    assert all(each.reason for each in check(code))


@pytest.mark.parametrize("code", NOTHING)
def test_what_only_looks_like_it_is_not(code: str) -> None:
    assert check(code) == ()


OTHER = {
    "bash": ("echo hi\ncurl x | sh", "curl", 2), "sh": ("eval $x", "eval", 1),
    "javascript": ("const c = require('child_process')", "require('child_process", 1),
    "js": ("eval ('1')", "eval (", 1), "ruby": ("system 'ls'", "system '", 1),
}  # fmt: skip


@pytest.mark.parametrize("language", OTHER)
def test_other_languages_have_a_few_patterns(language: str) -> None:
    code, what, line = OTHER[language]
    (finding, *_) = check(code, language)
    assert (finding.rule, finding.what, finding.line) == ("pattern", what, line)


def test_a_language_without_patterns_has_no_findings() -> None:
    assert check("whatever", "cobol") == ()


def test_the_lists_are_the_callers() -> None:
    own = Rules(blocked_imports=("mine",), blocked_builtins=("sorted",))
    assert [str(each) for each in check("import os, mine; sorted(eval)", rules=own)] == [
        "Blocked import: mine", "Blocked builtin: sorted",
    ]  # fmt: skip
    only = Rules(allowed_imports=("json", "os.path"))
    assert [str(each) for each in check("import json, os.path, math, os", rules=only)] == [
        "Blocked import: math", "Blocked import: os",
    ]  # fmt: skip


@settings(deadline=None)
@given(st.text(), st.sampled_from(["python", "bash", "javascript", "ruby", "x"]))
def test_no_text_makes_a_check_fail(code: str, language: str) -> None:
    check(code, language)


DEEP = ["(" * 10**5, "-" * 10**5 + "1", "f" + "()" * 50_000, "a" + ".b" * 50_000, "'a'" + "+'a'" * 20_000,
        "lambda:" * 20_000 + "1", "1 if 1 else " * 20_000 + "1", "__import__(" * 80 + "'os'" + ")" * 80]  # fmt: skip


@pytest.mark.parametrize("code", DEEP, ids=lambda code: code[:12])
def test_deep_nesting_is_a_finding_and_not_a_crash(code: str) -> None:
    assert check(code) or sys.version_info >= (3, 14)  # its parser takes some of them


@pytest.mark.parametrize(
    "code",
    ["import " + "a." * 100_000 + "b", "from " + "é·.\\\n" * 50_000 + "b import c"],
    ids=["import", "from"],
)
def test_a_name_of_very_many_parts_is_not_parsed(code: str) -> None:
    """CPython's parser would take gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [each.what for each in check(code)] == ["stack"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_a_name_of_many_parts_is_an_ordinary_one() -> None:
    assert [each.what for each in check("import os." + "a." * 200 + "b")] != ["stack"]


def test_a_thread_with_too_small_a_stack_does_not_try() -> None:
    """CPython's parser would crash there."""
    found: list[object] = []
    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.extend(check("-" * 10**5 + "2")))
        thread.start()
        thread.join(10)
    finally:
        threading.stack_size(before)
    assert [str(each) for each in found] == ["Blocked syntax: stack"]


def test_a_check_leaves_the_stack_size_of_the_embedding_process() -> None:
    """threading.stack_size() without an argument sets the default."""
    before = threading.stack_size(4 << 20)
    try:
        check("1 + 1")
        assert threading.stack_size(4 << 20) == 4 << 20
    finally:
        threading.stack_size(before)


def in_a_child(code: str, shell: str = "exec") -> int:
    """Run Python in a process of its own, started by `shell`; return its exit status."""
    child = subprocess.run(
        ["sh", "-c", f'{shell} "$0" -c "$1"', sys.executable, code],
        cwd=ROOT, timeout=60, check=False, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return child.returncode


ON_A_MEBIBYTE = """
import ast, sys, threading
from cellwright.policies.source.check import check
sys.setrecursionlimit(10**6)
threading.stack_size(1024 * 1024)
thread = threading.Thread(target=lambda: {}("a" + ".b" * 50_000))
thread.start()
thread.join()
"""
ON_A_SMALL_STACK = """
import ast
from cellwright.policies.source.check import check
{}("-" * 5900 + "1")
"""


@pytest.mark.parametrize(
    ("code", "shell"),
    [(ON_A_MEBIBYTE, "exec"), (ON_A_SMALL_STACK, "ulimit -s 256; exec")],
    ids=["recursion limit", "ulimit"],
)
def test_a_process_with_little_stack_survives_what_would_kill_it(code: str, shell: str) -> None:
    if sys.version_info < (3, 12):  # newer parsers stop by themselves
        assert in_a_child(code.format("ast.parse"), shell) == -signal.SIGSEGV
    assert in_a_child(code.format("check"), shell) == 0


def test_a_raised_recursion_limit_does_not_refuse_ordinary_programs() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        assert check("x = 1\n" * 1000) == ()
    finally:
        sys.setrecursionlimit(before)


def repeated(text: str) -> str:
    return text * (MAX_CHARACTERS // len(text))


# Each takes from four seconds to two minutes where one step of a check is not linear.
SLOW = {
    "attributes": ("python", repeated("a" + ".b" * 2900 + "\n")),
    "calls": ("python", repeated("f" + "()" * 900 + "\n")),
    "imports": ("python", "".join(f"import a{n}\n" for n in range(8000)) + "a.b\n" * 32_000),
    "a long name": ("python", "import " + "a" * 100_000 + " as a\n" + "a.b\n" * 40_000),
    "a long module": ("python", "from " + "a" * 100_000 + " import " + ",".join(["b"] * 80_000)),
    "columns": ("python", repeated("é;eval\n")),
    "fork bombs": ("bash", repeated(":(){" * 250 + "|" * 500 + "&" * 490 + "\n")),
}
IN_TIME = """
import resource
from tests.policies.source.test_check import SLOW
from cellwright.policies.source.check import check
language, code = SLOW[{!r}]
spent = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (int(spent.ru_utime + spent.ru_stime) + 3, -1))
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), -1))
assert "MemoryError" not in str(check(code, language))
"""


@pytest.mark.needs("real_cpu")
@pytest.mark.parametrize("name", SLOW)
def test_a_source_written_to_be_slow_is_not(name: str) -> None:
    """By caps on CPU time, three seconds, and memory, 256 MiB: each takes less than half, whatever
    the load."""
    assert in_a_child(IN_TIME.format(name)) == 0


def test_findings_are_capped_at_the_first_ones() -> None:
    found = check("x\neval\n" * 1000)
    assert [each.line for each in found] == list(range(2, 2 * MAX_FINDINGS + 1, 2))
    assert len(check("eval x\n" * 1000, "bash")) == MAX_FINDINGS
    (long,) = check("import os; os." + "a" * 10_000)[1:]
    assert len(long.what) <= 200


def test_padding_is_a_finding() -> None:
    (found,) = check("x = 1\n" + "#" * MAX_CHARACTERS)
    assert str(found) == f"Blocked size: more than {MAX_CHARACTERS} characters"
    assert check("x = 1\n" + "#" * (MAX_CHARACTERS - 6)) == ()


def test_a_second_sight_is_remembered_for_the_same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    judge = checking._check

    def look(code: str, language: str, rules: Rules) -> tuple[Finding, ...]:
        looked.append(code)
        return judge(code, language, rules)

    monkeypatch.setattr(checking, "_cache", checking._FindingsCache())
    monkeypatch.setattr(checking, "_check", look)
    code = "import os" + " " * 100_000
    assert check(code) == check(code) != ()
    assert len(looked) == 1
    assert check(code, rules=Rules(blocked_imports=())) == check(code, "bash") == ()
    assert len(looked) == 3


def test_what_is_remembered_is_bounded_and_safe_from_many_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "_cache", checking._FindingsCache())
    monkeypatch.setattr(checking, "_REMEMBERED", 8)
    with ThreadPoolExecutor(8) as pool:
        codes = [f"import os\n{n % 20}" for n in range(2000)]
        assert {len(found) for found in pool.map(check, codes)} == {1}
    assert len(checking._cache) == 8


class Finalized:
    """Garbage whose end runs Python, so that threads may change places while a tree is made."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(100))


@pytest.fixture
def restless() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


PARSED = "x = [" + "f(a.b, -c)," * 700 + "]"


def trouble_of(parse: Callable[[str], object]) -> list[str]:
    """Parse in four threads at a time; return what went wrong."""

    def attempt(number: int) -> str:
        Finalized()
        try:
            parse(f"{PARSED}\n{number}")
        except SystemError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        return list(filter(None, pool.map(attempt, range(40))))


@pytest.mark.usefixtures("restless")
def test_many_threads_may_check_at_a_time() -> None:
    """See gh-106905; seen with Debian 12's Python under load."""
    if sys.version_info[:2] == (3, 11):
        assert trouble_of(ast.parse)
    assert trouble_of(check) == []


@pytest.mark.usefixtures("restless")
def test_the_process_may_parse_while_a_check_does() -> None:
    stop = threading.Event()

    def parse_on() -> None:
        while not stop.is_set():
            Finalized()
            with contextlib.suppress(SystemError):
                ast.parse(PARSED)

    thread = threading.Thread(target=parse_on)
    thread.start()
    try:
        assert trouble_of(check) == []
    finally:
        stop.set()
        thread.join()


def test_what_is_on_the_default_lists_has_a_reason_of_its_own() -> None:
    own = Rules(blocked_imports=("mine",), blocked_builtins=("sorted",))
    mine, sort = check("import mine; sorted", rules=own)
    listed = [check(f"import {name}")[0] for name in BLOCKED_IMPORTS]
    listed += [check(name)[0] for name in BLOCKED_BUILTINS]
    assert mine.reason == sort.reason
    assert mine.reason not in {each.reason for each in listed}


def test_a_module_in_a_package_can_be_blocked_alone() -> None:
    rules = Rules(blocked_imports=("os.path",))
    for code in ("import os.path", "from os import path", "from os.path import join"):
        assert [str(each) for each in check(code, rules=rules)] == ["Blocked import: os.path"]
    assert check("import os; from os import sep", rules=rules) == ()
    assert check("from os import path", rules=Rules(allowed_imports=("os.path",))) == ()


@pytest.mark.parametrize(
    ("language", "code"),
    [("bash", "  # curl x"), ("ruby", "# eval"), ("javascript", "// eval(x)")],
)
def test_a_line_that_is_a_comment_is_passed_over(language: str, code: str) -> None:
    assert check(code, language) == ()
    assert check(code.strip(" #/"), language)


def test_a_fork_bomb_is_one() -> None:
    assert [each.reason for each in check(":(){ :|:& };:", "bash")] == ["a fork bomb"]


def test_the_seeds_form() -> None:
    told = validate_code('import socket; socket.connect(("evil.com", 80))', language="python")
    assert told["valid"] is False
    assert told["issues"][0]["pattern"] == "socket"
    assert told["issues"][0].keys() == {"pattern", "reason", "line"}
    assert validate_code("1 + 1", "python") == {"valid": True, "issues": []}
