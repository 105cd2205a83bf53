"""`ImageIds`: the ids that the files of images have on this host, and a process of an image's cell.

An image has files of many owners.  On the disk, and in the namespaces of a launcher, its ids are a
range of the host that no user has.  The map of a user namespace leads from one to the other
(user_namespaces(7)).  A process gets the map in four steps:

1. it calls unshare(CLONE_NEWUSER) and then tells the process that started it, its parent;
2. the parent calls `map_process` with its pid: only a process outside can map several ids.  The
   process must be dumpable (PR_SET_DUMPABLE): otherwise root owns its /proc/PID/uid_map, and a parent
   without privilege gets EACCES;
3. it calls `become_root`.  It is not dumpable afterwards, because its ids have changed;
4. it sets PR_SET_DUMPABLE if it or another process of its id is to read its /proc/PID.
"""

import os
import re
from typing import Literal

import msgspec

from ...policies.errors import LaunchError
from ..cgroups.cgroup_tree import read, write
from ..kernel.credentials import has_capability
from .ids import id_for

_COUNT = 65536
# Behind the ids that ids.py gives for pids and names, in the same range that no distribution uses.
_FIRST = 0x72000000
_LEAST_FREE = 2048  # ids at the end of a container's range, which ids.py gives
# linux/capability.h: to own files and to become another id, and to mount
_NEEDED = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SYS_ADMIN": 21,
}  # fmt: skip
_HELPERS = ("newuidmap", "newgidmap")
_HELPER_PATH = ("/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin")
_HELPER_SECONDS = 30

IdRange = tuple[int, int, int]  # first inside, first outside, count


class ImageIds(msgspec.Struct, frozen=True):
    """The map of ids between images and this host.

    kind: "root" writes the map of a range itself; "subordinate" is the range of an ordinary user, which
        newuidmap and newgidmap write; "one" has only root inside, so that all files belong to it
    uids, gids: the lines of uid_map and gid_map
    why_one: the reason for the kind "one", and what to do
    """

    kind: Literal["root", "subordinate", "one"]
    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]
    why_one: str = ""

    @property
    def root(self) -> tuple[int, int]:
        """The uid and gid outside of root inside."""
        return self.uids[0][1], self.gids[0][1]

    @property
    def name(self) -> str:
        """A file name that no other map has: files written under another map have other owners."""
        told = [f"{first}+{count}" for _, first, count in self.uids[-1:] + self.gids[-1:]]
        return "-".join((self.kind, *dict.fromkeys(told)))


def find_image_ids() -> ImageIds:
    """Return the ids of images for this user on this host.

    Raises LaunchError as `id_for`, and for root without the capabilities to use other ids and to mount,
    as in some containers.  It is the same in every process of the user, until somebody changes
    /etc/subuid.
    """
    if os.geteuid() == 0:
        if lacking := [name for name, number in _NEEDED.items() if not has_capability(number)]:
            raise LaunchError(
                f"root lacks {', '.join(lacking)} here, which cells of an image need",
                "start it as an ordinary user, or give the container these capabilities",
            )
        return choose_root_ids([read(f"/proc/self/{kind}_map") for kind in ("uid", "gid")])
    import pwd  # an ordinary user's alone

    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = ""
    texts = [_text(f"/etc/{kind}") for kind in ("subuid", "subgid")]
    missing = [each for each in _HELPERS if not _helper(each)]
    return choose_user_ids((os.geteuid(), os.getegid()), name, texts, missing)


def choose_root_ids(maps: list[str]) -> ImageIds:
    """Return the ids for root, whose own namespace has `maps`: a range of 65,536 that is mapped in both
    and that no user has, else one id."""
    every = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in maps]
    wanted = [_FIRST]
    for first, _, count in every[0]:
        # as in a container: the highest aligned range, below the ids that ids.py gives there
        wanted.append((first + count - _LEAST_FREE) // _COUNT * _COUNT - _COUNT)
    for start in wanted:
        if start >= _COUNT and all(
            any(first <= start and start + _COUNT <= first + count for first, _, count in lines)
            for lines in every
        ):
            return ImageIds("root", ((0, start, _COUNT),), ((0, start, _COUNT),))
    why = (
        f"the user namespace of this container has no {_COUNT} ids beside those of its users; map more "
        "ids into it (user_namespaces(7))"
    )
    return one_id(id_for("images of cellwright"), why=why)


def choose_user_ids(
    own: tuple[int, int], name: str, texts: list[str], missing: list[str]
) -> ImageIds:
    """Return the ids for an ordinary user with the ids `own` and a `name`: subordinate ones, else one.

    `texts` are those of /etc/subuid and /etc/subgid, `missing` the helpers that the host lacks.
    """
    why = f"{' and '.join(missing)} not found; install the package uidmap" if missing else ""
    found = []
    for kind, number, text in zip(("subuid", "subgid"), own, texts, strict=True):
        lines: list[IdRange] = [(0, number, 1)]
        for line in re.finditer(r"^([^:\n]+):([0-9]+):([0-9]+)$", text, re.MULTILINE | re.ASCII):
            inside = lines[-1][0] + lines[-1][2]
            count = min(int(line[3]), _COUNT - inside)
            if line[1] in (name, str(own[0])) and count > 0:
                lines.append((inside, int(line[2]), count))
        if lines[-1][0] + lines[-1][2] < _COUNT and not why:
            why = (
                f"/etc/{kind} has less than {_COUNT - 1} ids for {name or own[0]}; as root: usermod "
                f"--add-subuids FIRST-LAST --add-subgids FIRST-LAST {name or own[0]}"
            )
        found.append(tuple(lines))
    return one_id(*own, why=why) if why else ImageIds("subordinate", found[0], found[1])


def one_id(uid: int, gid: int | None = None, *, why: str = "") -> ImageIds:
    """Return the map of one id: root inside is `uid` outside."""
    return ImageIds("one", ((0, uid, 1),), ((0, uid if gid is None else gid, 1),), why)


def map_process(pid: int, ids: ImageIds) -> None:
    """Map `ids` in the user namespace of `pid`, a child of this process that has just unshared it.

    Raises LaunchError, which names the refused file or helper.
    """
    if ids.kind == "subordinate":
        for helper, lines in zip(_HELPERS, (ids.uids, ids.gids), strict=True):
            _run(helper, pid, lines)
        return
    if ids.kind == "one":
        # Before gid_map: an ordinary user may map a gid only where setgroups(2) is denied, since a
        # process that leaves a group could read what the group may not (user_namespaces(7)).
        _write(f"/proc/{pid}/setgroups", "deny")
    for kind, lines in (("uid", ids.uids), ("gid", ids.gids)):
        _write(f"/proc/{pid}/{kind}_map", "".join(f"{a} {b} {c}\n" for a, b, c in lines))


def become_root(ids: ImageIds) -> None:
    """Become root of the user namespace that `map_process` has mapped, without other groups; raises
    OSError."""
    if ids.kind != "one":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _write(path: str, text: str) -> None:
    try:
        write(path, text)  # the kernel accepts no second write(2), not even for another line
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None


def _helper(name: str) -> str:
    paths = (os.path.join(each, name) for each in _HELPER_PATH)
    return next((path for path in paths if os.access(path, os.X_OK)), "")


def _run(name: str, pid: int, lines: tuple[IdRange, ...]) -> None:
    import subprocess  # an ordinary user's alone

    command = [_helper(name) or name, str(pid), *(str(each) for line in lines for each in line)]
    try:
        ran = subprocess.run(
            command, capture_output=True, timeout=_HELPER_SECONDS, check=False, env={}, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"cannot run {name}: {error}") from None
    if ran.returncode:
        raise LaunchError(
            f"{name} failed: {ran.stderr.strip()[:300]}", "see /etc/subuid and /etc/subgid"
        )


def _text(path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""
