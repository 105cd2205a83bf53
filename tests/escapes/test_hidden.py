"""Hidden paths: they lie beneath a shown directory and do not exist in a cell, even after somebody has
made, renamed or replaced them."""

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import FilePermission, PermissionLevel, PermissionSet, PolicyError, Sandbox
from cellwright.harness.sandbox.faces.permissions import policy_of
from cellwright.policies.errors import SessionLost
from cellwright.policies.policy import Filesystem, Policy
from cellwright.runner.launching.covers import Covers
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, policy_named
from tests.escapes.without import errno_of, sandbox_with_plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = Path("/srv") if os.access("/srv", os.W_OK) else tmp_path_factory.mktemp("srv")
    root = place / f"cellwright-test-{os.getpid()}"
    (root / "secrets" / "deep").mkdir(parents=True)
    (root / "secrets" / "key").write_text("SECRET")
    (root / "secrets" / "deep" / "key").write_text("SECRET")
    (root / "token").write_text("SECRET")
    (root / "open").write_text("open")
    (root / "link").symlink_to("token")
    yield root
    for path in sorted(root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
    root.rmdir()


def files(data: Path) -> Filesystem:
    return Filesystem(read=(str(data),), hidden=(str(data / "secrets"), str(data / "token")))


def everything(data: Path) -> str:
    return (
        f"import os\nfound = []\nfor top, _, names in os.walk({str(data)!r}):\n"
        "    for name in names:\n"
        "        try: found.append(open(os.path.join(top, name)).read())\n"
        "        except OSError: pass\nfound"
    )


@pytest.mark.parametrize("pool", [0, 1])
def test_what_is_hidden_cannot_be_read(data: Path, pool: int) -> None:
    with Sandbox(policy=policy_named("strict", filesystem=files(data)), pool=pool) as sandbox:
        assert sandbox.execute(everything(data)).value == ["open"]
        assert sandbox.execute(f"import os; sorted(os.listdir({str(data)!r}))").value == [
            "link",
            "open",
        ]
        for name in ("token", "link", "secrets"):
            assert sandbox.execute(errno_of(f"os.stat({str(data / name)!r})")).value == errno.ENOENT
        result = sandbox.execute(errno_of(f"open({str(data / 'secrets' / 'key')!r})"))
        assert result.value == errno.ENOENT
        assert [each.rule for each in result.violations] == ["mount_ns: not shown"]


def test_without_hiding_it_can_be_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_named("strict", filesystem=files(data))
    with sandbox_with_plan(monkeypatch, policy, hidden=()) as sandbox:
        assert sandbox.execute(everything(data)).value.count("SECRET") == 4


def test_hidden_stays_hidden_where_the_rest_is_writable(data: Path) -> None:
    filesystem = Filesystem(write=(str(data),), hidden=(str(data / "secrets"), str(data / "token")))
    with Sandbox(policy=policy_named("strict", filesystem=filesystem), pool=0) as sandbox:
        assert sandbox.execute(everything(data)).value == ["open"]
        for attempt in (
            f"os.rename({str(data / 'secrets')!r}, {str(data / 'x')!r})",
            f"os.unlink({str(data / 'token')!r})",
            f"open({str(data / 'token')!r}, 'w')",
            f"os.link({str(data / 'token')!r}, {str(data / 'y')!r})",
        ):
            assert sandbox.execute(errno_of(attempt)).value != 0, attempt
    assert (data / "token").read_text() == "SECRET"


@pytest.fixture
def project() -> Iterator[Path]:
    """A project that every user may write, with a `.env`, a key two directories down, and more."""
    place = "/srv" if os.access("/srv", os.W_OK) else "/var/tmp"
    with tempfile.TemporaryDirectory(dir=place, prefix="cellwright-project-") as name:
        root = Path(name)
        (root / "conf" / "secrets").mkdir(parents=True)
        (root / ".git").mkdir()
        for path in (root / ".env", root / ".git" / "config", root / "conf" / "secrets" / "key"):
            path.write_text("SECRET")
        (root / "main.py").write_text("open")
        for path in (root, *root.rglob("*")):
            path.chmod(0o777)
        yield root


def permitted(project: Path, level: PermissionLevel, **given: Any) -> Policy:
    permission = FilePermission(level=level, allowed_paths=[str(project)], **given)
    return replace(policy_of(PermissionSet([permission])), optional_layers=OPTIONAL)


def replace_by_rename(path: Path, text: str) -> None:
    """Put a new file in the place of another, as editors do: Linux then takes the cover away."""
    new = path.with_name("new~")
    new.write_text(text)
    new.chmod(0o644)
    new.rename(path)


READ = PermissionLevel.READ
WRITE = PermissionLevel.WRITE


@pytest.mark.parametrize("pool", [0, 2])
def test_what_is_made_or_replaced_later_does_not_exist_where_cells_only_read(
    project: Path, pool: int
) -> None:
    policy = permitted(project, READ, denied_paths=[f"{project}/*.key", f"{project}/conf/secrets"])
    with Sandbox(policy=policy, pool=pool) as sandbox, sandbox.session() as session:
        sandbox.settle()
        assert session.execute(everything(project)).value == ["open"]
        assert sandbox.execute(everything(project)).value == ["open"]
        replace_by_rename(project / ".env", "SECRET")
        (project / ".git").rename(project / ".old")
        (project / ".git").mkdir(mode=0o755)
        (project / ".git" / "config").write_text("SECRET")
        (project / "new.key").write_text("SECRET")
        (project / "conf").rename(project / "moved")
        (project / "conf" / "secrets").mkdir(parents=True)
        (project / "conf" / "secrets" / "key").write_text("SECRET")
        assert session.execute(everything(project)).value == ["open"]
        seen = sandbox.execute(f"import os; sorted(os.listdir({str(project)!r}))").value
        assert seen == ["conf", "main.py", "moved"]
        # What was moved out of a denied path is denied no more: rules are about names.
        assert sandbox.execute(errno_of(f"os.stat('{project}/conf/secrets')")).value == errno.ENOENT


@pytest.mark.parametrize("pool", [0, 2])
def test_a_new_call_sees_what_a_directory_holds_now(project: Path, pool: int) -> None:
    """Entry by entry is no snapshot: another launcher takes over once the directory has changed."""
    with Sandbox(policy=permitted(project, READ), pool=pool) as sandbox:
        sandbox.settle()
        assert sandbox.execute(f"open('{project}/main.py').read()").value == "open"
        replace_by_rename(project / "main.py", "changed")
        assert sandbox.execute(f"open('{project}/main.py').read()").value == "changed"


@pytest.mark.parametrize("pool", [0, 2])
def test_a_cover_that_is_lost_is_noticed_before_the_next_call(project: Path, pool: int) -> None:
    policy = permitted(project, WRITE, denied_paths=[f"{project}/conf/secrets"])
    with Sandbox(policy=policy, pool=pool) as sandbox, sandbox.session() as session:
        sandbox.settle()
        assert session.execute(everything(project)).value == ["open"]
        assert sandbox.execute(everything(project)).value == ["open"]
        replace_by_rename(project / ".env", "SECRET")
        with pytest.raises(SessionLost, match=r"\.env, which the policy hides, was replaced"):
            session.execute(everything(project))
        assert sandbox.execute(everything(project)).value == ["open"]


def test_a_session_goes_on_while_covers_hold(project: Path) -> None:
    """What a session makes itself, and what changes inside of what is covered, ends nothing."""
    with Sandbox(policy=permitted(project, WRITE), pool=0) as sandbox, sandbox.session() as session:
        made = f"open('{project}/.made', 'w').write('x')\nopen('{project}/made', 'w').write('x')"
        assert session.execute(made).value == 1
        (project / ".git" / "index.lock").touch()
        (project / ".env").write_text("SECRET changed in place")
        assert session.execute(f"open('{project}/.made').read()").value == "x"
        seen = session.execute(everything(project)).value
        assert sorted(seen) == ["SECRET", "open", "x", "x"]  # the one in conf/secrets
    assert (project / "made").read_text() == "x"


def test_what_lies_above_a_hidden_path_cannot_be_moved(project: Path) -> None:
    """Else the next launcher would hide nothing: it goes by names."""
    policy = permitted(project, WRITE, denied_paths=[f"{project}/conf/secrets"])
    move = f"os.rename('{project}/conf', '{project}/conf2')"
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(errno_of(move)).value == errno.EBUSY
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert sandbox.execute(everything(project)).value == ["open"]
    with Sandbox(policy=permitted(project, WRITE), pool=0) as sandbox:  # nothing beneath is hidden
        assert sandbox.execute(errno_of(move)).value == 0


def test_what_is_hidden_is_so_under_the_name_of_a_link_too(project: Path) -> None:
    """A link of root's is followed when a policy is resolved: what is denied is so by either name."""
    link = Path("/var/tmp" if os.geteuid() else "/srv") / f"cellwright-link-{os.getpid()}"
    if os.geteuid():
        pytest.skip("only the links of root are followed when a policy is resolved")
    link.symlink_to(project)
    try:
        files = Filesystem(read=(str(link), str(project)), hidden=(f"{project}/.env",))
        with Sandbox(policy=policy_named("strict", filesystem=files), pool=0) as sandbox:
            assert sandbox.execute(f"open('{link}/main.py').read()").value == "open"
            assert sandbox.execute(errno_of(f"open('{link}/.env')")).value == errno.ENOENT
    finally:
        link.unlink()


def test_more_entries_than_cells_can_bear_are_refused(project: Path) -> None:
    for number in range(5001):
        (project / "conf" / f"{number}").touch()
    with pytest.raises(PolicyError, match=r"filesystem\.hidden: .* more than 5000 entries"):
        Sandbox(policy=permitted(project, READ), pool=0)


def test_what_cells_write_beneath_what_they_read_costs_no_launcher(project: Path) -> None:
    """It lies in a directory that is shown entry by entry, and by itself."""
    (project / "out").mkdir()
    (project / "out").chmod(0o777)
    permissions = [
        FilePermission(allowed_paths=[str(project)]),
        FilePermission(level=WRITE, allowed_paths=[f"{project}/out"]),
    ]
    policy = replace(policy_of(PermissionSet(permissions)), optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as sandbox:
        launcher = inspect(sandbox).supervisor.generation
        for name in ("a", "b"):
            made = sandbox.execute(f"open('{project}/out/{name}', 'w').write('x')")
            assert made.value == 1, made.error
        assert sandbox.execute(f"import os; sorted(os.listdir('{project}/out'))").value == [
            "a",
            "b",
        ]
        assert inspect(sandbox).supervisor.generation is launcher


@pytest.mark.parametrize("pool", [0, 2])
def test_a_denied_name_made_later_is_noticed_before_the_next_call(project: Path, pool: int) -> None:
    """However deep, and in a directory that was made later itself."""
    policy = permitted(project, WRITE, denied_paths=[f"{project}/**/*.key"])
    with Sandbox(policy=policy, pool=pool) as sandbox, sandbox.session() as session:
        sandbox.settle()
        assert (
            session.execute(everything(project)).value == sandbox.execute(everything(project)).value
        )
        seen = sandbox.execute(everything(project)).value
        (project / "later" / "deep").mkdir(parents=True)
        for path in (project / "later", project / "later" / "deep"):
            path.chmod(0o777)
        assert session.execute(everything(project)).value == seen
        (project / "later" / "deep" / "new.key").write_text("LATER")
        # A second ago: a directory that changed within the last clock tick is read again in any case.
        os.utime(project / "later" / "deep", ns=(0, time.time_ns() - 10**9))
        with pytest.raises(SessionLost, match=r"later/deep/new\.key, which the policy hides"):
            session.execute(everything(project))
        assert sandbox.execute(everything(project)).value == seen


def test_without_looking_for_late_names_one_is_shown(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Covers, "watch", lambda *_: None)
    policy = permitted(project, WRITE, denied_paths=[f"{project}/*.key"])
    with Sandbox(policy=policy, pool=0) as sandbox:
        seen = sandbox.execute(everything(project)).value
        (project / "new.key").write_text("LATER")
        assert sorted(sandbox.execute(everything(project)).value) == sorted([*seen, "LATER"])


def test_names_that_are_not_denied_cost_no_launcher(project: Path) -> None:
    with Sandbox(policy=permitted(project, WRITE), pool=0) as sandbox:
        launcher = inspect(sandbox).supervisor.generation
        (project / "made").touch()
        assert sandbox.execute(f"open('{project}/more', 'w').write('x')").value == 1
        assert sandbox.execute("1 + 1").value == 2
        assert inspect(sandbox).supervisor.generation is launcher
