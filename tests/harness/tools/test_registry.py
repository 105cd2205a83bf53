"""The registry: what is committed stays, names belong to somebody, and what keeps failing is retired."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import ToolRegistry, ToolSpec
from cellwright.errors import RegistryError, ToolDenied, ToolExists, ToolNotFound, ToolQuotaExceeded
from cellwright.harness.tools import tool_store as store
from cellwright.harness.tools.tool_store import ToolStore
from cellwright.tools import Provenance, ToolState
from tests.conftest import ROOT
from tests.forked import exit_code_of

DOUBLE = ToolSpec(
    name="double", description="Double a number", source_code="def double(n): return n * 2"
)


def spec(name: str, maker: str = "", **more: object) -> ToolSpec:
    return replace(DOUBLE, name=name, provenance=Provenance(maker=maker), **more)


@pytest.fixture
def registry() -> Iterator[ToolRegistry]:
    with ToolRegistry() as registry:
        yield registry


def greet(name: str) -> str:
    """Greet somebody."""
    return f"hello {name}"


# versions and names


def test_the_next_tool_of_a_name_is_its_next_version_and_the_old_one_stays(
    registry: ToolRegistry,
) -> None:
    registry.add(spec("double"))
    registry.add(spec("double", source_code="other"))
    assert registry.get("double").version == 2
    assert registry.get("double@1").source_code == DOUBLE.source_code
    assert [each.version for each in registry.versions("double")] == [1, 2]
    assert [each.reference for each in registry.list_tools()] == ["double@2"]


def test_a_tool_is_found_however_its_name_is_separated(registry: ToolRegistry) -> None:
    registry.add(spec("send-mail"))
    assert registry.get("Send_Mail").name == "send-mail"
    registry.add(spec("send.mail"))
    assert [each.reference for each in registry.list_tools()] == ["send.mail@2"]


@pytest.mark.parametrize("name", ["nothing", "double@2", "double@1", "../double", "", "double@x"])
def test_a_missing_tool_is_not_found(registry: ToolRegistry, name: str) -> None:
    with pytest.raises(ToolNotFound):
        registry.get(name)


def test_a_number_is_not_given_twice_even_if_the_tool_was_removed(registry: ToolRegistry) -> None:
    registry.add(spec("double"))
    registry.remove("double")
    with pytest.raises(ToolNotFound):
        registry.get("double@1")
    assert registry.add(spec("double", "somebody else")).version == 2


def picking(number: int) -> Callable[[], int]:
    def pick() -> int:
        """Pick a number."""
        return number

    return pick


# owners of descriptors


def test_a_made_tool_never_shadows_a_developers(registry: ToolRegistry) -> None:
    registry.register(greet)
    for name in ("greet", "GREET"):
        with pytest.raises(ToolExists) as caught:
            registry.add(spec(name.lower()))
        assert caught.value.existing == "greet"
    assert registry.get("greet").state is ToolState.TRUSTED


def test_a_developers_tool_hides_one_that_was_made_before(registry: ToolRegistry) -> None:
    registry.add(spec("gre.et"))

    def gre_et(name: str) -> str:
        return name

    registry.register(gre_et)
    assert registry.get("gre-et").owner.value == "developer"
    assert len(registry.list_tools()) == 1


def test_two_functions_of_one_name_are_refused_and_the_same_one_is_not(
    registry: ToolRegistry,
) -> None:
    registry.register(greet)
    registry.register(greet)

    def other(x: int) -> int:
        return x

    other.__name__ = "greet"
    with pytest.raises(ToolExists):
        registry.register(other)


def test_a_function_with_the_name_and_the_signature_of_another_is_refused(
    registry: ToolRegistry,
) -> None:
    """Otherwise the first of them is called in its place."""
    first, second = picking(1), picking(2)
    registry.register(first)
    registry.register(first)
    with pytest.raises(ToolExists):
        registry.register(second)


def test_a_maker_cannot_replace_or_remove_the_tool_of_another(registry: ToolRegistry) -> None:
    registry.add(spec("double", "ann"))
    with pytest.raises(ToolExists, match="another agent"):
        registry.add(spec("double", "bob"))
    with pytest.raises(ToolDenied, match="another agent"):
        registry.remove("double", "bob")
    registry.remove("double", "ann")
    registry.add(spec("double", "bob"))


def test_a_developers_tool_cannot_be_removed(registry: ToolRegistry) -> None:
    registry.register(greet)
    for call in (
        lambda: registry.remove("greet"),
        lambda: registry.set_state("greet", ToolState.RETIRED),
    ):
        with pytest.raises(ToolDenied, match="developer"):
            call()


# counting and retirement


def test_uses_and_failures_are_counted(registry: ToolRegistry) -> None:
    made = registry.add(spec("double"))
    for well in (True, True, False, False, True, False):
        registry.note(made, well=well)
    assert registry.usage("double") == (6, 3, 1)


def test_ten_failures_in_a_row_retire_a_tool(registry: ToolRegistry) -> None:
    made = registry.add(spec("double"))
    for number in range(25):  # nine, and one that goes well, and again
        registry.note(made, well=number % 10 == 9)
    assert registry.get("double").state is ToolState.DRAFT
    for _ in range(5):
        registry.note(made, well=False)
    assert registry.get("double").state is ToolState.RETIRED
    assert registry.list_tools() == []
    assert len(registry.list_tools(retired=True)) == 1
    assert registry.set_state("double", ToolState.TRUSTED).state is ToolState.TRUSTED
    registry.note(made, well=False)
    assert registry.get("double").state is ToolState.TRUSTED


def test_calls_for_others_neither_retire_a_tool_nor_save_it(registry: ToolRegistry) -> None:
    made = registry.add(spec("double"))
    for _ in range(20):
        registry.note(made, well=False, may_retire=False)
    assert registry.get("double").state is ToolState.DRAFT
    assert registry.usage("double") == (20, 20, 0)
    for _ in range(10):
        registry.note(made, well=False)
        registry.note(made, well=True, may_retire=False)
    assert registry.get("double").state is ToolState.RETIRED


def test_failures_of_several_processes_are_in_one_row(tmp_path: Path) -> None:
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path) as one, ToolRegistry(path) as other:
        made = one.add(spec("double"))
        for number in range(10):
            (one if number % 2 else other).note(made, well=False)
        assert one.get("double").state is ToolState.RETIRED
        assert other.get("double").state is ToolState.RETIRED


def test_a_call_does_not_fail_because_it_cannot_be_counted(tmp_path: Path) -> None:
    with ToolRegistry(str(tmp_path / "tools.db")) as registry:
        made = registry.add(spec("double"))
        registry._made._store._database._db.execute("PRAGMA query_only = ON")
        for well in (True, False, True):
            registry.note(made, well=well)
        with pytest.raises(RegistryError):
            registry.flush()
        registry._made._store._database._db.execute("PRAGMA query_only = OFF")
        registry.note(made, well=False)
        assert registry.usage("double") == (4, 2, 1)


def test_what_the_broker_answers_itself_is_no_name_for_a_tool(registry: ToolRegistry) -> None:
    with pytest.raises(ToolExists, match="broker"):
        registry.add(spec("results.read"))


def test_counts_are_there_after_closing(tmp_path: Path) -> None:
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path) as registry:
        made = registry.add(spec("double"))
        for _ in range(3):
            registry.note(made, well=True)
    with ToolRegistry(path) as registry:
        assert registry.usage("double") == (3, 0, 0)


# one file, many users


def test_what_one_process_adds_another_finds(tmp_path: Path) -> None:
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path) as one, ToolRegistry(path) as other:
        one.add(spec("double"))
        assert other.get("double").version == 1
        one.add(spec("double", source_code="new"))
        assert other.get("double").version == 2
        other.remove("double")
        with pytest.raises(ToolNotFound):
            one.get("double")


ADDING = """
import sys
from cellwright import ToolRegistry, ToolSpec
path, start, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
registry = ToolRegistry(path)
for number in range(start, start + count):
    registry.add(ToolSpec(name="shared", source_code=str(number)))
    print(registry.add(ToolSpec(name=f"tool{number}", source_code="x" * 5000)).name, flush=True)
"""


def adding(path: Path, start: int, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ADDING, str(path), str(start), str(count)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )


def test_processes_that_write_at_a_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tools.db"
    running = [adding(path, number * 1000, 25) for number in range(3)]
    for process in running:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with ToolRegistry(str(path)) as registry:
        assert len(registry.list_tools()) == 76
        assert [each.version for each in registry.versions("shared")] == list(range(1, 76))


def test_threads_that_write_at_a_time_lose_nothing(tmp_path: Path) -> None:
    with ToolRegistry(str(tmp_path / "tools.db")) as registry:

        def work() -> None:
            for _ in range(20):
                registry.note(registry.add(spec("double")), well=True)
                registry.list_tools()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert registry.get("double").version == 80


def test_kill_9_at_any_point_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """Every name that the child printed was committed before; it is killed after each of the first,
    at whatever point of the next transaction it is."""
    path = tmp_path / "tools.db"
    told: set[str] = set()
    for round in range(12):
        child = adding(path, round * 1000, 500)
        assert child.stdout is not None
        told |= {child.stdout.readline().strip() for _ in range(1 + round * 3)}
        child.send_signal(signal.SIGKILL)
        told |= set(child.stdout.read().split("\n")[:-1])
        child.wait()
        child.stdout.close()
    with ToolRegistry(str(path)) as registry:
        kept = {each.name for each in registry.list_tools()}
        assert len(told) > 100
        assert told <= kept
        assert len(kept - told - {"shared"}) <= 12  # committed, and killed before it could say so
        versions = [each.version for each in registry.versions("shared")]
        assert versions == list(range(1, len(versions) + 1))
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_ten_thousand_tools_are_all_there(tmp_path: Path) -> None:
    """How soon is measured by `cellwright bench tools`."""
    path = str(tmp_path / "tools.db")
    with contextlib.closing(ToolStore(path)) as store:
        store.fill(spec(f"tool_{number}") for number in range(10_000))
    with ToolRegistry(path) as registry:
        assert len(registry.list_tools()) == 10_000
        assert registry.get("tool-9999").name == "tool_9999"


# bad days


def test_the_file_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "tools.db"
    with ToolRegistry(str(path)) as registry:
        registry.add(spec("double"))
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RegistryError, match="link"):
        ToolRegistry(str(tmp_path / "link"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "content", [b"no database at all, but long enough" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_file_that_is_no_database_is_a_registry_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tools.db"
    path.write_bytes(content)
    with pytest.raises(RegistryError, match="tools.db"):
        ToolRegistry(str(path))
    assert path.read_bytes() == content


def test_another_programs_database_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "tools.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE tools (mine)")
    other.close()
    with pytest.raises(RegistryError, match="another program"):
        ToolRegistry(str(path))


@pytest.mark.parametrize("place", ["missing/tools.db", "", "file/tools.db"])
def test_a_place_without_a_file_is_an_error_of_ours(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RegistryError, match="cannot open"):
        ToolRegistry(str(tmp_path / place))


def test_a_file_with_flipped_bytes_is_an_error_of_ours_or_right(tmp_path: Path) -> None:
    path = tmp_path / "tools.db"
    with ToolRegistry(str(path)) as registry:
        for number in range(50):
            registry.add(spec(f"tool{number}", description="x" * 2000))
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 60):
        broken = bytearray(whole)
        broken[place : place + 16] = bytes(byte ^ 0xFF for byte in broken[place : place + 16])
        path.write_bytes(broken)
        try:
            with ToolRegistry(str(path)) as registry:
                for each in registry.list_tools():
                    assert each.source_code == DOUBLE.source_code
                registry.add(spec("more"))
        except RegistryError as error:
            assert str(path) in str(error)


def test_a_changed_record_is_told_from_a_tool(tmp_path: Path) -> None:
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path) as registry:
        registry.add(spec("double", source_hash="0" * 64))
        with pytest.raises(RegistryError, match="damaged"):
            registry.get("double")


def test_a_full_disk_is_an_error_and_what_was_there_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path) as registry:
        registry.add(spec("double"))
        pages = registry._made._store._database._db.execute("PRAGMA page_count").fetchone()[0]
        registry._made._store._database._db.execute(
            f"PRAGMA max_page_count = {pages}"
        )  # as SQLITE_FULL
        with pytest.raises(RegistryError, match="full"):
            registry.add(spec("large", description="x" * 100_000))
        assert [each.name for each in registry.list_tools()] == ["double"]
        registry._made._store._database._db.execute("PRAGMA max_page_count = 100000")
        registry.add(spec("large", description="x" * 100_000))
    with ToolRegistry(path) as registry:
        assert len(registry.list_tools()) == 2


def test_a_file_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    with ToolRegistry(str(tmp_path / "tools.db")) as registry:
        registry.add(spec("double"))
        registry._made._store._database._db.execute("PRAGMA query_only = ON")
        assert registry.get("double").version == 1
        with pytest.raises(RegistryError, match="readonly"):
            registry.add(spec("other"))


def test_too_many_versions_are_refused(
    registry: ToolRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_VERSIONS", 3)
    for _ in range(3):
        registry.add(spec("double"))
    with pytest.raises(RegistryError, match="full"):
        registry.add(spec("double"))


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    with ToolRegistry(str(tmp_path / "tools.db")) as registry:
        registry.add(spec("double"))

        def use() -> None:
            with pytest.raises(RegistryError):
                registry.get("double")
            registry.close()

        assert exit_code_of(use) == 0
        registry.add(spec("double"))
        assert registry.get("double").version == 2


def test_a_closed_registry_says_so(tmp_path: Path) -> None:
    registry = ToolRegistry(str(tmp_path / "tools.db"))
    registry.close()
    registry.close()
    with pytest.raises(RegistryError, match="closed"):
        registry.list_tools()


# doing the same


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("Double a number", "Doubles the number", True),
        ("Validate an email address", "validates email addresses", True),
        ("Convert Celsius to Fahrenheit", "Convert Fahrenheit to Celsius", False),
        ("Add two numbers", "Multiply two numbers", False),
        ("", "", False),
        ("Double", "Double", False),
    ],
)
def test_the_same_words_for_the_same_shape_are_the_same_tool(
    registry: ToolRegistry, one: str, other: str, alike: bool
) -> None:
    parameters = {"properties": {"x": {"type": "number"}}, "required": ["x"]}
    registry.add(spec("first", description=one, parameters=parameters))
    renamed = {"properties": {"y": {"type": "number"}}, "required": ["y"]}
    second = spec("second", description=other, parameters=renamed)
    assert (registry.alike(second) is not None) == alike
    assert registry.alike(replace(second, parameters={"properties": {}})) is None


def test_the_same_source_under_another_name_is_the_same_tool(registry: ToolRegistry) -> None:
    source = "def {0}(n: int) -> int:\n\n    return {0}(n - 1) if n else 0{1}"
    registry.add(
        spec("one", description="Count down", source_code=source.format("one", " "), function="one")
    )
    other = spec(
        "two", description="Other words", source_code=source.format("two", "\n"), function="two"
    )
    found = registry.alike(other)
    assert found is not None
    assert found.name == "one"
    assert registry.alike(replace(other, source_code=other.source_code.replace("0", "1"))) is None
    assert registry.alike(replace(other, source_code="", function="")) is None


@pytest.mark.parametrize(("cap", "most"), [("maker_bytes", 20_000), ("maker_versions", 8)])
def test_one_maker_has_only_so_much_room_and_leaves_the_others_theirs(
    tmp_path: Path, cap: str, most: int
) -> None:
    def made(number: int, maker: str = "alice") -> ToolSpec:
        return spec(f"t{number}", maker, description="x" * 2000)

    def fill(registry: ToolRegistry) -> None:
        for number in range(20):
            registry.add(made(number))

    caps: dict[str, Any] = {cap: most}
    path = str(tmp_path / "tools.db")
    with ToolRegistry(path, **caps) as registry:
        with pytest.raises(
            ToolQuotaExceeded, match=f"more than {most}\nhint: .* raise {cap}"
        ) as told:
            fill(registry)
        kept = len(registry.list_tools())
        assert 5 <= kept <= 8
        assert told.value.tool == f"t{kept}"
    with ToolRegistry(path, **caps) as registry:
        with pytest.raises(ToolQuotaExceeded):
            registry.add(made(0))  # a version more
        registry.add(made(100, "bob"))
        registry.remove("t0", "alice")
        registry.add(made(kept))
        assert len(registry.list_tools()) == kept + 1


def test_removed_names_do_not_pile_up(
    registry: ToolRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_REMOVED", 5)
    registry.add(spec("kept"))
    for _ in range(2):
        registry.add(spec("often"))
    registry.remove("often")
    for number in range(20):
        registry.add(spec(f"t{number}"))
        registry.remove(f"t{number}")
    db = registry._made._store._database._db
    assert db.execute("SELECT count(*) FROM tools").fetchone() == (6,)
    assert registry.add(spec("often")).version == 3


def test_a_tool_does_not_resemble_itself_or_one_that_is_retired(registry: ToolRegistry) -> None:
    registry.add(spec("double"))
    assert registry.alike(spec("Dou.ble".lower())) is not None
    assert registry.alike(spec("double")) is None
    registry.set_state("double", ToolState.RETIRED)
    assert registry.alike(spec("twice")) is None
