"""Write VERDICTS.md: what each payload of ../shared/attacks reported, under each shipped profile.

Run from the root of the checkout: python -m tests.escapes.verdicts
"""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from cellwright import Sandbox
from tests.conftest import policy_named
from tests.escapes.test_payloads import ATTACKS, Host, settings_for, verdict_of

TABLE = Path(__file__).with_name("VERDICTS.md")


def verdicts(profile: str) -> dict[str, str]:
    """Run every payload under `profile`; return case -> verdict in words."""
    policy = policy_named(profile)
    limits = msgspec.structs.replace(policy.limits, wall_seconds=34.0, cpu_seconds=60.0)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits)) as sandbox:

        def run(payload: Path) -> tuple[str, str]:
            case = payload.name.partition("_")[0]
            timeout = 7.0 if case in ("RES-14", "RES-15") else None
            header = f"import os; os.environ.update({settings_for(sandbox)!r})\n"
            result = sandbox.execute(header + payload.read_text(), timeout=timeout)
            escaped, _ = verdict_of(result, case)
            if escaped is None:
                return case, f"ended by us ({result.reason})"
            return case, "ESCAPED" if escaped else "contained"

        with ThreadPoolExecutor(2) as pool:
            return dict(pool.map(run, ATTACKS))


def main() -> None:
    with contextlib.ExitStack() as stack:
        Host(stack)
        found = {profile: verdicts(profile) for profile in ("strict", "standard")}
    place = f"Linux {os.uname().release}, {os.uname().machine}, {time.strftime('%Y-%m-%d')}"
    head = f"# Verdicts\n\nWritten by `python -m tests.escapes.verdicts`: {place}.\n\n"
    rows = [["payload", *found], ["---"] * (len(found) + 1)]
    rows += [
        [case, *(found[profile][case] for profile in found)] for case in sorted(found["strict"])
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    TABLE.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
