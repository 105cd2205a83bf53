"""Suites by other authors, as data: suites/NAME.toml says how one is installed, run and read."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from cellwright.policies.profiles.loading import policy_of_data

from .outcomes import FORMS

HERE = Path(__file__).parent
UNSTABLE = "unstable"  # the rule of tests whose outcome varies without a cell, too


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Differences that are known, with the rule that makes them."""

    tests: str  # a regular expression for the whole name of a test
    rule: str  # a call of syscalls.toml, a field of a policy, a layer, or UNSTABLE
    reason: str


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One suite.  `prepare` runs once, as root, in the suite's folder.  `command` runs inside a cell and
    outside, with the same environment; there $SUITE is the suite's folder, which is read-only, $UNIT the
    unit, $RESULT a file for outcomes that are not printed, and the working directory is empty."""

    program: str
    selection: str  # selected part of the suite
    version: str  # a command that prints it
    command: str
    reads: str
    name: str = ""
    apt: tuple[str, ...] = ()
    source: str = ""  # a source package of Debian, which is unpacked into $SUITE/source
    pip: tuple[str, ...] = ()  # installed into $SUITE/venv
    python: str = "python3"  # the interpreter of that environment
    npm: tuple[str, ...] = ()
    prepare: str = ""
    patterns: Mapping[str, str] = {}
    units: str = ""  # a command that prints the units, one a line; each runs in a cell of its own
    seconds: int = 600  # time of each unit
    prepare_seconds: int = 3600
    policy: Mapping[str, Any] = {}
    expected: tuple[Expected, ...] = ()

    def expectation(self, test: str) -> Expected | None:
        return next((each for each in self.expected if _compiled(each.tests).fullmatch(test)), None)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def suite_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (HERE / "suites").glob("*.toml")))


def load_suite(name: str, folder: Path = HERE / "suites") -> Suite:
    data = tomllib.loads((folder / f"{name}.toml").read_text())
    suite = msgspec.structs.replace(msgspec.convert(data, Suite), name=name)
    assert suite.reads in FORMS, f"{name}: reads: unknown form {suite.reads!r}, known: {FORMS}"
    policy_of_data(policy_data(suite, Path("/nowhere")))
    for each in suite.expected:
        _compiled(each.tests)
    return suite


def policy_data(suite: Suite, folder: Path) -> dict[str, Any]:
    """Return the policy of a suite's cells: its own, which can also execute what lies in the folder."""
    data: dict[str, Any] = {"extends": "workshop", **suite.policy}
    processes = dict(data.get("processes", {}))
    processes["execute"] = [*processes.get("execute", ["+"]), str(folder)]
    limits = {
        "wall_seconds": suite.seconds, "cpu_seconds": 4 * suite.seconds, "output_bytes": "64M",
        "violations": 10_000_000, **data.get("limits", {}),
    }  # fmt: skip
    return data | {"processes": processes, "limits": limits}


def policy_words(suite: Suite) -> str:
    """Return the policy as the table shows it."""
    data = dict(suite.policy)
    words = [data.pop("extends", "workshop")]
    for section, fields in data.items():
        words += [f"{section}.{field} = {value}" for field, value in fields.items()] if isinstance(
            fields, Mapping
        ) else [f"{section} = {fields}"]  # fmt: skip
    return ", ".join(words)
