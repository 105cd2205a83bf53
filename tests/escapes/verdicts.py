"""Write VERDICTS.md: what each payload reported, ours and those of ../shared/attacks, by profile.

Run from the root of the checkout: python -m tests.escapes.verdicts [PAYLOAD...]

With names of payloads, such as LAY-01, it tries only these and leaves the other rows.

With --line PROFILE nothing is written, and what came of all of them is said in one line of JSON, which
begins with `attacks: `: that is what scripts/test-hosts keeps of a host.  Exits with 1 if one escaped.
"""

import contextlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cellwright import Sandbox
from tests.conftest import with_limits
from tests.escapes.test_payloads import (
    NETWORKED,
    PAYLOADS,
    Host,
    case_of,
    policy_for,
    run,
    verdict_of,
)

TABLE = Path(__file__).with_name("VERDICTS.md")
_EMULATED_SECONDS = 240.0  # of wall time, where everything takes ten times as long and more


def verdicts(
    profile: str, host: Host, wall_seconds: float = 34.0, wanted: tuple[str, ...] = ()
) -> dict[str, str]:
    """Run every payload under `profile`, or those `wanted`; return case -> verdict in words."""
    chosen = [each for each in PAYLOADS if not wanted or case_of(each) in wanted]
    policy = with_limits(policy_for(profile, host), wall_seconds=wall_seconds, cpu_seconds=600.0)
    with Sandbox(policy=policy) as sandbox:

        def judged(payload: Path) -> tuple[str, str]:
            case = case_of(payload)
            result = run(sandbox, payload)
            escaped, detail = verdict_of(result, case)
            print(case, escaped, result.reason, ascii(detail)[:200], file=sys.stderr, flush=True)
            if escaped is None:
                return case, f"ended by us ({result.reason})"
            return case, "ESCAPED" if escaped else "contained"

        with ThreadPoolExecutor(2) as pool:
            return dict(pool.map(judged, chosen))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--line"]:
        sys.exit(say(*arguments[1:]))
    wanted = tuple(arguments)
    if unknown := set(wanted) - set(map(case_of, PAYLOADS)):
        sys.exit(f"unknown payload: {', '.join(sorted(unknown))}")
    with contextlib.ExitStack() as stack:
        host = Host(stack)
        found = {
            profile: verdicts(profile, host, wanted=wanted)
            for profile in ("strict", "standard", NETWORKED)
        }
    place = f"Linux {os.uname().release}, {os.uname().machine}, {time.strftime('%Y-%m-%d')}"
    head = f"# Verdicts\n\nWritten by `python -m tests.escapes.verdicts`: {place}.\n\n"
    rows = rows_so_far() if wanted else {}
    for case in found["strict"]:
        rows[case] = f"| {' | '.join((case, *(found[profile][case] for profile in found)))} |"
    title = ("payload", *found)
    lines = [f"| {' | '.join(title)} |", "|---" * len(title) + "|", *map(rows.get, sorted(rows))]
    TABLE.write_text(head + "\n".join(map(str, lines)) + "\n")


def rows_so_far() -> dict[str, str]:
    """Return the rows of the table by their payload: those that are not tried anew stay."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {line[2:].partition(" | ")[0]: line for line in lines[1:]}


def say(profile: str) -> bool:
    """Print what came of all payloads under `profile`; tell whether one escaped."""
    with contextlib.ExitStack() as stack:
        found = verdicts(profile, Host(stack), wall_seconds=_EMULATED_SECONDS)
    cases = sorted(found)
    said = {
        "date": time.strftime("%Y-%m-%d"),
        "profile": profile,
        "contained": sum(found[case] == "contained" for case in cases),
        "ended": [case for case in cases if found[case].startswith("ended")],
        "escaped": [case for case in cases if found[case] == "ESCAPED"],
    }
    print("attacks:", json.dumps(said), flush=True)
    return bool(said["escaped"])


if __name__ == "__main__":
    main(sys.argv[1:])
