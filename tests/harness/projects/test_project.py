"""Which directory is the project, which of git belong to it, and what is protected there."""

import os
import subprocess
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.projects.project import Project, find_project


def git(where: Path, *arguments: str) -> None:
    user = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *user, *arguments], cwd=where, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "main"
    place.mkdir()
    git(place, "init", "-q")
    (place / "a").write_text("a")
    git(place, "add", ".")
    git(place, "commit", "-qm", "first")
    return place


def protected(project: Project) -> set[str]:
    return {os.path.relpath(path, project.root) for path in project.protected}


def test_the_work_tree_around_a_directory_is_the_project(repository: Path) -> None:
    (repository / "b/c").mkdir(parents=True)
    found = find_project(repository / "b/c")
    assert (found.root, found.git) == (str(repository), ())
    assert {".git/config", ".git/hooks"} <= protected(found)
    assert f"{repository}/.git/commondir" in found.absent
    assert find_project(repository / "b/c", whole=True).root == f"{repository}/b/c"


def test_a_directory_without_git_is_its_own_project(tmp_path: Path) -> None:
    (tmp_path / ".vscode").mkdir()
    found = find_project(tmp_path, protect=("Makefile",))
    assert (found.root, protected(found)) == (str(tmp_path), {".vscode"})
    assert f"{tmp_path}/Makefile" in found.absent
    assert not find_project(tmp_path, unprotect=(".vscode",)).protected


def test_a_linked_worktree_has_the_repository_behind_protected_names(
    repository: Path, tmp_path: Path
) -> None:
    git(repository, "worktree", "add", str(tmp_path / "linked"))
    found = find_project(tmp_path / "linked")
    assert found.git == (f"{repository}/.git",)
    own = f"{repository}/.git/worktrees/linked"
    assert {
        f"{tmp_path}/linked/.git", f"{repository}/.git/hooks", f"{own}/commondir", f"{own}/gitdir",
    } <= set(found.protected)  # fmt: skip


def test_a_submodule_has_its_own_directory_of_git(repository: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "add", str(repository), "lib/inner")
    found = find_project(outer / "lib/inner")
    assert found.git == (f"{outer}/.git/modules/lib/inner",)
    assert f"{found.git[0]}/config" in found.protected
    assert f"{found.git[0]}/hooks" in find_project(outer).protected


def test_a_forged_git_file_shows_no_other_repository(repository: Path, tmp_path: Path) -> None:
    """A program could have written it, into a directory in which a person starts the next command."""
    forged = tmp_path / "forged"
    forged.mkdir()
    (forged / ".git").write_text(f"gitdir: {repository}/.git\n")
    found = find_project(forged)
    assert found.git == ()
    assert "does not name this work tree" in found.notices[0]
    own = repository / ".git/worktrees/x"
    own.mkdir(parents=True)
    (own / "commondir").write_text("../..\n")
    (own / "gitdir").write_text("/elsewhere/.git\n")
    (forged / ".git").write_text(f"gitdir: {own}\n")
    assert find_project(forged).git == ()


def test_directories_that_are_no_project_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no directory"):
        find_project(tmp_path / "none")
    with pytest.raises(PolicyError, match="does not lie in"):
        find_project(tmp_path, protect=("../other",))


def test_hooks_that_git_runs_by_its_settings_are_protected(repository: Path) -> None:
    def set_to(value: str) -> set[str]:
        subprocess.run(["git", "config", "core.hooksPath", value], cwd=repository, check=True)
        return set(find_project(repository).absent)

    assert f"{repository}/.husky" in set_to(".husky/_")
    assert f"{repository}/tools/hooks" in set_to("tools/hooks")
    assert f"{repository}/tools/hooks" in set_to(f"{repository}/tools/hooks")
    assert not any("elsewhere" in each for each in set_to("/elsewhere/hooks"))


def test_repositories_below_the_project_are_protected_by_patterns(
    repository: Path, tmp_path: Path
) -> None:
    found = find_project(repository).patterns
    assert f"{repository}/*/**/.git/config" in found
    assert f"{repository}/.git/modules/**/config" in found
    assert f"{repository}/.git/config" not in found  # its own settings are there
    plain = tmp_path / "plain"
    plain.mkdir()
    assert f"{plain}/.git/config" in find_project(plain, whole=True).patterns
    assert not find_project(plain, whole=True, unprotect=("**/.git", ".git")).patterns
