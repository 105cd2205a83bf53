"""The results of each host: one file a host in results/, shown as a table in the main README.md and in full in ours.

python3 tests/hosts/results.py                    # write the table from the files
python3 tests/hosts/results.py keep NAME TITLE    # from a survey's output on standard input
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "results"
BEGIN, END = "<!-- hosts: written by tests/hosts/results.py -->", "<!-- hosts: end -->"
WORDS = {"PASS": "holds", "WARN": "missing", "FAIL": "fails"}
# What doctor tries besides layers: the host, a daemon, the way out by name, and the interpreters of languages.
NOT_LAYERS = (
    "python", "kernel", "machine", "launcher", "egress", "daemon", "verdict",
    "bash", "javascript", "ruby", "sh", "typescript",
)  # fmt: skip

Result = dict[str, Any]


def keep(name: str, title: str, output: str) -> None:
    """Write what a survey, or attacks, said to the host's file: the last line of `output` that is one.

    A survey takes the place of the one before, and so do attacks; neither that of the other.
    """
    survey, attacks = _last("survey", output), _last("attacks", output)
    if not survey and not attacks:
        raise SystemExit(f"test-hosts: host {name}: the survey said nothing")
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    attacks = attacks or before.get("attacks", {})
    result = {"host": name, "title": title} | (survey or before)
    file.write_text(json.dumps(result | {"attacks": attacks}, indent=2) + "\n")


def _last(word: str, output: str) -> Result:
    found = re.findall(rf"^{word}: (\{{.*\}})\s*$", output, re.MULTILINE)
    return dict(json.loads(found[-1])) if found else {}


def read_all() -> list[Result]:
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def table(results: list[Result]) -> str:
    """Return the tables: a line a host, a line a layer with what was tried, a line a refusal."""
    hosts = [
        f"| {each['host']} | {each['title']} | {each['kernel']}, {each['machine']} | {_tests(each)} "
        f"| {_attacks(each)} | {each['date']} |"
        for each in results
    ]
    names = [each["host"] for each in results]
    layers = [
        f"| `{layer}` | {proof} | " + " | ".join(_verdict(each, layer) for each in results) + " |"
        for layer, proof in _proofs(results).items()
    ]
    return "\n".join([
        "| host | what it is | kernel | tests | attacks | date |", "|---|---|---|---|---|---|", *hosts, "",
        f"| layer | proved by | {' | '.join(names)} |", "|---|---|" + "---|" * len(names), *layers,
        *_refusals(results),
    ])  # fmt: skip


def _refusals(results: list[Result]) -> list[str]:
    """Return what doctor says on hosts where nothing runs."""
    lines = [
        f"- `{result['host']}`: {finding['proof']}. Repair: {finding['repair']}"
        for result in results
        for finding in result["findings"]
        if (finding["layer"], finding["verdict"]) == ("launcher", "FAIL")
    ]
    return ["", "Where nothing runs, `cellwright doctor` says:", "", *lines] if lines else []


def _tests(result: Result) -> str:
    tests = result["tests"]
    of = "" if tests.get("of", "all") == "all" else f", of {tests['of']}"
    return f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped{of}"


def _attacks(result: Result) -> str:
    """Say what came of the payloads: those that we ended had run into a limit, as they are meant to."""
    if not (said := result.get("attacks")):
        return ""
    tried = said["contained"] + len(said["ended"]) + len(said["escaped"])
    return f"{tried} payloads, {len(said['escaped'])} escaped"


def _proofs(results: list[Result]) -> dict[str, str]:
    """Return layer -> what doctor tried, in doctor's order."""
    proofs: dict[str, str] = {}
    for result in results:
        for finding in result["findings"]:
            if finding["verdict"] == "PASS" and finding["layer"] not in NOT_LAYERS:
                proofs.setdefault(finding["layer"], finding["proof"])
    return proofs


def _verdict(result: Result, layer: str) -> str:
    """Return one word; where no launcher can be had nothing runs, and that is the word."""
    verdicts = {finding["layer"]: finding["verdict"] for finding in result["findings"]}
    return WORDS[verdicts[layer]] if layer in verdicts else "refuses"


def brief(results: list[Result]) -> str:
    """Return a table with a line a host."""
    rows = [
        f"| {each['host']}: {each['title']} | {each['kernel']}, {each['machine']} | {_passed(each)} "
        f"| {_attacks(each)} | {each['date']} |"
        for each in results
    ]
    return "\n".join([
        "| host | kernel | tests passed, failed | attacks | date |", "|---|---|---|---|---|", *rows
    ])  # fmt: skip


def _passed(result: Result) -> str:
    tests = result["tests"]
    what = "all tests" if tests.get("of", "all") == "all" else "some tests"
    return f"{what}: {tests['passed']}, {tests['failed']}"


def written(document: str, tables: str) -> str:
    """Return `document` with `tables` between its two marks."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["keep"]:
        keep(*arguments[1:], sys.stdin.read())
        return
    for folder, tables in TABLES.items():
        readme = folder / "README.md"
        readme.write_text(written(readme.read_text(), tables(read_all())))


# Each README with a table of hosts, and what makes the table.
TABLES = {CHECKOUT: brief, Path(__file__).parent: table}


if __name__ == "__main__":
    main(sys.argv[1:])
