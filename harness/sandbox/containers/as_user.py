"""A program for cells: becomes a user of the image, and then a command.

Its text is executed by the cell's interpreter with the arguments USER COMMAND...; it imports no module
of cellwright.  USER is a name or number, perhaps with `:GROUP`, as in the configuration of an image.
The user database is read as text: a module of the C library for it could be of another version.
"""

import os
import sys
from typing import NoReturn

_PASSWD, _GROUP = "/etc/passwd", "/etc/group"


def _entries(path: str) -> list[list[str]]:
    try:
        with open(path, errors="surrogateescape") as file:
            return [line.rstrip("\n").split(":") for line in file if line.count(":") >= 3]
    except OSError:
        return []


def _number(named: str, path: str) -> tuple[int, list[str]]:
    """Return the number of a name, and its entry; a number needs none."""
    for entry in _entries(path):
        if named in (entry[0], entry[2]) and entry[2].isdigit():
            return int(entry[2]), entry
    if not named.isdigit():
        raise LookupError(f"{path} has no {named}")
    return int(named), []


def main() -> NoReturn:
    user, *command = sys.argv[1:]
    name, _, group = user.partition(":")
    status = 126
    try:
        uid, entry = _number(name, _PASSWD)
        gid = int(entry[3]) if entry and entry[3].isdigit() else 0
        groups = [gid]
        if group:
            groups = [gid] = [_number(group, _GROUP)[0]]
        elif entry:
            members = [each for each in _entries(_GROUP) if entry[0] in each[3].split(",")]
            groups += [int(each[2]) for each in members if each[2].isdigit()]
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        if len(entry) > 5 and os.environ.get("HOME") in (None, "", "/root"):
            os.environ["HOME"] = entry[5]
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except (LookupError, ValueError, OverflowError) as error:
        sys.stderr.write(f"user: {error}\n")
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        status = 127 if isinstance(error, FileNotFoundError) else 126
    sys.exit(status)


if __name__ == "__main__":
    main()
