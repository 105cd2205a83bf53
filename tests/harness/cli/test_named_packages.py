"""Names of packages that `cellwright run` and `cellwright env` refuse, and their exit statuses."""

import pytest

from cellwright.harness.cli.exit_status import status_of
from cellwright.harness.sandbox.packages.lock import require_extra
from cellwright.policies.errors import PackageError, PackageNotFound
from tests.harness.test_cli import cellwright


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["env", "show", "numpy"], "no set begins with 'numpy'"),
        (["env", "remove", "numpy"], "no set begins with 'numpy'"),
        (["run", "-c", "1", "--packages", "nowhere/requirements.txt"], "nowhere/requirements.txt: no such file"),
        (["run", "-c", "1", "--packages", "nowhere/pylock.toml"], "nowhere/pylock.toml: no such file"),
        (["run", "-c", "1", "--python", "3.99"], "python: there is no Python 3.99"),
        (["run", "-c", "1", "--python", "/nowhere/python"], "python: cannot start /nowhere/python"),
        (["run", "-c", "1", "--backend", "oci", "--runtime", "/nowhere/crun"], "runtime: /nowhere/crun is not installed"),
    ],
)  # fmt: skip
def test_a_name_of_something_that_is_not_there_is_wrong_usage(
    command: list[str], said: str
) -> None:
    done = cellwright(*command)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_missing_extra_is_wrong_usage_and_still_a_package_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PackageNotFound, match="the extra is not installed"):
        require_extra()
    assert issubclass(PackageNotFound, PackageError)
    assert status_of(PackageNotFound("packages"), is_command=False) == 2


@pytest.mark.parametrize("command", [["run", "-c", "1", "--packages"], ["env", "lock"]])
@pytest.mark.parametrize(
    "given",
    ["git+https://x.example/y", "https://x.example/y.whl", "y @ https://x.example/y.whl", "file:///y/pylock.toml"],
)  # fmt: skip
def test_a_url_is_refused_as_it_was_written_with_what_is_accepted(
    command: list[str], given: str
) -> None:
    done = cellwright(*command, given)
    assert done.returncode == 2
    assert f"must not name an address (URL), got {given!r}\n" in done.stderr
    assert "hint: use a requirement such as 'pandas==2.3.*', or the file pylock.toml" in done.stderr
