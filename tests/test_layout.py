"""The arrows of the design, held by parsing what every module imports."""

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = ("policies", "runner", "harness", "benchmarks")
MODULES = sorted(
    path for folder in (*FOLDERS, "cellwright") for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)  # fmt: skip
SCRIPTS = {"runner/host/loaded_libraries.py"}  # run by another interpreter, imports nothing of ours


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Return what a module imports, ours as a path below the root (`runner/channel`)."""
    found: list[str] = []
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name.replace(".", "/") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found += _relative(node, package)
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "").replace(".", "/"))
    return tuple(found)


def _relative(node: ast.ImportFrom, package: tuple[str, ...]) -> list[str]:
    start = () if package == ("cellwright",) else package
    start = start[: len(start) - (node.level - 1)]
    stem = "/".join([*start, *(node.module or "").split(".")]).strip("/")
    inside = [f"{stem}/{alias.name}".strip("/") for alias in node.names]
    return [each if _is_module(each) else stem for each in inside]


def _is_module(name: str) -> bool:
    return (ROOT / f"{name}.py").is_file() or (ROOT / name).is_dir()


def ours(path: Path) -> list[str]:
    return [each for each in imports_of(path) if each.split("/")[0] in (*FOLDERS, "cellwright")]


def below(folder: str) -> list[Path]:
    return [path for path in MODULES if name_of(path).startswith(f"{folder}/")]


def test_the_packages_of_pyproject_are_those_of_the_tree() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tree = {
        "cellwright" if path.parent == ROOT / "cellwright"
        else ".".join(("cellwright", *path.relative_to(ROOT).parent.parts))
        for path in MODULES
    }  # fmt: skip
    assert sorted(data["packages"]) == sorted(tree)
    assert data["package-dir"] == {"cellwright": "cellwright"} | {
        f"cellwright.{folder}": folder for folder in FOLDERS
    }


def test_every_folder_of_code_is_a_package() -> None:
    assert [path.parent for path in MODULES if not (path.parent / "__init__.py").is_file()] == []


def test_the_folders_are_links_inside_the_face() -> None:
    for folder in FOLDERS:
        assert (ROOT / "cellwright" / folder).readlink() == Path("..", folder)


ARROWS = {
    "policies": ("policies",),
    "runner": ("runner", "policies"),
    "harness": ("harness", "runner", "policies", "benchmarks/commands"),
    "benchmarks": ("benchmarks", "harness", "runner", "policies"),
    "harness/examples": ("cellwright",),
    "runner/kernel": ("runner/kernel",),
    "runner/cell": (
        "runner/cell", "runner/fixed_root", "runner/kernel", "runner/messages", "runner/channel", "policies/plan", "policies/languages",
    ),
    "runner/cgroups": ("runner/cgroups", "policies/extras"),
    "runner/branching": (
        "runner/branching", "runner/confined/confinement", "runner/kernel", "runner/messages", "runner/channel",
    ),
    "runner/egress": (
        "runner/egress", "runner/confined/confinement", "runner/kernel", "runner/messages", "runner/channel", "policies/network/upstream_proxy", "policies/network",
    ),
    "runner/launcher": (
        "runner/launcher", "runner/fixed_root", "runner/fixed_root", "runner/cell", "runner/kernel", "runner/messages", "runner/channel", "runner/shared_files",
        "policies/plan", "policies/languages", "policies/denied", "runner/host/image_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("folder", "allowed"), ARROWS.items(), ids=ARROWS)
def test_imports_follow_the_arrows(folder: str, allowed: tuple[str, ...]) -> None:
    assert below(folder)
    for path in below(folder):
        if name_of(path).startswith("harness/examples/") and folder == "harness":
            continue  # a program of users, which imports by full names as users do
        for each in ours(path):
            inside = any(each == target or each.startswith(f"{target}/") for target in allowed)
            assert inside, f"{name_of(path)} imports {each}"


# The rooms of harness/, from the top: a room imports from itself and from those below it.
STACK = (
    "examples", "cli", "fleet", "servers", "dashboard", "adapters", "agent", "making", "runs", "mcp", "batch", "sandbox", "skills", "tools", "privacy", "stubs",
    "search", "schemas", "text",
)  # fmt: skip
LEAVES = (
    "harness/database",
    "harness/user_data",
    "harness/user_data",
    "harness/version",
)


def test_every_room_of_the_harness_stands_in_the_stack() -> None:
    rooms = {path.parent.name for path in (ROOT / "harness").glob("*/*.py")}
    assert rooms == set(STACK)
    modules = {name_of(path) for path in (ROOT / "harness").glob("*.py")}
    assert modules == {"harness/__init__.py", *(f"{leaf}.py" for leaf in LEAVES)}


@pytest.mark.parametrize("room", STACK)
def test_the_rooms_of_the_harness_import_only_downwards(room: str) -> None:
    allowed = STACK[STACK.index(room) :]
    assert below(f"harness/{room}")
    for path in below(f"harness/{room}"):
        for each in ours(path):
            inside = each.split("/")[1] in allowed if each.startswith("harness/") else True
            assert inside or each in LEAVES, f"{name_of(path)} imports {each}"


def test_imports_go_round_in_no_circle() -> None:
    graph = {re.sub(r"(/__init__)?\.py$", "", name_of(path)): ours(path) for path in MODULES}
    assert "harness/sandbox/sessions/session" in graph["harness/sandbox/sandbox"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which says where


def test_only_the_command_line_knows_the_benchmarks_and_only_when_asked() -> None:
    users = {
        name_of(path) for path in MODULES
        if not name_of(path).startswith("benchmarks/")
        and any(each.startswith("benchmarks") for each in ours(path))
    }  # fmt: skip
    assert users == {"harness/cli/helping/bench.py"}
    assert not [
        path for path in MODULES if "harness/cli/helping/bench" in ours(path)
    ]  # imported by name, late


def test_the_parser_of_imports_sees_them() -> None:
    """The tests above would be hollow if relative imports were not understood."""
    assert "runner/kernel/landlock" in imports_of(ROOT / "runner/cell/enter.py")
    assert "policies/plan" in imports_of(ROOT / "runner/cell/enter.py")
    assert "runner/kernel/steps" in imports_of(ROOT / "runner/kernel/landlock.py")
    assert "harness/cli/main" in imports_of(ROOT / "cellwright/__main__.py")


def test_nothing_that_runs_cells_imports_ctypes() -> None:
    users = {
        name_of(path) for path in MODULES
        if any(each.split("/")[0] in ("ctypes", "_ctypes", "cffi") for each in imports_of(path))
    }  # fmt: skip
    assert users == SCRIPTS | {"benchmarks/census.py"}  # it asks the allocator to return memory


def test_a_script_imports_nothing_of_ours() -> None:
    for name in SCRIPTS:
        assert ours(ROOT / name) == []


_SDK = {"mcp", "mcp_types", "httpx2", "pydantic"}  # one whole, of two rooms
_ASGI = {"anyio", "starlette", "uvicorn"}  # another one; the SDK's client needs anyio, too


def _user(package: str, path: Path) -> str:
    sdk = package in _SDK and name_of(path).startswith(("harness/mcp", "harness/servers/mcp"))
    asgi = package in _ASGI and name_of(path).startswith(("harness/mcp", "harness/servers"))
    ray = package == "ray" and name_of(path).startswith("harness/fleet/")
    if ray:
        return "the fleet's room"
    return "the SDK's rooms" if sdk else "the servers' rooms" if asgi else name_of(path)


def test_each_third_party_package_but_msgspec_is_imported_by_one_module() -> None:
    users: dict[str, set[str]] = {}
    for path in MODULES:
        for each in imports_of(path):
            top = each.split("/")[0]
            if top not in sys.stdlib_module_names and top not in (
                *FOLDERS,
                "cellwright",
                "msgspec",
            ):
                users.setdefault(top, set()).add(_user(top, path))
    # The SDK's rooms have what comes with the SDK; a model needs an HTTP client that streams, too.
    assert users.pop("httpx2") == {"the SDK's rooms", "harness/agent/model.py"}
    # Tables of benchmarks, and the screen of `cellwright top`.
    assert {name.rpartition("/")[2] for name in users.pop("rich")} == {
        "tables.py", "top_screen.py", "top.py",
    }  # fmt: skip
    # Data on disk, and the authority of a cell.
    assert users.pop("cryptography") == {
        "harness/user_data.py",
        "harness/sandbox/network/cell_authority.py",
    }
    # Spans of executions, and what servers export of them.
    assert users.pop("opentelemetry") == {
        "runner/audit/otel.py",
        "harness/servers/telemetry.py",
    }
    assert {package: names for package, names in users.items() if len(names) > 1} == {}
    assert "prctl" in users
    assert "pyseccomp" in users


def test_every_dependency_is_imported_and_every_import_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(each for name in extras if name != "dev" for each in extras[name]),
    ]
    distributions = {entry.split(">")[0].split("=")[0].strip() for entry in wanted}
    names = {
        "autogen-core": "autogen_core",
        "fastmcp-slim": "fastmcp",
        "google-adk": "google",
        "inspect-ai": "inspect_ai",
        "ipython": "IPython",
        "jsonschema-rs": "jsonschema_rs",
        "nvidia-ml-py": "pynvml",
        "openai-agents": "agents",
        "opentelemetry-api": "opentelemetry",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
        "opentelemetry-sdk": "opentelemetry",
        "PyYAML": "yaml",
        "pydantic-monty": "pydantic_monty",
        "pydantic-ai-slim": "pydantic_ai",
        "python-dotenv": "dotenv",
        "python-prctl": "prctl",
        "swe-rex": "swerex",
        "tomli-w": "tomli_w",
    }
    run_as_commands = {"pip"}
    declared = {names.get(each, each) for each in distributions - run_as_commands}
    used = {
        "mcp" if each.split("/")[0] in _SDK else each.split("/")[0]
        for path in MODULES for each in imports_of(path)
        if each.split("/")[0] not in sys.stdlib_module_names
        and each.split("/")[0] not in (*FOLDERS, "cellwright")
    }  # fmt: skip
    assert declared - {"httpx2"} == used - {"httpx2"}


def test_no_module_imports_our_own_packages_absolutely() -> None:
    """Relative imports only: the folders have two places, in the checkout and when installed."""
    for path in MODULES:
        if name_of(path).startswith("harness/examples/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                top = (node.module or "").split(".")[0]
            elif isinstance(node, ast.Import):
                top = node.names[0].name.split(".")[0]
            else:
                continue
            assert top not in (*FOLDERS, "cellwright"), name_of(path)


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_a_class_name_has_one_meaning_in_the_whole_tree() -> None:
    places: dict[str, list[str]] = {}
    for folder in ("harness", "runner", "policies"):
        for path in below(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(name_of(path))
    assert places["Sandbox"] == ["harness/sandbox/sandbox.py"]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_nothing_of_a_cell_is_unpickled_or_logged() -> None:
    forbidden = {"pickle", "marshal", "shelve", "logging"}
    for path in below("runner"):
        assert forbidden.isdisjoint(each.split("/")[0] for each in imports_of(path)), name_of(path)


def test_a_decoder_expects_invalid_utf_8() -> None:
    """For invalid UTF-8 msgspec raises UnicodeDecodeError, which is no msgspec.DecodeError; both are
    ValueErrors."""
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Try) or ".decode(" not in ast.unparse(node):
                continue
            caught = " ".join(ast.unparse(each.type) for each in node.handlers if each.type)
            if "msgspec.DecodeError" in caught and not re.search(
                r"UnicodeDecodeError|ValueError", caught
            ):
                found.append(f"{name_of(path)}:{node.lineno}")
    assert found == []


def test_the_gpl_package_never_loads_in_the_process_that_embeds_us() -> None:
    import subprocess

    code = (
        "import sys; import cellwright.harness.sandbox.sandbox, cellwright.runner.supervisor, "
        "cellwright.policies.compiling.compile; print('prctl' in sys.modules, '_prctl' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_importing_the_face_is_light() -> None:
    import subprocess

    code = "import sys; import cellwright; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"msgspec", "psutil", "pyseccomp", "asyncio", "ctypes", "pystemd", "prctl"}
    assert heavy.isdisjoint(done.stdout.split())


def test_each_public_name_is_listed_once_and_is_there() -> None:
    """`cellwright` reads its table of names from the imports that type checkers execute."""
    import cellwright

    (block,) = (
        node for node in ast.parse((ROOT / "cellwright/__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )  # fmt: skip
    listed = [
        alias.asname for node in block.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]  # fmt: skip
    assert sorted(listed, key=str) == cellwright.__all__
    assert len(set(listed)) == len(listed) <= 100
    for name in cellwright.__all__:
        assert getattr(cellwright, name).__name__ == name


def test_every_protection_can_still_be_switched_off() -> None:
    """Each edit of a mutation matches exactly one node: else the table in README.md would be stale."""
    from tests.mutations import misplaced

    assert misplaced() == []


def test_an_edit_of_a_mutation_ignores_the_layout_and_matches_exactly_one_node() -> None:
    from tests.mutations import (
        Edit,
        MisplacedError,
        drop,
        drop_flag,
        drop_item,
        drop_keyword,
        replace,
    )

    text = (
        'def f():\n    g(  # é\n        A |\n        B, x={"k": 1, "l": 2}, y=3)\n    h(1); h(2)\n'
    )

    def lines(edit: Edit) -> list[str]:
        return edit.apply(text).splitlines()

    assert lines(drop("", "f", "g"))[1:] == ["    pass", "    h(1); h(2)"]
    assert lines(drop("", "f", "h(2)"))[-1] == "    h(1); pass"
    assert lines(drop_flag("", "f", "B"))[2].startswith("        A, x=")
    assert lines(drop_keyword("", "f", "g", "x"))[1] == "    g(A | B, y=3)"
    assert "x={'l': 2}, y=3)" in lines(drop_item("", "f", "k"))[3]
    assert "        0, x=" in lines(replace("", "f", "A|B", "0"))[2]
    for misplaced in (
        drop("", "f", "h"),
        drop("", "f", "gone"),
        drop("", "gone", "g"),
        replace("", "f", "A|B", "0)"),
    ):
        with pytest.raises(MisplacedError):
            misplaced.apply(text)


def test_each_protection_has_a_test_of_its_layer_and_a_payload_that_fail_without_it() -> None:
    """The table names them, and they exist."""
    from tests.mutations import is_asked, noticed, tables

    for table in tables():
        rows = table.rows_so_far()
        assert rows.keys() == {each.layer for each in table.mutations}
        for mutation in table.mutations:
            test, *payloads = noticed(rows[mutation.layer])
            assert is_asked(mutation, test), (mutation.layer, test)
            assert len(payloads) == table.has_payloads
        for layer, row in rows.items():
            assert all(map(_exists, noticed(row))), layer


def _exists(name: str) -> bool:
    file, found, test = name.partition("::")
    function = f"def {test.partition('[')[0]}("
    places = (ROOT / "tests").rglob(file) if found else ()
    return any(function in path.read_text() for path in places)


def test_each_payload_of_ours_is_described_and_has_its_verdict() -> None:
    """python -m tests.escapes.verdicts writes them."""
    folder = ROOT / "tests" / "escapes"
    ours = {path.name.partition("_")[0] for path in (folder / "payloads").glob("LAY-*")}
    for document in (folder / "VERDICTS.md", folder / "payloads" / "README.md"):
        lines = document.read_text().splitlines()
        assert ours == {line[2:8] for line in lines if line.startswith("| LAY-")}
