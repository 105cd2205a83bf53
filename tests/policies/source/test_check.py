"""Source checks: tables of programs and what is found in them."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.policies.source.check import MAX_CHARACTERS, check, validate_code
from cellwright.policies.source.findings import Rules

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
    "__import__('os').system('x')": ["import: os@1:0", "builtin: __import__@1:0"],
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
    "def (": ["syntax: SyntaxError@1:5"],
}  # fmt: skip
NOTHING = [
    "1 + 1", "import json\njson.dumps(1)", "'import os; eval(1)'", "# import os", "import math as os\nos.sqrt(2)",
    "def evaluate(): pass", "x.system('y')", "self.open", "from . import os", "from .os import x", "class A:\n    def open(self): pass",
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
    assert check(code)


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


def test_what_is_too_long_is_not_looked_at() -> None:
    assert check("import os\n" + "#" * MAX_CHARACTERS) == ()


def test_the_seeds_form() -> None:
    told = validate_code('import socket; socket.connect(("evil.com", 80))', language="python")
    assert told["valid"] is False
    assert told["issues"][0]["pattern"] == "socket"
    assert told["issues"][0].keys() == {"pattern", "reason", "line"}
    assert validate_code("1 + 1", "python") == {"valid": True, "issues": []}
