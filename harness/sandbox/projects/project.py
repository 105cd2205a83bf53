"""`Project`: a directory of the user, the directories of git that belong to it, and what programs may
not change there."""

import os
import re
from collections.abc import Iterator
from itertools import islice

import msgspec

from ....policies.errors import PolicyError
from ....policies.policy import lies_in
from .known_programs import known_programs
from .review_directory import staging_name

_MOST_BYTES = 65536  # longest file by which git finds a directory
_MOST_REPOSITORIES = 1000  # worktrees and submodules of one repository
_HOOKS = re.compile(r"^\s*hookspath\s*=\s*(.+?)\s*$", re.MULTILINE | re.IGNORECASE)
_WORKTREE = re.compile(r"^\s*worktree\s*=\s*(.+?)\s*$", re.MULTILINE)


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """`root`: its path without links. `git`: directories of git outside it that its commands write.
    `protected`: paths that programs may read, and not change. `absent`: those of them that the host
    does not have, and programs may not make. `patterns`: of further such paths, at any depth.
    `chosen`: those that the caller added. `notices`: what was left out, and why."""

    root: str
    git: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def home_directory() -> str:
    """Return the home directory of the user: HOME, else that of passwd(5).  Raises PolicyError."""
    home = os.path.expanduser("~")
    if not home.startswith("/"):
        raise PolicyError(
            f"HOME: must be the path of a directory, got {os.environ.get('HOME', '')!r}",
            "set it to a directory that you can write",
        )
    return home


def find_project(
    start: str | os.PathLike[str] = ".", *, protect: tuple[str, ...] = (),
    unprotect: tuple[str, ...] = (), whole: bool = False,
) -> Project:  # fmt: skip
    """Return the project that `start` lies in: the work tree of git around it, or with `whole`, or
    where there is none, `start` itself.

    `protect`, `unprotect`: paths in it that are protected, or not, in addition to known.toml.  Raises
    PolicyError for a directory that is none, or that holds the whole home directory.
    """
    given = os.path.realpath(start)
    if not os.path.isdir(given):
        raise PolicyError(f"project: {given} is no directory")
    root = given if whole else _work_tree(given)
    home = os.path.realpath(home_directory())
    if lies_in(home, (root,)):
        raise PolicyError(
            f"project: {root} holds your home directory", "change to the project's directory"
        )
    directories, notices = _git_directories(root)
    hooks = [_hooks_of(root, directory) for directory in directories]
    wanted = [
        name
        for name in (*known_programs().protected_names, *filter(None, hooks), *protect)
        if name not in unprotect
    ]
    paths = [os.path.normpath(os.path.join(root, name)) for name in wanted]
    if outside := [path for path in paths if not lies_in(path, (root,))]:
        raise PolicyError(f"protect: {outside[0]} does not lie in {root}")
    paths.append(os.path.join(root, staging_name(root)))
    if os.path.isfile(os.path.join(root, ".git")):
        paths.append(os.path.join(root, ".git"))
    for directory in directories:
        names = known_programs().protected["git_directory"]
        in_git = [os.path.join(each, name) for each in _repositories(directory) for name in names]
        shown = (os.path.relpath(path, root) for path in in_git)
        paths += [path for path, name in zip(in_git, shown, strict=True) if name not in unprotect]
    return Project(
        root=root,
        git=tuple(each for each in directories if not lies_in(each, (root,))),
        protected=tuple(sorted(path for path in paths if os.path.lexists(path))),
        absent=tuple(sorted(path for path in paths if not os.path.lexists(path))),
        chosen=tuple(os.path.normpath(os.path.join(root, name)) for name in protect),
        patterns=tuple(_patterns(root, directories, unprotect)),
        notices=tuple(notices),
    )


def _patterns(root: str, directories: list[str], unprotect: tuple[str, ...]) -> Iterator[str]:
    """Yield patterns of what names commands in repositories that are made, or lie deeper."""
    names = known_programs().protected["repositories"]
    nested = [f"*/**/.git/{each}" for each in names]
    own = [f".git/{each}" for each in names]
    if directories:  # the names of their own are known
        own = [
            os.path.relpath(os.path.join(directory, each), root)
            for directory in directories
            for each in names
            if each.startswith(("modules/", "worktrees/", ".cellwright-"))
        ]
    for each in (*own, *nested):
        shown = each.removeprefix("*/")
        if not any(shown == name or shown.startswith(f"{name}/") for name in unprotect):
            yield os.path.normpath(os.path.join(root, each))


def _hooks_of(root: str, directory: str) -> str:
    """Return the directory of the project whose hooks git runs by its settings; "" if there is none.

    husky names `.husky/_`, whose scripts run those in .husky.
    """
    if not (found := _HOOKS.search(_read(os.path.join(directory, "config")))):
        return ""
    named = os.path.expanduser(found[1].strip('"'))
    path = os.path.relpath(os.path.join(root, named), root)
    path = os.path.dirname(path) if os.path.basename(path) == "_" else path
    return "" if path.split("/")[0] in ("..", ".", ".git") else path


def _work_tree(directory: str) -> str:
    """Return the directory at or above `directory` that has a .git; `directory` itself if none has."""
    above = directory
    while not os.path.lexists(os.path.join(above, ".git")):
        if above == "/":
            return directory
        above = os.path.dirname(above)
    return above


def _git_directories(root: str) -> tuple[list[str], list[str]]:
    """Return the directories that git keeps of the work tree `root`, and notices.

    A .git that is a file names them (gitrepository-layout(5)).  A program could have written it, so
    they must name the work tree, too.
    """
    git = os.path.join(root, ".git")
    if os.path.islink(git):
        return [], [f"{git} is a link: its target is not shown"]
    if not os.path.isfile(git):
        return ([git] if os.path.isdir(git) else []), []
    named = _line(git).removeprefix("gitdir: ")
    directory = os.path.realpath(os.path.join(root, named))
    if common := _line(os.path.join(directory, "commondir")):  # a linked worktree
        shared = os.path.realpath(os.path.join(directory, common))
        is_ours = _line(os.path.join(directory, "gitdir")) == git
        if is_ours and os.path.dirname(directory) == os.path.join(shared, "worktrees"):
            return [shared], []
    elif found := _WORKTREE.search(_read(os.path.join(directory, "config"))):  # a submodule
        is_ours = os.path.realpath(os.path.join(directory, found[1])) == root
        if is_ours and "/.git/modules/" in f"{directory}/":
            return [directory], []
    return [], [f"{git} names {directory}, which does not name this work tree: it is not shown"]


def _repositories(directory: str) -> Iterator[str]:
    """Yield the directory of a repository, and those of its worktrees and submodules."""
    yield directory
    waiting, found = [os.path.join(directory, "modules")], 0
    yield from islice(_directories(os.path.join(directory, "worktrees")), _MOST_REPOSITORIES)
    while waiting and found < _MOST_REPOSITORIES:
        for each in _directories(waiting.pop()):
            found += 1
            if os.path.lexists(os.path.join(each, "config")):
                yield each
                waiting.append(os.path.join(each, "modules"))
            else:  # the name of a submodule may have slashes
                waiting.append(each)


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [each.path for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _line(path: str) -> str:
    return _read(path).partition("\n")[0].strip()


def _read(path: str) -> str:
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""
