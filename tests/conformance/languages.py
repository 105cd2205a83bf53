"""Languages of the table in cells of the profiles `strict` and `standard`, as root and as an ordinary
user without cgroups, as a table.

`scripts/languages` runs this: a program of each language that is here reads its standard input, an
argument and a file, writes a file and exits with a status; one fails while it runs; one is refused by
the compiler or interpreter; and one prints the processors and the memory that it believes in.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from cellwright import Sandbox
from cellwright.harness.cli.helping.languages import version_of
from cellwright.policies.languages.table import LanguageEntry, language_table
from cellwright.policies.policy import MIB, Policy
from cellwright.policies.profiles.loading import load_policy
from cellwright.runner.host.interpreters import HostLanguage

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROFILES = ("strict", "standard")
CAPS = ("cgroup_cpu", "cgroup_memory", "cgroup_pids")  # an ordinary user may have none
_USER = 54321
_BROKEN = "this is (no program"
_SECONDS = 120.0
_MARK = "<!-- languages -->"
_HEAD = "| language | version | root | user | compiling | processors, MiB | remark |"
_AS_USER = "import runpy, sys; sys.path[:0] = {paths!r}; sys.argv = {argv!r}; runpy.run_module('tests.conformance.languages', run_name='__main__')"


class Programs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The programs of a language; languages.toml says what each does."""

    whole: str
    fails: str
    sees: str
    broken: str = _BROKEN


class Tried(msgspec.Struct, frozen=True):
    """How a language did under one profile: what went wrong, and what its runtime believes."""

    wrong: dict[str, str]
    sees: str = ""
    compile_seconds: float = 0.0
    compile_mib: int = 0


class Row(NamedTuple):
    version: str
    root: dict[str, Tried]
    user: dict[str, Tried]


def programs() -> dict[str, Programs]:
    data = tomllib.loads((HERE / "languages.toml").read_text())
    return {name: msgspec.convert(each, Programs) for name, each in data.items()}


def policy_for(profile: str, optional: tuple[str, ...]) -> Policy:
    """Return the profile with one processor, so that a runtime that sees the host's stands out."""
    policy = load_policy(profile)
    limits = msgspec.structs.replace(policy.limits, cpus=1.0, wall_seconds=_SECONDS)
    return msgspec.structs.replace(policy, limits=limits, optional_layers=optional)


def try_language(
    entry: LanguageEntry, given: Programs, profile: str, optional: tuple[str, ...] = ()
) -> Tried:
    """Run the programs of a language in cells."""
    wrong: dict[str, str] = {}
    with Sandbox(policy=policy_for(profile, optional), pool=0) as box:
        whole = box.execute(
            given.whole, entry.name, stdin="20 22\n", files={"in.txt": "58\n"},
            arguments=() if entry.name == "sql" else ("in.txt",), collect=("out.txt",),
        )  # fmt: skip
        made = b"".join(each.data for each in whole.artifacts).strip()
        seen = (whole.stdout.strip(), made, whole.exit_code)
        if seen != ("100", b"100", 3):
            wrong["whole"] = f"{seen} {whole.reason} {whole.error} {whole.stderr[-300:]}"
        fails = box.execute(given.fails, entry.name)
        if fails.reason not in ("exit", "signal") or not (fails.exit_code or fails.signal):
            wrong["fails"] = f"{fails.reason} {fails.exit_code} {fails.error} {fails.stderr[-300:]}"
        broken = box.execute(given.broken, entry.name)
        if not _is_refused(entry, broken.reason, broken.exit_code, broken.stderr):
            wrong["broken"] = f"{broken.reason} {broken.exit_code} {broken.stderr[-300:]}"
        sees = box.execute(given.sees, entry.name)
        words = sees.stdout.split()
        if len(words) != 2 or words[0] not in ("1", "-"):
            wrong["sees"] = f"{sees.stdout} {sees.reason} {sees.stderr[-300:]}"
        compiled = whole.compile
    return Tried(
        wrong, " ".join(words), round(compiled.seconds, 1) if compiled else 0.0,
        compiled.usage.memory_peak_bytes // MIB if compiled else 0,
    )  # fmt: skip


def _is_refused(entry: LanguageEntry, reason: str, code: int | None, said: str) -> bool:
    """Tell whether a program that is none was refused; compilers name the file."""
    ended = "compile" if entry.is_compiled else "exit"
    return reason == ended and bool(code) and (entry.source in said or not entry.is_compiled)


def install(languages: list[HostLanguage]) -> None:
    """Install the packages of missing languages that Debian has, as root."""
    wanted = [name for each in languages if each.missing for name in each.package.split()]
    known = subprocess.run(
        ["apt-cache", "--names-only", "search", "^(" + "|".join(wanted) + ")$"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = {line.split()[0] for line in known.splitlines()}  # packages that provide one, too
    names = [name for name in wanted if name in found]
    if names:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        command += ["-o", "DPkg::Lock::Timeout=300", *names]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, check=True, env=environment)


def try_as_user(name: str) -> dict[str, Tried]:
    """Run the programs of a language as a user without rights to cgroups, in a process of its own."""
    python = f"/usr/bin/python3.{sys.version_info.minor}"  # every user may read it
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    code = _AS_USER.format(paths=paths, argv=["languages", "--json", name])
    with tempfile.TemporaryDirectory(prefix="cellwright-user-", dir="/var/tmp") as home:
        os.chown(home, _USER, _USER)
        done = subprocess.run(
            ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", python, "-I", "-c", code],
            cwd=home, env={"HOME": home, "TMPDIR": home, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    if done.returncode:
        return {"strict": Tried({"user": done.stderr.strip()[-400:]})}
    return msgspec.json.decode(done.stdout, type=dict[str, Tried])


def line_of(language: HostLanguage, row: Row) -> str:
    wrong = {f"{side} {profile} {what}": why
             for side, tried in (("root", row.root), ("user", row.user))
             for profile, each in tried.items() for what, why in each.wrong.items()}  # fmt: skip
    tried = next(iter(row.root.values()))
    compiling = (
        f"{tried.compile_seconds:g} s, {tried.compile_mib} MiB" if tried.compile_seconds else ""
    )
    cells = (
        language.name, row.version, _word(row.root), _word(row.user), compiling, tried.sees,
        "; ".join(f"{where}: {why}" for where, why in wrong.items())[:600],
    )  # fmt: skip
    return "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in cells) + " |"


def _word(tried: dict[str, Tried]) -> str:
    return "NO" if any(each.wrong for each in tried.values()) else "yes" if tried else "not tried"


def write(lines: dict[str, str], missing: dict[str, str]) -> None:
    """Write the table: new rows, and for other languages the rows that it has."""
    path = HERE / "LANGUAGES.md"
    head, _, tail = path.read_text().partition(_MARK)
    old = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in tail.splitlines()
        if line.count(" | ") > 4
    }
    rows = [lines.get(name) or old.get(name, "") for name in language_table().names()]
    table = [_HEAD, "|---|---|---|---|---|---|---|", *filter(None, rows)]
    rest = ["| not tried | reason |", "|---|---|"]
    rest += [
        f"| {name} | {why} |" for name, why in missing.items() if f"| {name} |" not in str(rows)
    ]
    path.write_text("\n".join([f"{head}{_MARK}\n", *table, "", *rest, ""]))


def main(arguments: list[str]) -> int:
    table, given = language_table(), programs()
    with Sandbox(policy=policy_for("strict", CAPS), pool=0) as box:
        found = {each.name: each for each in box.languages() if each.name in given}
    names = [each for each in arguments if each in found] or list(found)
    if "install" in arguments:
        install([found[name] for name in names])
        return main(names)
    entries: dict[str, LanguageEntry] = {each.name: each for each in table}

    def tried(name: str, optional: tuple[str, ...]) -> dict[str, Tried]:
        return {each: try_language(entries[name], given[name], each, optional) for each in PROFILES}

    if "--json" in arguments:
        print(msgspec.json.encode(tried(names[0], CAPS)).decode())
        return 0
    return _write_all([found[name] for name in names], tried, found)


def _write_all(
    languages: list[HostLanguage], tried: Callable[[str, tuple[str, ...]], dict[str, Tried]],
    found: dict[str, HostLanguage],
) -> int:  # fmt: skip
    lines: dict[str, str] = {}
    missing = {each.name: each.missing for each in found.values() if each.missing}
    is_root = os.geteuid() == 0
    for each in languages:
        if each.missing:
            continue
        user = try_as_user(each.name) if is_root else tried(each.name, CAPS)
        row = Row(version_of(each), tried(each.name, ()) if is_root else {}, user)
        lines[each.name] = line_of(each, row)
        print(lines[each.name], flush=True)
        write(lines, missing)
    return int(any("| NO |" in line for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
