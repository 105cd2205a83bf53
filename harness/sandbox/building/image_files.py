"""Programs for cells: find and write files of the image that is their root.

`survey` tells what the image has at the destination of a COPY, ADD or WORKDIR.  `export` writes files
for a COPY --from to standard output: the members of source N are N/d/PATH below a directory, and
N/f/NAME of a file.  What a source leads to is found through links; links below it stay links.

The text is executed by the interpreter of a cell; it imports no module of cellwright.
"""

import glob
import os
import stat
import sys
import tarfile

_WILD = "*?["


def _attributes(path: str) -> "list[object] | None":
    try:
        found = os.lstat(path)
    except OSError:
        return None
    kind = stat.S_IFMT(found.st_mode)
    name = {stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}.get(kind, "file")
    return [name, found.st_mode & 0o7777, found.st_uid, found.st_gid]


def _number(name: str, path: str) -> "tuple[int, int]":
    """Return the number of a name, and of a user its group."""
    if name.isdigit():
        return int(name), int(name)
    with open(path, errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(":")
            if len(fields) > 2 and fields[0] == name and fields[2].isdigit():
                group = fields[3] if len(fields) > 3 and fields[3].isdigit() else fields[2]
                return int(fields[2]), int(group)
    raise LookupError(f"{path} has no {name}")


def survey(destination: str, below: "list[str]", owner: str) -> "dict[str, object]":
    """Return the destination without links, the attributes of each directory above it and of itself,
    those of the directories `below` it that exist, by their number, and the ids of `owner`."""
    place = os.path.realpath(destination)
    names = [each for each in place.split("/") if each]
    above = ["/" + "/".join(names[:count]) for count in range(len(names) + 1)]
    uid = gid = 0
    if owner:
        user, _, group = owner.partition(":")
        uid, gid = _number(user, "/etc/passwd") if user else (0, 0)
        if group:
            gid = _number(group, "/etc/group")[0]
    found = {
        str(number): told
        for number, name in enumerate(below)
        if (told := _attributes(os.path.join(place, name)))
    }
    return {
        "place": place, "above": [_attributes(each) for each in above], "below": found,
        "owner": [uid, gid],
    }  # fmt: skip


def _sources(pattern: str) -> "list[str]":
    path = "/" + pattern.lstrip("/")
    if any(each in path for each in _WILD):
        return sorted(glob.glob(path, include_hidden=True))
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    return [path]


def _plain(member: tarfile.TarInfo) -> "tarfile.TarInfo | None":
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


def export(patterns: "list[str]") -> None:
    """Write what the patterns fit as a tar; ends with a message if one fits nothing."""
    number = 0
    with tarfile.open(
        fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT,
        errors="surrogateescape", encoding="utf-8",
    ) as archive:  # fmt: skip
        for pattern in patterns:
            for path in _sources(pattern):
                real = os.path.realpath(path)
                archive.inodes = {}  # type: ignore[attr-defined]  # no links between sources
                if stat.S_ISDIR(os.stat(real).st_mode):
                    archive.add(real, f"{number}/d", filter=_plain)
                else:
                    archive.add(real, f"{number}/f/{os.path.basename(path)}", filter=_plain)
                number += 1
