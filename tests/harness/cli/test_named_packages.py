"""Names of packages that `cellwright run` and `cellwright env` refuse, and their exit statuses."""

import pytest

from tests.harness.test_cli import cellwright


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
