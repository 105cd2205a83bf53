"""The results of each host: one file a host in results/, shown as a table in the main README.md and in full in ours;
and what a daemon takes on a small host, shown in harness/EDGE.md.

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
# What doctor tries besides layers: the host, its GPU, a daemon, the way out by name, and the interpreters of languages.
NOT_LAYERS = (
    "python", "kernel", "machine", "launcher", "egress", "gpu", "images", "languages", "daemon", "verdict",
    "bash", "javascript", "ruby", "sh", "typescript",
)  # fmt: skip

Result = dict[str, Any]


def keep(name: str, title: str, output: str) -> None:
    """Write what a survey, attacks or edge.py said to the host's file: the last line of `output` that is one.

    Each takes the place of the one before of its kind, and a survey of tests leaves one of features.
    """
    survey, attacks = _last("survey", output), _last("attacks", output)
    edge = _last("edge", output)
    if not (survey or attacks or edge):
        raise SystemExit(f"test-hosts: host {name}: the survey said nothing")
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    attacks = attacks or before.get("attacks", {})
    if before.get("tests"):
        before["tests"].setdefault("date", before["date"])
    titled = {"title": title} if survey else {}
    result = {"host": name, "title": title} | before | survey | titled | {"attacks": attacks}
    file.write_text(json.dumps(result | ({"edge": edge} if edge else {}), indent=2) + "\n")


def _last(word: str, output: str) -> Result:
    found = re.findall(rf"^{word}: (\{{.*\}})\s*$", output, re.MULTILINE)
    return dict(json.loads(found[-1])) if found else {}


def read_all() -> list[Result]:
    """Return the result of each host that was surveyed."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return [each for each in found if "findings" in each]


def table(results: list[Result]) -> str:
    """Return the tables: a line a host, a line a layer with what was tried, a line a refusal."""
    hosts = [
        f"| {each['host']} | {each['title']} | {each['kernel']}, {each['machine']} | {_tests(each)} "
        f"| {_features(each)} | {_attacks(each)} | {each['date']} |"
        for each in results
    ]
    names = [each["host"] for each in results]
    layers = [
        f"| `{layer}` | {proof} | " + " | ".join(_verdict(each, layer) for each in results) + " |"
        for layer, proof in _proofs(results).items()
    ]
    return "\n".join([
        "| host | what it is | kernel | tests | features | attacks | doctor |", "|---|---|---|---|---|---|---|",
        *hosts, "",
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
    return f"{_counts(tests)}{of}, {tests.get('date', result['date'])}"


def _features(result: Result) -> str:
    features = result.get("features")
    return f"{_counts(features)}, {features['date']}" if features else ""


def _counts(tests: Result) -> str:
    return f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"


def _attacks(result: Result) -> str:
    """Say what came of the payloads: those that we ended had run into a limit, as they are meant to."""
    if not (said := result.get("attacks")):
        return ""
    tried = said["contained"] + len(said["ended"]) + len(said["escaped"])
    return f"{tried} payloads, {len(said['escaped'])} escaped, {said['date']}"


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
        f"| {_features(each)} | {_attacks(each)} |"
        for each in results
    ]
    return "\n".join([
        "| host | kernel | tests passed, failed | features | attacks |", "|---|---|---|---|---|", *rows
    ])  # fmt: skip


def _passed(result: Result) -> str:
    tests = result["tests"]
    what = "all tests" if tests.get("of", "all") == "all" else "some tests"
    return f"{what}: {tests['passed']}, {tests['failed']}, {tests.get('date', result['date'])}"


def edge(_: list[Result]) -> str:
    """Return a table of what edge.py found on host g."""
    result = json.loads((FOLDER / "g.json").read_text())
    found = result["edge"]
    rows = [
        f"| {title} | {found[key]['pss'] / 1024:.1f} MiB | {found[key]['rss'] / 1024:.1f} MiB |"
        for key, title in _MEMORY.items()
    ]
    parts = ", ".join(
        f"{each['name']} {each['pss'] / 1024:.1f}" for each in found["idle"]["processes"]
    )
    times = " | ".join(
        f"{found[key]:.2f} s, {found[key] / found['python']:.1f} times `python3 -c pass`"
        for key in ("start", "call")
    )
    return "\n".join([
        f"| on {found['memory_mib']} MiB, {found['processors']} processor, {found['date']} | PSS | RSS |", "|---|---|---|",
        *rows, "", f"PSS of the processes of the first row, in MiB: {parts}.", "",
        "| start of the daemon, until it takes requests | a call by a new command, `cellwright run --connect` |",
        "|---|---|", f"| {times} |",
    ])  # fmt: skip


_MEMORY = {
    "idle": "an idle daemon with one policy, all its processes",
    "after_calls": "the same after three calls",
    "eight_ready": "the same with `--pool 8`, eight ready cells",
    "idle_with_extra_systemd": "the first with the extra `systemd`",
}


def written(document: str, tables: str) -> str:
    """Return `document` with `tables` between its two marks."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["keep"]:
        keep(*arguments[1:], sys.stdin.read())
        return
    for document, tables in TABLES.items():
        document.write_text(written(document.read_text(), tables(read_all())))


# Each document with a table of hosts, and what makes the table.
TABLES = {
    CHECKOUT / "README.md": brief,
    Path(__file__).with_name("README.md"): table,
    CHECKOUT / "harness/EDGE.md": edge,
}


if __name__ == "__main__":
    main(sys.argv[1:])
