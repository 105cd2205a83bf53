"""`ProjectChanges`: what a command that ran with `--review` would change in a project, which a person
looks at, and then applies or discards.

The command saw the project through an overlay, whose upper directory has what it added, changed and
removed (review_directory.py).  All of that is hostile.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ....policies.digest import digest
from ....policies.errors import PolicyError, WorkspaceError
from .change_diff import diff_text, harmless_name
from .change_journal import (
    Journal,
    Places,
    applied_times,
    discard_all,
    finish,
    settle,
    stage,
    tidy,
    write,
)
from .git_index import INDEX, is_only_refreshed
from .known_programs import known_programs
from .project import Project, find_project
from .review_directory import ReviewDirectory
from .upper import Comparison, Difference, ProjectChange, open_directory

_GIT = ".git"
_NAMED = 20  # conflicts that an error names
_OBEYED = "other programs obey it: apply it with --unprotect {}"


def open_changes(project: Project | str | os.PathLike[str] = ".") -> "ProjectChanges":
    """Return the changes of the project that `project` is, or lies in."""
    return ProjectChanges(project if isinstance(project, Project) else find_project(project))


class _Seen(NamedTuple):
    """All differences, and by path the reason why one is not applied unless it is named."""

    differences: tuple[Difference, ...]
    protected: dict[str, str]

    def change(self, difference: Difference) -> ProjectChange:
        found = difference.change
        why = found.left_out or self.protected.get(found.path, "")
        return replace(found, left_out=why) if why else found


class ProjectChanges:
    """The changes that wait for a project.  Paths are relative to its root; one stands for all that
    lies beneath it, too.

    Each method finishes a request that a killed process left, and raises BusyError while a command
    runs on the changes, and WorkspaceError.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self._review = ReviewDirectory(project.root)

    def list(self, paths: Sequence[str] | None = None) -> tuple[ProjectChange, ...]:
        """Return the changes, default all; those with `left_out` are not applied."""
        with self._locked() as places:
            if places is None:
                return ()
            seen = self._look(places)
            return tuple(seen.change(each) for each in _chosen(seen.differences, paths))

    def conflicts(self, paths: Sequence[str] | None = None) -> tuple[ProjectChange, ...]:
        """Return the changes of paths that the project itself changed after the command started."""
        with self._locked() as places:
            if places is None:
                return ()
            seen = self._look(places)
            found = self._conflicts(places, _chosen(seen.differences, paths))
            return tuple(seen.change(each) for each in found)

    def id(self, paths: Sequence[str] | None = None) -> str:
        """Return a text that names exactly these changes, with their content, for `apply`."""
        with self._locked() as places:
            if places is None:
                return ""
            return _id_of(_chosen(self._look(places).differences, paths))

    def show(self, paths: Sequence[str] | None = None, *, limit_bytes: int = 1 << 20) -> str:
        """Return the changes as a unified diff, at most `limit_bytes` of it, then a sentence about the
        rest.  Names and content are made harmless for a terminal."""
        with self._locked() as places:
            if places is None:
                return ""
            seen = self._look(places)
            chosen = _chosen(seen.differences, paths)
            changes = [seen.change(each) for each in chosen]
            return diff_text(changes, places.project, places.upper, limit_bytes)

    def apply(
        self, paths: Sequence[str] | None = None, *, unprotect: Sequence[str] = (),
        force: bool = False, change: str | None = None,
    ) -> tuple[ProjectChange, ...]:  # fmt: skip
        """Make the changes in the project, all or none, and return them.

        `paths`: default all.  Those that are left out still wait then; `unprotect` names protected
        paths to apply nevertheless.  Raises WorkspaceError if `change` is not the id of these paths any
        more, or for a conflict, unless `force` is given.
        """
        with self._locked() as places:
            if places is None:
                return ()
            seen = self._look(places, unprotect)
            if change not in (None, found := _id_of(_chosen(seen.differences, paths))):
                raise WorkspaceError(
                    f"the changes are {found} by now, not {change!r}",
                    "a later command changed them: see `cellwright changes show`",
                )
            chosen = [
                each for each in _with_tops(seen, _chosen(seen.differences, paths))
                if not seen.change(each).left_out
            ]  # fmt: skip
            if not force and (conflicts := self._conflicts(places, chosen)):
                raise _conflict(conflicts)
            if not chosen:
                tidy(places)
            else:
                journal = settle(seen.differences, chosen)
                try:
                    journal = stage(places, chosen, journal)
                except BaseException:
                    finish(places)  # there is no journal: only the staging directory is removed
                    raise
                self._carry_out(places, journal)
            return tuple(seen.change(each) for each in chosen)

    def discard(self, paths: Sequence[str] | None = None) -> tuple[ProjectChange, ...]:
        """Drop the changes, also those that would be left out, and return them."""
        with self._locked() as places:
            if places is None:
                return ()
            if paths is None:
                return self._discard_all(places)
            seen = self._look(places)
            chosen = _chosen(seen.differences, paths)
            self._carry_out(places, settle(seen.differences, chosen, is_discard=True))
            return tuple(seen.change(each) for each in chosen)

    def _discard_all(self, places: Places) -> tuple[ProjectChange, ...]:
        try:
            seen = self._look(places)
            found = tuple(seen.change(each) for each in seen.differences)
        except WorkspaceError:  # there are too many
            found = ()
        discard_all(places)
        return found

    def _carry_out(self, places: Places, journal: Journal) -> None:
        write(places, journal)
        finish(places)
        tidy(places)

    @contextmanager
    def _locked(self) -> Iterator[Places | None]:
        """Hold the lock, with the directories opened; None if no change waits."""
        if self._review.pending() is None:
            yield None
            return
        with self._review.held():
            try:
                with self._review.opened() as places:
                    if finish(places):
                        tidy(places)
                    yield places
            except OSError as error:
                raise WorkspaceError(f"changes of {self.project.root}: {error}") from error

    def _look(self, places: Places, unprotect: Sequence[str] = ()) -> _Seen:
        differences = tuple(Comparison(places.upper, places.project))
        waiting = self._review.pending()
        chosen = waiting.protected if waiting else ()
        protection = _Protection(self.project, chosen, places.staging, unprotect)
        reasons: dict[str, str] = {}
        for each in differences:  # a directory in place of a file comes before what lies in it
            if why := protection.why(each) or reasons.get(each.top, ""):
                reasons[each.change.path] = why
        return _Seen(differences, reasons)

    def _conflicts(self, places: Places, chosen: Sequence[Difference]) -> Sequence[Difference]:
        waiting = self._review.pending()
        if waiting is None:
            return ()
        applied = applied_times(places)
        return [
            each for each in chosen
            if each.change.before is not None
            and _is_newer(places.project, each.change.path, waiting.started_ctime_ns, applied)
            and not (each.change.path == INDEX and is_only_refreshed(places.project, places.index))
        ]  # fmt: skip


def _id_of(differences: Sequence[Difference]) -> str:
    told = [(os.fsencode(each.change.path), each.change.kind, *each.state) for each in differences]
    return digest(msgspec.json.encode(told)).hex()[:32] if told else ""


def _lies_in(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def _chosen(
    differences: Sequence[Difference], paths: Sequence[str] | None
) -> tuple[Difference, ...]:
    """Return the changes at or beneath the paths; raises PolicyError for a path without one."""
    if paths is None:
        return tuple(differences)
    wanted = [os.path.normpath(path) for path in paths]
    wanted = ["" if path == "." else path for path in wanted]
    for path in wanted:
        if path and not any(_lies_in(each.change.path, path) for each in differences):
            raise PolicyError(f"{path}: no change waits there", "see `cellwright changes`")
    return tuple(
        each for each in differences
        if any(not path or _lies_in(each.change.path, path) for path in wanted)
    )  # fmt: skip


def _with_tops(seen: _Seen, chosen: Sequence[Difference]) -> Iterator[Difference]:
    """Yield the chosen changes, and those that make room for them: a directory in place of a file."""
    wanted = {each.change.path for each in chosen} | {each.top for each in chosen}
    return (each for each in seen.differences if each.change.path in wanted)


def _conflict(conflicts: Sequence[Difference]) -> WorkspaceError:
    names = ", ".join(repr(each.change.path) for each in conflicts[:_NAMED])
    more = f" and {len(conflicts) - _NAMED} more" if len(conflicts) > _NAMED else ""
    return WorkspaceError(
        f"the project itself was changed since the command started: {names}{more}",
        "look at the difference; --force (force=True) applies the changes nevertheless",
    )


def _is_newer(project: int, path: str, started: int, applied: dict[str, int]) -> bool:
    """Tell whether a path of the project, or a file beneath it, was changed after `started`."""
    waiting = [path]
    while waiting:
        at = waiting.pop()
        above, _, name = at.rpartition("/")
        parent = open_directory(project, above)
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                below = open_directory(parent, name)
                try:
                    waiting += [f"{at}/{each}" for each in os.listdir(below)]
                finally:
                    os.close(below)
            elif found.st_ctime_ns > started and applied.get(at) != found.st_ctime_ns:
                return True
        except FileNotFoundError:
            continue
        finally:
            os.close(parent)
    return False


class _Protection:
    """The paths of a project that programs of the host obey."""

    def __init__(
        self, project: Project, chosen: Sequence[str], staging: str, unprotect: Sequence[str]
    ) -> None:
        """`chosen`: further paths, of those who had the commands run."""
        prefix = f"{project.root}/"
        paths = (*project.protected, *project.absent, *chosen)
        inside = [each[len(prefix) :] for each in paths if each.startswith(prefix)]
        self._paths = {*inside, staging}
        self._above = {above for path in self._paths for above in _prefixes(path) if above != path}
        self._names = known_programs().protected["git_directory"]
        self._unprotect = [os.path.normpath(each) for each in unprotect]

    def why(self, difference: Difference) -> str:
        """Return why a change is not applied unless it is named; "" if it is."""
        change = difference.change
        found = self._found(difference)
        if found and not any(_lies_in(change.path, each) for each in self._unprotect):
            name = harmless_name(found)
            return f"{name} is protected, since " + _OBEYED.format(name)
        return ""

    def _found(self, difference: Difference) -> str:
        """Return the protected path that a change would change."""
        change = difference.change
        for path in _prefixes(change.path):
            if path in self._paths or self._is_of_git(path, difference):
                return path
        is_directory = change.after is not None and change.after.type == "directory"
        holds = change.path in self._above and not (is_directory and change.kind == "added")
        return change.path if holds else ""

    def _is_of_git(self, path: str, difference: Difference) -> bool:
        """Tell whether `path` is a directory of git that would be new, or names commands in one."""
        names = path.split("/")
        if _GIT not in names:
            return False
        if names[-1] == _GIT:
            return _lies_in(path, difference.top) and difference.change.kind != "removed"
        below = names[names.index(_GIT) + 1 :]
        is_repository = len(below) == 1 or below[0] in ("modules", "worktrees")
        return is_repository and below[-1] in self._names


def _prefixes(path: str) -> Iterator[str]:
    """Yield the paths above a path, and itself."""
    parts = path.split("/")
    return ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
