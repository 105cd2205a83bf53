"""Switch each protection off in turn, in a scratch copy, and see who notices: a table in README.md.

Run from the root of the checkout: scripts/mutate-layers.  A protection whose absence no test notices,
or no payload, is untested, and the command fails.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = Path(__file__).with_name("README.md")
_TABLE = re.compile(r"(?<=<!-- mutations -->\n).*(?=<!-- end of mutations -->)", re.DOTALL)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_SECONDS = 600  # on a busy machine
_SECONDS_OF_ONE = 90.0
_NOBODY = "NOBODY"
_TESTS = ("-m", "not slow", "tests/escapes", "tests/policies", "tests/runner")
_PAYLOADS = ("-k", "standard", "tests/escapes/test_payloads.py")
_HEAD = """
{place}:

| protection | in | test | payload |
|---|---|---|---|
"""


class Mutation(NamedTuple):
    """A line of the product, and what stands in its place once the protection is off; `also` are lines
    of others that do the same, which are off as well."""

    layer: str
    file: str
    line: str
    instead: str
    also: tuple[tuple[str, str, str], ...] = ()  # file, line, instead

    def edits(self) -> tuple[tuple[str, str, str], ...]:
        return ((self.file, self.line, self.instead), *self.also)


_KILLED_ONCE_MORE = (
    "runner/custody.py",
    "            self.cell.kill()  # where",
    "            pass  # where",
)
MUTATIONS = (
    Mutation("pid_ns", "runner/launcher/inits.py", "    processes.CLONE_NEWPID | processes.CLONE_NEWNET\n", "    processes.CLONE_NEWNET\n"),
    Mutation("net_ns", "runner/launcher/inits.py", " | processes.CLONE_NEWNET", ""),
    Mutation("ipc_ns", "runner/launcher/inits.py", "processes.CLONE_NEWIPC | ", ""),
    Mutation("uts_ns", "runner/launcher/inits.py", " | processes.CLONE_NEWUTS\n)", "\n)"),
    Mutation("uts_ns: host name", "runner/launcher/main.py", "    kernel.sethostname(boot.plan.hostname)", "    pass"),
    Mutation("cgroup_ns", "runner/cell/enter.py", '    do.call("unshare", processes.CLONE_NEWCGROUP, about="new cgroup namespace")', "    pass"),
    Mutation("user_ns", "runner/cell/enter.py", "    _enter_user_namespace(do, site)  # after", "    pass  # after"),
    Mutation("mount_ns: read-only root", "runner/launcher/root.py", '    mounts.make_read_only("/")', "    pass"),
    Mutation("mount_ns: noexec", "runner/launcher/root.py", "0 if bind.executable else mounts.NOEXEC", "0"),
    Mutation("mount_ns: hidden paths", "runner/launcher/root.py", "    denied, singly = denied_by(boot.plan.hidden), SinglyShown(shown)", "    denied, singly = denied_by(()), SinglyShown(shown)"),
    Mutation("mount_ns: pins above hidden and shown paths", "runner/launcher/views.py", "        mounts.attach_opened(mounts.clone_opened(place), place)", "        pass"),
    Mutation(
        "paths without links", "runner/kernel/files.py", "_NO_LINKS = _NO_MAGICLINKS | _NO_SYMLINKS", "_NO_LINKS = 0",
        (
            ("runner/host/paths.py", "        if not _is_roots_own(done, status):", "        if False:"),
            ("runner/launcher/views.py", "        mounts.attach_opened(mounts.clone_opened(place), place)", "        pass"),
        ),
    ),
    Mutation("mount_ns: /proc", "runner/cell/enter.py", ' | mounts.RDONLY, subset="pid"', ""),
    Mutation("capabilities", "runner/cell/privileges.py", "    kernel.clear_capabilities(do)\n", "    pass\n"),
    Mutation("bounding set", "runner/cell/privileges.py", "    kernel.drop_bounding_set(do, last_capability)\n    kernel.set_securebits", "    kernel.set_securebits"),
    Mutation("securebits", "runner/cell/privileges.py", "    kernel.set_securebits(do, _SECUREBITS)", "    pass"),
    Mutation("no_new_privs", "runner/cell/privileges.py", "    kernel.clear_capabilities(do)\n    kernel.set_no_new_privs(do)", "    kernel.clear_capabilities(do)"),
    Mutation("undumpable init", "runner/cell/privileges.py", "    kernel.set_dumpable(do, 0)", "    pass"),
    Mutation("an init's filter", "runner/launcher/inits.py", "        kernel.install_seccomp_filter(self._now, program)", "        pass"),
    Mutation("an init's capabilities", "runner/launcher/inits.py", "        privileges.keep_only_sys_admin(self._now, last_capability)", "        pass"),
    Mutation("rlimits", "runner/cell/enter.py", "    for name, value in rlimits:", "    for name, value in ():"),
    Mutation("seccomp", "policies/seccomp.py", "    return _LOAD_NUMBER + _SKIP_UNLESS_NEWER", "    return _BPF.pack(6, 0, 0, 0x7FFF0000) if 1 else b''"),
    Mutation("listener", "policies/compile.py", 'if "listener" in layers else None', "if False else None"),
    Mutation("landlock", "runner/cell/enter.py", "    if plan.landlock_abi:", "    if False:"),
    Mutation("cgroups", "runner/cell/enter.py", "        do.call(\"write\", tasks, b\"0\", 1, about=\"the cgroup's tasks\")", "        pass"),
    Mutation("descriptor sweep", "runner/cell/enter.py", "    do.keep_only(host_proc)", "    pass"),
    Mutation("environment", "runner/spawn.py", "_BOOTSTRAP.format(module)], {},", "_BOOTSTRAP.format(module)], os.environ,"),
    Mutation(
        "environment, and that of the program", "runner/spawn.py", "_BOOTSTRAP.format(module)], {},", "_BOOTSTRAP.format(module)], os.environ,",
        (("runner/cell/interpreter.py", "    os.environ.clear()  # Python", "    pass  # Python"),),
    ),
    Mutation("start-up variables", "runner/cell/programs.py", "        for name in self._language.start_up:", "        for name in ():"),
    Mutation("size of the workspace", "runner/cell/enter.py", '{"size": str(tmpfs.size_bytes), "nr_inodes"', '{"nr_inodes"'),
    Mutation("inodes of the workspace", "runner/cell/enter.py", '"nr_inodes": str(tmpfs.inodes)', '"nr_inodes": "0"'),
    Mutation("cap on record locks", "runner/watching/locks.py", "        if not self._has_room():", "        if False:"),
    Mutation("no locks on what may only be read", "runner/watching/locks.py", "    if os.statvfs(file).f_flag & os.ST_RDONLY:", "    if False:"),
    Mutation("cgroup_sockets", "runner/cgroups/v1.py", "            if caps.socket_bytes:", "            if False:"),
    Mutation("no memfd_create without a memory cgroup", "policies/compile.py", ' or "cgroup_memory" not in layers', ""),
    Mutation("wall time", "runner/watching/supervision.py", '        self._end_or_interrupt("wall_time")', "        pass"),
    Mutation("output cap", "runner/watching/supervision.py", "            if sum(each.total_bytes for each in self._captures) > self._limits.output_total_bytes:", "            if False:"),
    Mutation(
        "killing at the end of a session", "runner/custody.py", "        self.cell.kill()\n        deadline", "        deadline",
        (_KILLED_ONCE_MORE,),
    ),
    Mutation(
        "killing at the end", "runner/supervisor.py", "            custody.cell.kill_init()", "            pass",
        (("runner/custody.py", "        self.cell.kill()\n        deadline", "        deadline"), _KILLED_ONCE_MORE),
    ),
)  # fmt: skip


def noticed_by(copy: Path, *chosen: str, seconds: float = _SECONDS) -> str:
    """Run the tests of `copy` until one fails; return its name, empty if none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen]
    environment = {**os.environ, "XDG_CACHE_HOME": str(copy / "cache"), "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment | {"COLUMNS": "500"}, capture_output=True, text=True,
            timeout=seconds, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the run does not end"
    if "Address already in use" in done.stdout:
        raise SystemExit("another run has the port of the payloads: wait for its end")
    failed = _FAILED.search(done.stdout)
    if not failed:
        return ""
    file, _, test = failed[1].partition("::")
    return f"{Path(file).name}::{test}"


def noticed_again(copy: Path, noticed: str, *chosen: str) -> str:
    """Run what noticed the last time and, if it does not any more, all that are `chosen`."""
    file, _, test = noticed.partition("::")
    places = list((copy / "tests").rglob(file)) if test else []
    one = f"{places[0]}::{test}" if len(places) == 1 else ""
    again = noticed_by(copy, one, seconds=_SECONDS_OF_ONE) if one else ""
    return again or noticed_by(copy, *chosen) or _NOBODY


def misplaced() -> list[str]:
    """Return the protections whose line is not once in its file."""
    return [
        each.layer
        for each in MUTATIONS
        if any((ROOT / file).read_text().count(line) != 1 for file, line, _ in each.edits())
    ]


def mutate(mutation: Mutation, by_test: str, by_payload: str) -> tuple[str, str]:
    """Return which test and which payload notice `mutation`; those that did the last time are asked
    first."""
    with tempfile.TemporaryDirectory(prefix="cellwright-mutation-") as directory:
        copy = Path(directory) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        for file, line, instead in mutation.edits():
            text = (copy / file).read_text()
            (copy / file).write_text(text.replace(line, instead))
        return (
            noticed_again(copy, by_test, *_TESTS),
            noticed_again(copy, by_payload, *_PAYLOADS),
        )


def main() -> None:
    if lost := misplaced():
        raise SystemExit(f"these stand elsewhere by now: {', '.join(lost)}")
    wanted = sys.argv[1:]
    if unknown := set(wanted) - {each.layer for each in MUTATIONS}:
        raise SystemExit(f"no such protection: {', '.join(sorted(unknown))}")
    chosen = [each for each in MUTATIONS if not wanted or each.layer in wanted]
    rows = rows_so_far()
    for mutation in chosen:
        last = noticed(rows.get(mutation.layer, ""))
        cells = (mutation.layer, f"`{mutation.file}`", *mutate(mutation, *last))
        rows[mutation.layer] = f"| {' | '.join(cells)} |"
        print(rows[mutation.layer], flush=True)
        write(rows)
    sys.exit(any(_NOBODY in rows[each.layer] for each in chosen))


def noticed(row: str) -> tuple[str, str]:
    """Return the test and the payload of a row, empty where there are none."""
    cells = row.removesuffix(" |").split(" | ")
    return (cells[2], cells[3]) if len(cells) == 4 else ("", "")


def rows_so_far() -> dict[str, str]:
    """Return the rows of the table by their protection: those that are not tried anew stay."""
    table = _TABLE.search(README.read_text())
    lines = table[0].splitlines() if table else []
    rows = {line[2:].partition(" | ")[0]: line for line in lines if line.startswith("| ")}
    rows.pop("protection", None)  # the head
    return rows


def write(rows: dict[str, str]) -> None:
    place = f"Linux {os.uname().release}, {os.uname().machine}, {time.strftime('%Y-%m-%d')}"
    told = [rows[each.layer] for each in MUTATIONS if each.layer in rows]
    table = _HEAD.format(place=place) + "\n".join(told) + "\n\n"
    README.write_text(_TABLE.sub(lambda _: table, README.read_text()))


if __name__ == "__main__":
    main()
