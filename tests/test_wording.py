"""scripts/words: it finds each phrase of its table, and is quiet on good text."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

BAD = (
    "the cap, 8 unless told",
    "it is none of ours",
    "a value that makes no sense",
    "whoever connects",
    "the writer waits himself",
    "output that nobody reads",
    "a caller who has no name",
    "# who waits is woken",
    "a list of who calls",
    "refused all the same",
)
GOOD = (
    "the cap, default 8",
    "invalid value",
    "the server closes idle connections",
    "none of the cells is left",
    "the person who approves a call",
    "name the user whose id a cell has",
)


# Names of real registries of packages and images, in two halves so that none stands here either.
REGISTRIES = re.compile(
    r"(?<![\w-])(?:pypi|pythonhosted|anaconda|conda|npmjs|yarnpkg|jsr|crates|rubygems|packagist|nuget|hex"
    r"|golang|debian|ubuntu|alpinelinux|fedoraproject|maven|docker|ghcr|quay|gcr)"
    r"\.(?:org|io|com|net|dev|pm|apache\.org)\b",
    re.IGNORECASE,
)

NAMING_HOSTS = {"harness/sandbox/projects/known.toml", "harness/sandbox/images/image_names.py"}


@pytest.mark.needs("git")
def test_no_registry_of_packages_is_named() -> None:
    """An example names a host of example.org; the product asks the index that the user's settings name.
    Only the list of hosts that `cellwright exec --allow-registries` allows has their names, and names of
    images have Docker's by default."""
    assert REGISTRIES.search("https://files." + "pythonhosted" + ".org/")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = {name for name in listed.stdout.decode().split("\0") if name}
    found = [
        f"{name}: {match[0]}"
        for name in sorted(names - NAMING_HOSTS)
        if (ROOT / name).is_file()
        for match in REGISTRIES.finditer((ROOT / name).read_text(errors="replace"))
    ]
    assert found == []


def words(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "words", path], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("text", BAD)
def test_a_phrase_that_readers_stumble_over_is_found_with_its_line(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "text.md"
    file.write_text(f"{GOOD[0]}\n{text}\n")
    done = words(file)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{file}:2: ")


@pytest.mark.parametrize("word", ["What", "Who", "Where", "How", "Whether"])
def test_a_module_begins_with_a_noun(word: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'"""{word} a cell sees."""\n')
    assert words(file).returncode == 1
    file.write_text('"""The view of a cell."""\n\n\ndef f() -> None:\n    """What it sees."""\n')
    assert (words(file).returncode, words(file).stdout) == (0, "")


@pytest.mark.parametrize(
    "code",
    [
        "MOST = 8  # of one client\n",
        "# what a cell sees\nX = 1\n",
        'def f():\n    """What it sees."""\n',
    ],
)
def test_a_comment_of_the_product_begins_with_its_subject(code: str, tmp_path: Path) -> None:
    def found(text: str) -> int:
        (tmp_path / "runner").mkdir(exist_ok=True)
        (tmp_path / "runner" / "module.py").write_text(f'"""A module."""\n\n{text}')
        return subprocess.run(
            [ROOT / "scripts" / "words", "runner/module.py"],
            cwd=tmp_path,
            check=False,
            capture_output=True,
        ).returncode

    assert found(code) == 1
    assert (
        found(
            "MOST = 8  # requests of one client\n# A rule in two lines, the second\n# of which is no start.\n"
        )
        == 0
    )


def test_good_text_is_not_complained_about(tmp_path: Path) -> None:
    file = tmp_path / "text.md"
    file.write_text("\n".join(GOOD))
    assert (words(file).returncode, words(file).stdout) == (0, "")
