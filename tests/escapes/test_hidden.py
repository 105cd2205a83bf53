"""Hidden paths: what lies beneath a shown directory and must look empty all the same."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox
from cellwright.policies.policy import Filesystem
from tests.conftest import policy_named
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
        assert sandbox.execute(f"import os; os.listdir({str(data / 'secrets')!r})").value == []
        for name in ("token", "link"):
            assert sandbox.execute(errno_of(f"open({str(data / name)!r})")).value == errno.EACCES
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
