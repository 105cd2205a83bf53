"""Packages of made tools: only those that the policy names, fetched on the host, the same at each call."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright import HostSettings, PackageError, PolicyError, Sandbox, ToolFactory
from cellwright.errors import ToolDenied, ToolFailed, ToolInvalid
from cellwright.policies.policy import Packages
from tests.conftest import OPTIONAL, policy_named
from tests.harness.packages.wheels import good_wheel, store_at

pytestmark = pytest.mark.needs("userns")
SOURCE = "import thing\ndef answer() -> int:\n    return thing.answer"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    good_wheel(folder)
    good_wheel(folder, name="needy", requires="other")
    good_wheel(folder, name="other")
    return folder


@pytest.fixture
def factory(tmp_path: Path, wheels: Path) -> Iterator[ToolFactory]:
    """A factory whose tools may have two of the three packages of the folder."""
    packages = Packages(allow=("thing", "Needy"))
    policy = replace(policy_named("strict"), packages=packages)
    store = store_at(tmp_path / "store", wheels)
    with (
        Sandbox(policy=policy, pool=0, host=HostSettings(package_store=store)) as sandbox,
        ToolFactory(sandbox, pool=0) as made,
    ):
        yield made


def test_a_tool_imports_what_it_requires_when_it_is_tested_and_called(factory: ToolFactory) -> None:
    made = factory.create_tool(
        "answer", "Answers.", SOURCE, tests=[({}, 42)], requirements=["Thing >=1"]
    )
    assert made.requirements == ("Thing>=1",)
    assert made.provenance.packages == ("thing==1.0",)
    assert factory.call("answer") == 42
    assert factory.run_tests("answer") == 1
    # Another tool of the same factory has it not.
    with pytest.raises(Exception, match="No module named 'thing'"):
        factory.create_tool(
            "bare", "Has none.", SOURCE.replace("answer()", "bare()"), tests=[({}, 42)]
        )


def test_the_version_with_which_it_was_tested_stays(factory: ToolFactory, wheels: Path) -> None:
    made = factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"])
    assert factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"]) == made
    for wheel in wheels.iterdir():
        wheel.unlink()  # nothing is fetched for a call
    assert factory.call("answer") == 42


def test_a_session_calls_a_tool_that_has_packages(factory: ToolFactory) -> None:
    factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"])
    with (
        Sandbox(policy=policy_named("strict"), tools=factory, pool=0) as sandbox,
        sandbox.session() as session,
    ):
        assert session.execute("import tools\ntools.answer()").value == 42
        alone = session.execute("import thing")
    assert "No module named 'thing'" in str(alone.error)  # the tool's package is not the session's


@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        ("other", "not among the packages that tools may have: other"),
        ("thing @ https://example.org/thing.whl", "must not name an address"),
        ("--index-url=https://example.org", "must be requirements"),
        ("thing\nother", "must be requirements"),
        ("nosuch", "use needy, thing, or the standard library"),
        ("th1ng", "not among the packages"),  # a name that is easily confused
        ("th\N{CYRILLIC SMALL LETTER BYELORUSSIAN-UKRAINIAN I}ng", "requirements"),
        ("thing @ git+https://example.org/thing", "must not name an address"),
        ("thing @ file:///etc", "must not name an address"),
        (
            "git+https://example.org/thing",
            "must not name an address (URL), got 'git+https://example.org/thing'",
        ),
        ("./thing", "must be requirements"),
        ("/etc/thing.whl", "must be requirements"),
        ("-r /etc/passwd", "must be requirements"),
        ("-e .", "must be requirements"),
        ("thing --index-url https://example.org", "must be requirements"),
        ("thing\n--index-url https://example.org", "requirements"),
        ("thing --hash=sha256:00", "must be requirements"),
        ("${HOME}", "must be requirements"),
        ("other; python_version > '3'", "not among the packages"),
        ("other[thing]", "not among the packages"),
        ("thing" + " " * 3000, "requirements"),
    ],
)
def test_a_requirement_beyond_the_policy_is_refused(
    factory: ToolFactory, requirement: str, why: str
) -> None:
    with pytest.raises(Exception, match=".") as refused:
        factory.create_tool("answer", "Answers.", SOURCE, requirements=[requirement])
    assert why in f"{refused.value}"
    assert factory.list_tools() == []


def test_a_dependency_beyond_the_policy_is_refused(factory: ToolFactory) -> None:
    with pytest.raises(PackageError, match=r"packages\.allow: must have other"):
        factory.create_tool("answer", "Answers.", SOURCE, requirements=["needy"])


def test_an_extra_brings_no_package_that_the_policy_does_not_name(
    factory: ToolFactory, wheels: Path
) -> None:
    good_wheel(wheels, name="thing", requires='other; extra == "more"\nProvides-Extra: more')
    made = factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"])
    assert made.provenance.packages == ("thing==1.0",)
    with pytest.raises(PackageError, match=r"packages\.allow: must have other"):
        factory.create_tool("more", "More.", SOURCE, requirements=["thing[more]"])


def test_ten_thousand_requirements_are_refused_before_any_is_looked_up(
    factory: ToolFactory, tmp_path: Path
) -> None:
    many = [f"thing>={number}" for number in range(10_000)]
    with pytest.raises(ToolInvalid, match="requirements: must be at most"):
        factory.create_tool("answer", "Answers.", SOURCE, requirements=many)
    assert not (tmp_path / "store").exists()


def test_a_policy_without_a_list_allows_no_package(tmp_path: Path, wheels: Path) -> None:
    store = store_at(tmp_path / "store", wheels)
    with (
        Sandbox(
            policy=policy_named("strict"), pool=0, host=HostSettings(package_store=store)
        ) as sandbox,
        ToolFactory(sandbox, pool=0) as factory,
        pytest.raises(PolicyError, match="tools may have: thing"),
    ):
        factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"])
    assert not (tmp_path / "store").exists()  # no index was asked


def test_the_embedding_program_may_require_anything(tmp_path: Path, wheels: Path) -> None:
    store = store_at(tmp_path / "store", wheels)
    with ToolFactory(package_store=store, optional_layers=OPTIONAL, pool=0) as factory:
        made = factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing", "needy"])
        assert made.provenance.packages == ("needy==1.0", "other==1.0", "thing==1.0")
        assert factory.call("answer") == 42


def test_an_exported_tool_asks_for_its_packages(factory: ToolFactory, tmp_path: Path) -> None:
    factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"])
    folder = factory.export_tool("answer", tmp_path / "out")
    factory.remove_tool("answer")
    with pytest.raises(ToolDenied, match="the package thing"):
        factory.import_tool(folder)
    assert factory.import_tool(folder, grant=True).provenance.packages == ("thing==1.0",)
    assert factory.call("answer") == 42


def test_a_caller_cannot_claim_packages_for_a_tool(factory: ToolFactory) -> None:
    from cellwright.harness.schemas.spec import Provenance

    claimed = Provenance(packages=("other==1.0",))
    made = factory.create_tool("f", "d", "def f() -> int:\n    return 1", provenance=claimed)
    assert made.provenance.packages == ()


def test_a_set_that_is_gone_is_an_error_of_the_host_and_retires_no_tool(
    factory: ToolFactory, tmp_path: Path, wheels: Path
) -> None:

    factory.create_tool("answer", "Answers.", SOURCE, requirements=["thing"])
    import shutil

    for each in wheels.iterdir():
        each.unlink()
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(ToolFailed, match="thing"):
        factory.call("answer")
    assert factory.registry.usage("answer").failures == 0
