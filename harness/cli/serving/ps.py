"""`cellwright ps`: lists the sandboxes and sessions of this user's processes with their usage."""

import argparse
import sys

from ....runner.launching.living import Living, list_living, use_of
from ...text.terminal_text import harmless, print_header
from ..options import SUCCEEDED, add_json, print_json

_MIB = 1024 * 1024


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    rows = [_row(living) for living in list_living() if living.record.process.is_alive()]
    if options.json:
        print_json(rows)
        return SUCCEEDED
    if not rows:
        print("cellwright: nothing lives", file=sys.stderr)
        return SUCCEEDED
    columns = f"{'ID':<14} {'KIND':<8} {'STATE':<8} {'MIB':>7} {'CPU':>9} {'AGE':>9} {'IDLE':>9}"
    print_header(f"{columns}  LANGUAGE  POLICY  NAME")
    for row in rows:
        memory = row["memory_bytes"]
        shown = f"{memory / _MIB:.1f}" if isinstance(memory, int) else "-"
        times = " ".join(f"{_seconds(row[name]):>9}" for name in _TIMES)
        words = "  ".join(harmless(str(row[name])) for name in ("language", "policy", "session"))
        print(f"{row['id']:<14} {row['kind']:<8} {row['state']:<8} {shown:>7} {times}  {words}")
    return SUCCEEDED


_TIMES = ("cpu_seconds", "age_seconds", "idle_seconds")


def _seconds(value: object) -> str:
    return f"{value:,.1f} s" if isinstance(value, int | float) else "-"


def _row(living: Living) -> dict[str, "str | int | float | None"]:
    record, use = living.record, use_of(living)
    state = "orphan" if not record.supervisor.is_alive() else "frozen" if use.is_frozen else "live"
    return {
        "id": living.id, "kind": record.kind, "state": state, "pid": record.supervisor.pid,
        "memory_bytes": use.memory_bytes, "cpu_seconds": use.cpu_seconds,
        "age_seconds": use.age_seconds, "idle_seconds": use.idle_seconds,
        "language": record.language, "policy": record.policy, "session": record.session,
    }  # fmt: skip
