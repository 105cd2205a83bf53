"""Write VERDICTS.md: what each payload reported, ours and those of ../shared/attacks, by profile.

Run from the root of the checkout: python -m tests.escapes.verdicts [PAYLOAD...]

With names of payloads, such as LAY-01, it tries only these and leaves the other rows.

With --only PROFILE, before them, only that column is tried.  IMAGE is the profile `workshop` for root of an
image, which achieves by some payloads what it has over files of its own: "own".

With --line PROFILE nothing is written, and what came of all of them is said in one line of JSON, which
begins with `attacks: `: that is what scripts/test-hosts keeps of a host.  Exits with 1 if one escaped.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cellwright import Sandbox
from cellwright.policies.policy import Policy
from tests.conftest import with_limits
from tests.escapes.image_cells import OWN_TO_ROOT, ids_of, in_an_image, made_image
from tests.escapes.test_payloads import (
    NETWORKED,
    PAYLOADS,
    Host,
    case_of,
    credentials_of,
    policy_for,
    run,
    verdict_of,
)

IMAGE = "image"
PROFILES = ("strict", "standard", NETWORKED, IMAGE)
# Under `workshop` the limits are higher than these payloads expect, with an image and without.
_LARGER = ("RES-01", "RES-03", "RES-05", "RES-06", "RES-10")
_IMAGE_SAYS = """\
`image` is the profile `workshop` for root of an image: "own" is what it may do with its own files and ids, and
has been compared with that; "larger limits" are those of `workshop`, without an image too."""
TABLE = Path(__file__).with_name("VERDICTS.md")
_EMULATED_SECONDS = 240.0  # wall time on emulated processors, which are at least ten times slower


def verdicts(
    profile: str, host: Host, wall_seconds: float = 34.0, wanted: tuple[str, ...] = ()
) -> dict[str, str]:
    """Run every payload under `profile`, or those `wanted`; return case -> verdict in words."""
    chosen = [each for each in PAYLOADS if not wanted or case_of(each) in wanted]
    named = "workshop" if profile == IMAGE else profile
    policy = with_limits(policy_for(named, host), wall_seconds=wall_seconds, cpu_seconds=600.0)
    with _sandbox(profile, policy) as sandbox:

        def judged(payload: Path) -> tuple[str, str]:
            case = case_of(payload)
            result = run(sandbox, payload)
            escaped, detail = verdict_of(result, case)
            print(case, escaped, result.reason, ascii(detail)[:200], file=sys.stderr, flush=True)
            if escaped is None:
                return case, f"ended by us ({result.reason})"
            if escaped and profile == IMAGE and case in _LARGER:
                return case, "larger limits"
            if escaped and profile == IMAGE and re.fullmatch(OWN_TO_ROOT.get(case, ""), detail):
                return case, "own"
            return case, "ESCAPED" if escaped else "contained"

        with ThreadPoolExecutor(2) as pool:
            return dict(pool.map(judged, chosen))


@contextlib.contextmanager
def _sandbox(profile: str, policy: Policy) -> Iterator[Sandbox]:
    if profile == IMAGE:
        with tempfile.TemporaryDirectory() as place:
            image = made_image(Path(place), ids_of("root"))
            with in_an_image(ids_of("root"), image, policy) as sandbox:
                yield sandbox
    else:
        with Sandbox(policy=policy, credentials=credentials_of(policy)) as sandbox:
            yield sandbox


def main(arguments: list[str]) -> None:
    profiles = PROFILES
    if arguments[:1] == ["--only"]:
        profiles, arguments = (arguments[1],), arguments[2:]
    if arguments[:1] == ["--line"]:
        sys.exit(say(*arguments[1:]))
    wanted = tuple(arguments)
    if unknown := set(wanted) - set(map(case_of, PAYLOADS)):
        sys.exit(f"unknown payload: {', '.join(sorted(unknown))}")
    with contextlib.ExitStack() as stack:
        host = Host(stack)
        found = {profile: verdicts(profile, host, wanted=wanted) for profile in profiles}
    place = f"Linux {os.uname().release}, {os.uname().machine}, {time.strftime('%Y-%m-%d')}"
    head = f"# Verdicts\n\nWritten by `python -m tests.escapes.verdicts`: {place}.\n\n{_IMAGE_SAYS}\n\n"
    rows = so_far() if wanted or len(profiles) == 1 else {}
    for profile, cases in found.items():
        for case, verdict in cases.items():
            rows.setdefault(case, {})[profile] = verdict
    lines = [f"| {' | '.join(('payload', *PROFILES))} |", "|---" * (1 + len(PROFILES)) + "|"]
    for case, row in sorted(rows.items()):
        lines.append(f"| {' | '.join((case, *(row.get(each, '') for each in PROFILES)))} |")
    TABLE.write_text(head + "\n".join(lines) + "\n")


def so_far() -> dict[str, dict[str, str]]:
    """Return the verdicts of the table by payload and profile: those that are not tried anew stay."""
    lines = [line[2:-2].split(" | ") for line in TABLE.read_text().splitlines() if line[:2] == "| "]
    return {line[0]: dict(zip(lines[0][1:], line[1:], strict=False)) for line in lines[1:]}


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
