"""Mutations: each switches one protection off in a scratch copy; a table in README.md names the tests that fail.

Run from the root of the checkout: scripts/mutate-layers.  The command fails if no test of the layer
fails, or no payload: then the protection is untested.

A mutation is an edit of the syntax tree: comments, formatting and line breaks of the product do not
matter to it.  An edit must match exactly one node of its function.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = Path(__file__).with_name("README.md")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_SECONDS = 600  # on a busy machine
_SECONDS_OF_ONE = 90.0
_ENDLESS = "the run does not end"
_NOTHING_FAILS = "NOTHING FAILS"
_PAYLOADS = ("-k", "standard", "tests/escapes/test_payloads.py")
_HEAD = """
{place}:

| protection | in | test |{payload}
|---|---|---|{line}
"""


class MisplacedError(ValueError):
    """An edit does not match exactly one node, or what it makes is not Python."""


class Edit(NamedTuple):
    """A change of one node in a function of a file."""

    file: str
    function: str  # "name" or "Class.name"; empty for the whole file
    instead: Callable[
        [ast.AST], str | None
    ]  # code that takes the place of a node; None: another node

    def apply(self, text: str) -> str:
        """Return `text`, which is Python, with the change.  Raises MisplacedError."""
        found = [
            (node, code)
            for node in ast.walk(_function(ast.parse(text), self.function))
            if (code := self.instead(node)) is not None
        ]
        if len(found) != 1:
            raise MisplacedError(f"{self.file}: {self.function}: {len(found)} nodes match, not 1")
        data = text.encode()
        start, end = _span(data, found[0][0])
        changed = (data[:start] + found[0][1].encode() + data[end:]).decode()
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise MisplacedError(f"{self.file}: {self.function}: {error}") from None
        return changed


def _function(tree: ast.AST, path: str) -> ast.AST:
    for name in filter(None, path.split(".")):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
        if len(found) != 1:
            raise MisplacedError(f"{path}: {len(found)} definitions of {name}, not 1")
        tree = found[0]
    return tree


def _span(data: bytes, node: ast.AST) -> tuple[int, int]:
    """Return where `node` begins and ends: ast counts bytes of UTF-8 in a line."""
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = data.splitlines(keepends=True)
    starts = [sum(map(len, lines[: number - 1])) for number in (node.lineno, node.end_lineno)]
    return starts[0] + node.col_offset, starts[1] + node.end_col_offset


def replace(file: str, function: str, find: str, instead: str) -> Edit:
    """Replace the expression `find`."""
    wanted = ast.dump(ast.parse(find, mode="eval").body)
    return Edit(file, function, lambda node: instead if ast.dump(node) == wanted else None)


def drop(file: str, function: str, called: str) -> Edit:
    """Drop the statement that calls `called`; with arguments, the statement that is this call."""
    wanted = ast.dump(ast.parse(called, mode="eval").body)

    def instead(node: ast.AST) -> str | None:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            return None
        return "pass" if wanted in (ast.dump(call), ast.dump(call.func)) else None

    return Edit(file, function, instead)


def drop_flag(file: str, function: str, flag: str) -> Edit:
    """Drop `flag` of a chain of `|`."""
    wanted = ast.dump(ast.parse(flag, mode="eval").body)

    def instead(node: ast.AST) -> str | None:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.BitOr):
            return None
        if ast.dump(node.right) == wanted:
            return ast.unparse(node.left)
        return ast.unparse(node.right) if ast.dump(node.left) == wanted else None

    return Edit(file, function, instead)


def drop_keyword(file: str, function: str, called: str, keyword: str) -> Edit:
    """Drop the argument `keyword` of a call of `called`."""

    def instead(node: ast.AST) -> str | None:
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != called:
            return None
        kept = [each for each in node.keywords if each.arg != keyword]
        if len(kept) == len(node.keywords):
            return None
        return ast.unparse(ast.Call(node.func, node.args, kept))

    return Edit(file, function, instead)


def drop_item(file: str, function: str, key: str) -> Edit:
    """Drop the item `key` of a dictionary."""

    def instead(node: ast.AST) -> str | None:
        if not isinstance(node, ast.Dict):
            return None
        pairs = list(zip(node.keys, node.values, strict=True))
        kept = [(k, v) for k, v in pairs if not (isinstance(k, ast.Constant) and k.value == key)]
        if len(kept) == len(pairs):
            return None
        return ast.unparse(ast.Dict([k for k, _ in kept], [v for _, v in kept]))

    return Edit(file, function, instead)


class Mutation(NamedTuple):
    """A protection, the tests that are asked whether it is off, and the edits that switch it off."""

    layer: str
    asked: tuple[
        str, ...
    ]  # files of tests, or single tests, as pytest names them: those of the layer
    edits: tuple[Edit, ...]


def _escapes(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/escapes/test_{name}" for name in names)


_ENTER = "runner/cell/enter.py"
_PRIVILEGES = "runner/cell/privileges.py"
_INITS = "runner/launcher/inits.py"
_CUSTODY = "runner/cells/held_cell.py"
_NAMESPACES_DIFFER = _escapes(
    "posture.py::test_every_namespace_differs_from_the_hosts_and_the_launchers"
)
_CAPABILITIES, _FILESYSTEM = _escapes("capabilities.py"), _escapes("filesystem.py")
_HIDDEN, _POSTURE, _LIMITS = _escapes("hidden.py"), _escapes("posture.py"), _escapes("limits.py")
_OBJECTS, _ENVIRONMENT = _escapes("kernel_objects.py"), _escapes("environment.py")
_SUPERVISION = ("tests/runner/test_supervision.py",)


def _shared(kind: str) -> Edit:
    """Have cells enter the nursery's namespace of a kind, which the launcher has too, not their init's."""
    place = 1 + ("net", "ipc", "uts").index(kind)
    own = f"own_namespaces(({kind!r},), self._proc)"
    others = f"*namespaces[:{place}], *{own}, *namespaces[{place + 1}:]"
    return replace(_INITS, "Nursery._make", "(pidfd, *namespaces)", f"(pidfd, {others})")


_USED_NETWORKS = _escapes("used_networks.py")
_USED_AFTER_ANY_SOCKET = replace(
    "policies/compiling/compile.py", "", "_makes_only_unix_sockets(rules)", "True"
)
_PIN = drop(
    "runner/launcher/views.py", "_pin",
    "mounts.attach_opened(mounts.clone_opened(place), place)",
)  # fmt: skip
_EMPTY_ENVIRONMENT = replace("runner/launching/spawn.py", "_spawn", "{}", "os.environ")
_KILLED_AT_RETIREMENT = (
    drop(_CUSTODY, "retire", "self.cell.kill_init"), drop(_CUSTODY, "retire", "self.cell.kill"),
)  # fmt: skip
_KILLED_ON_DISPOSAL = drop(_CUSTODY, "dispose", "self.cell.kill")
MUTATIONS = (
    # The launcher may not leave its own pid namespace for one that it is in already, so that cells enter
    # another namespace a second time; and a new /proc is refused them in the launcher's.
    Mutation("pid_ns", _NAMESPACES_DIFFER, (
        replace(_INITS, "Nursery._make", "(pidfd, *namespaces)", "(pidfd, namespaces[2], *namespaces[1:])"),
        replace(
            _ENTER, "_mount_own_filesystems",
            'mounts.new(do, "proc", _HARD | mounts.NOEXEC | mounts.RDONLY, subset="pid")',
            'mounts.clone(do, "/proc")',
        ),
    )),
    Mutation("net_ns", _NAMESPACES_DIFFER, (_shared("net"),)),
    Mutation("net_ns: used again after AF_UNIX alone", _USED_NETWORKS, (_USED_AFTER_ANY_SOCKET,)),
    Mutation("net_ns: used again without a socket in it", _USED_NETWORKS, (
        replace("runner/launcher/inits.py", "NetworkNamespaces._enter", "self._has_no_socket()", "True"), _USED_AFTER_ANY_SOCKET,
    )),
    Mutation("ipc_ns", _NAMESPACES_DIFFER, (_shared("ipc"),)),
    Mutation("uts_ns", _NAMESPACES_DIFFER, (_shared("uts"),)),
    Mutation("uts_ns: host name", _escapes("namespaces.py"), (drop("runner/launcher/main.py", "_settle", "kernel.sethostname"),)),
    Mutation("cgroup_ns", _escapes("namespaces.py"), (
        drop(_ENTER, "confinement", 'do.call("unshare", processes.CLONE_NEWCGROUP, about="new cgroup namespace")'),
    )),
    Mutation("user_ns", _NAMESPACES_DIFFER, (drop(_ENTER, "confinement", "_enter_user_namespace"),)),
    Mutation("mount_ns: read-only root", _FILESYSTEM + _POSTURE, (drop("runner/launcher/root.py", "enter_new_root", "mounts.make_read_only"),)),
    Mutation("mount_ns: noexec", _FILESYSTEM, (replace("runner/launcher/root.py", "_attributes", "0 if bind.executable else mounts.NOEXEC", "0"),)),
    Mutation("mount_ns: hidden paths", _HIDDEN, (replace("runner/launcher/root.py", "_show", "denied_by(boot.plan.hidden)", "denied_by(())"),)),
    Mutation("mount_ns: pins above hidden and shown paths", _HIDDEN, (_PIN,)),
    Mutation("mount_ns: no pipes in what is only read", _escapes("channels.py"), (drop("runner/launcher/root.py", "_show", "cover_pipes"),)),
    Mutation("seccomp: no Unix sockets where the host's are shown", _escapes("channels.py"), (
        replace("policies/compiling/compile.py", "_system_calls", "shows_sockets and not _refuses_foreign_sockets(host, layers)", "False"),
    )),
    Mutation("names of the sockets of cells", _escapes("descriptors.py"), (
        drop("runner/cells/cell.py", "Cell.__init__", "channel.name_for_good"),
    )),
    Mutation("paths without links", _escapes("files.py", "paths.py"), (
        replace("runner/kernel/file_calls.py", "", "_NO_MAGICLINKS | _NO_SYMLINKS", "0"),
        replace("runner/host/shown_paths.py", "", "not _is_roots_own(done, status)", "False"),
        _PIN,
    )),
    Mutation("mount_ns: /proc", _FILESYSTEM, (
        drop_flag(_ENTER, "_mount_own_filesystems", "mounts.RDONLY"),
        drop_keyword(_ENTER, "_mount_own_filesystems", "mounts.new", "subset"),
    )),
    Mutation("capabilities", _CAPABILITIES, (drop(_PRIVILEGES, "give_up_all", "kernel.clear_capabilities"),)),
    Mutation("bounding set", _CAPABILITIES, (drop(_PRIVILEGES, "give_up_all", "kernel.drop_bounding_set"),)),
    Mutation("securebits", _CAPABILITIES, (drop(_PRIVILEGES, "give_up_all", "kernel.set_securebits"),)),
    # The kernel takes a filter from a process with either no_new_privs or CAP_SYS_ADMIN in its own user
    # namespace (seccomp(2)).  A program loses that capability when it is executed, so that the test
    # finds one without both.
    Mutation("no_new_privs", _escapes("posture.py::test_a_program_that_lives_is_behind_the_same_layers"), (
        drop(_PRIVILEGES, "give_up_all", "kernel.set_no_new_privs"),
        replace(_PRIVILEGES, "give_up_all", "kernel.clear_capabilities(do, but)", "kernel.clear_capabilities(do, (_CAP_SYS_ADMIN,))"),
    )),
    Mutation("undumpable init", _POSTURE, (drop(_PRIVILEGES, "make_undumpable", "kernel.set_dumpable"),)),
    Mutation("an init's filter", _POSTURE, (drop(_INITS, "Nursery.serve", "kernel.install_seccomp_filter"),)),
    Mutation("an init's capabilities", _POSTURE, (drop(_INITS, "Nursery.serve", "privileges.keep_only_sys_admin"),)),
    Mutation("rlimits", _LIMITS, (replace(_ENTER, "_limit_resources", "rlimits", "()"),)),
    Mutation("seccomp", _escapes("seccomp.py"), (
        replace(
            "policies/compiling/seccomp.py", "", "with_ranges(_export(program), NEWEST_NUMBER, _RETURN_ENOSYS)",
            "(6).to_bytes(4, 'little') + (0x7FFF0000).to_bytes(4, 'little')",
        ),
    )),
    Mutation("listener", _escapes("listener.py"), (replace("policies/compiling/compile.py", "", '"listener" in layers', "False"),)),
    Mutation("landlock", _escapes("landlock.py"), (drop(_ENTER, "confinement", "fence_paths"),)),
    Mutation("cgroups", _LIMITS, (drop(_ENTER, "_join_cgroups", 'do.call("write", tasks, b"0", 1, about="the cgroup\'s tasks")'),)),
    Mutation("descriptor sweep", _escapes("descriptors.py"), (drop(_ENTER, "_keep_only", "do.keep_only"),)),
    Mutation("environment", _ENVIRONMENT, (_EMPTY_ENVIRONMENT,)),
    Mutation("environment, and that of the program", _ENVIRONMENT, (
        _EMPTY_ENVIRONMENT, drop("runner/cell/interpreter.py", "prepare", "os.environ.clear"),
    )),
    Mutation("start-up variables", _escapes("start_up.py"), (replace("runner/cell/guest_frames.py", "", "self._language.start_up", "()"),)),
    Mutation("size of the workspace", _LIMITS, (drop_item(_ENTER, "_mount_tmpfs", "size"),)),
    Mutation("inodes of the workspace", _LIMITS, (replace(_ENTER, "_mount_tmpfs", "str(tmpfs.inodes)", "'0'"),)),
    Mutation("cap on record locks", _OBJECTS, (replace("runner/listening/locks.py", "_answer_record_lock", "not self._has_room()", "False"),)),
    Mutation("no locks on what may only be read", _OBJECTS, (replace("runner/listening/locks.py", "_is_read_only", "os.statvfs(file).f_flag & os.ST_RDONLY", "False"),)),
    Mutation("count of netlink sockets", _OBJECTS, (replace("runner/listening/interfaces.py", "", "next(int(line.split()[2]) for line in file if line.startswith(b'NETLINK '))", "0"),)),
    Mutation("limits of init", _LIMITS, (replace("runner/listening/cell_listener.py", "", "number in ids_of(thread)", "True"),)),
    Mutation("interfaces of the cell alone", _escapes("descriptors.py"), (replace("runner/listening/cell_listener.py", "", "interfaces.answer_request(self._descriptor, notification)", "self._let_go_on(notification)"),)),
    Mutation("watches of the cell's own files alone", _escapes("file_watching.py"), (replace("runner/listening/cell_listener.py", "", "self._file_watches().answer(notification)", "self._let_go_on(notification)"),)),
    Mutation("protected paths", _escapes("protected.py"), (replace("policies/compiling/compile.py", "", 'table.guarded if policy.filesystem.protected else ()', "()"),)),
    Mutation("guarded calls never go on", _escapes("protected.py"), (replace("runner/listening/cell_listener.py", "Listener._on_guarded", "self._guarded.answer(notification)", "self._let_go_on(notification)"),)),
    Mutation("cgroup_sockets", _OBJECTS, (drop("runner/cgroups/v1.py", "_prepare", 'write(f"{memory}/{_SOCKET_LIMIT}", str(caps.socket_bytes))'),)),
    Mutation("no memfd_create without a memory cgroup", _OBJECTS, (replace("policies/compiling/compile.py", "", '"cgroup_memory" not in layers', "False"),)),
    Mutation("wall time", ("tests/harness/test_every_limit.py::test_in_one_call[wall_seconds]",), (drop("runner/watching/supervision.py", "_on_wall_time", "self._end_or_interrupt"),)),
    Mutation("output cap", _LIMITS, (
        replace("runner/watching/supervision.py", "_reader", "total > self._limits.output_total_bytes", "False"),
    )),
    Mutation("killing at the end of a session", _SUPERVISION, (
        # The last resort ends the launcher, and so the cell.
        *_KILLED_AT_RETIREMENT, _KILLED_ON_DISPOSAL, drop(_CUSTODY, "retire", "self.origin.give_up"),
    )),
    Mutation("killing at the end", _SUPERVISION, (
        drop("runner/supervisor.py", "", "held.cell.kill_init"), *_KILLED_AT_RETIREMENT, _KILLED_ON_DISPOSAL,
    )),
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
        return _ENDLESS
    if "Address already in use" in done.stdout:
        raise SystemExit("another run has the port of the payloads: wait for its end")
    failed = _FAILED.search(done.stdout)
    if not failed:
        return ""
    file, _, test = failed[1].partition("::")
    return f"{Path(file).name}::{test}"


def noticed_again(copy: Path, noticed: str, *chosen: str) -> str:
    """Run the test that failed the last time and, if it passes now, all that are `chosen`."""
    file, _, test = noticed.partition("::")
    places = list((copy / "tests").rglob(file)) if test else []
    one = f"{places[0]}::{test}" if len(places) == 1 else ""
    again = noticed_by(copy, one, seconds=_SECONDS_OF_ONE) if one else ""
    return again or noticed_by(copy, *chosen) or _NOTHING_FAILS


def is_asked(mutation: Mutation, test: str) -> bool:
    """Tell whether `test`, as the table names it, is one of those that a mutation asks."""
    asked = [each.rpartition("/")[2] for each in mutation.asked]
    return any(test == each or test.startswith((f"{each}::", f"{each}[")) for each in asked)


class Table(NamedTuple):
    """A table of README.md, between comments that have its name.  Payloads attack layers of a cell, so
    there are none in the others."""

    name: str
    mutations: tuple[Mutation, ...]
    has_payloads: bool

    def place(self) -> re.Pattern[str]:
        return re.compile(
            rf"(?<=<!-- {self.name} -->\n).*(?=<!-- end of {self.name} -->)", re.DOTALL
        )

    def rows_so_far(self) -> dict[str, str]:
        """Return the rows by their protection: those that are not tried anew stay."""
        table = self.place().search(README.read_text())
        lines = table[0].splitlines() if table else []
        rows = {line[2:].partition(" | ")[0]: line for line in lines if line.startswith("| ")}
        rows.pop("protection", None)  # the head
        return rows

    def write(self, rows: dict[str, str]) -> None:
        where = f"Linux {os.uname().release}, {os.uname().machine}, {time.strftime('%Y-%m-%d')}"
        told = [rows[each.layer] for each in self.mutations if each.layer in rows]
        head = _HEAD.format(
            place=where, payload=" payload |" * self.has_payloads, line="---|" * self.has_payloads
        )
        table = head + "\n".join(told) + "\n\n"
        README.write_text(self.place().sub(lambda _: table, README.read_text()))


def tables() -> tuple[Table, ...]:
    """Return every table: of the layers of a cell, of the way out by name, and of readers on the host."""
    from tests.allowed_mutations import ALLOWED  # it is made of mutations, like the others
    from tests.cgroup_mutations import USED_CGROUPS
    from tests.egress_mutations import EGRESS
    from tests.image_mutations import IMAGES
    from tests.reader_mutations import READERS

    return (
        Table("mutations", MUTATIONS, True), Table("egress mutations", EGRESS, False),
        Table("mutations of what is allowed", ALLOWED, False), Table("reader mutations", READERS, False),
        Table("cgroup mutations", USED_CGROUPS, False), Table("image mutations", IMAGES, False),
    )  # fmt: skip


def misplaced() -> list[str]:
    """Return the protections with an edit that does not match exactly one node."""
    found = [each for table in tables() for each in table.mutations]
    return [each.layer for each in found if not _is_in_place(each)]


def _is_in_place(mutation: Mutation) -> bool:
    try:
        _changed(mutation, ROOT)
    except MisplacedError:
        return False
    return True


def _changed(mutation: Mutation, root: Path) -> dict[str, str]:
    """Return the new text of each file that `mutation` changes.  Raises MisplacedError."""
    texts: dict[str, str] = {}
    for edit in mutation.edits:
        text = texts.get(edit.file) or (root / edit.file).read_text()
        texts[edit.file] = edit.apply(text)
    return texts


def mutate(mutation: Mutation, by_test: str, by_payload: str | None) -> list[str]:
    """Return which test and which payload fail under `mutation`; those that failed the last time run
    first.  Without `by_payload` no payload is asked."""
    with tempfile.TemporaryDirectory(prefix="cellwright-mutation-") as directory:
        copy = Path(directory) / "checkout"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", ".servers", ".frameworks", ".*_cache", "__pycache__", "*.egg-info"
        )  # fmt: skip
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        for file, text in _changed(mutation, copy).items():
            (copy / file).write_text(text)
        by_test = by_test if is_asked(mutation, by_test) else ""
        found = [noticed_again(copy, by_test, *mutation.asked)]
        if by_payload is not None:
            found.append(noticed_again(copy, by_payload, *_PAYLOADS))
        return found


def main() -> None:
    if lost := misplaced():
        raise SystemExit(f"edits that do not match exactly one node: {', '.join(lost)}")
    wanted = sys.argv[1:]
    known = {each.layer for table in tables() for each in table.mutations}
    if unknown := set(wanted) - known:
        raise SystemExit(f"unknown protection: {', '.join(sorted(unknown))}")
    tried = [row for table in tables() for row in try_each(table, wanted)]
    sys.exit(any(_NOTHING_FAILS in row for row in tried))


def try_each(table: Table, wanted: list[str]) -> list[str]:
    """Try the mutations of a table, or those that are `wanted`; return and write their rows."""
    rows, tried = table.rows_so_far(), []
    for mutation in table.mutations:
        if wanted and mutation.layer not in wanted:
            continue
        by_test, *by_payload = noticed(rows.get(mutation.layer, "")) or [""]
        payload = (by_payload or [""])[0] if table.has_payloads else None
        cells = mutation.layer, f"`{mutation.edits[0].file}`", *mutate(mutation, by_test, payload)
        rows[mutation.layer] = f"| {' | '.join(cells)} |"
        tried.append(rows[mutation.layer])
        print(tried[-1], flush=True)
        table.write(rows)
    return tried


def noticed(row: str) -> list[str]:
    """Return the test of a row, and the payload if it has one; empty without a row."""
    return row.removesuffix(" |").split(" | ")[2:]


if __name__ == "__main__":
    main()
