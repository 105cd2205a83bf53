"""systemd units that start the daemon when the first client connects."""

import os
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ....policies.errors import PolicyError

NAMES = ("cellwright.socket", "cellwright.service")
_END_SECONDS = 20  # for the daemon to end after its drain
_DEFAULT_PLACES = {"system": "/run/cellwright.sock", "user": "%t/cellwright.sock"}


def write_units(
    directory: Path, arguments: Sequence[str] = (), socket: Path | None = None,
    drain_seconds: float = 10.0, group: int | None = None,
) -> tuple[Path, ...]:  # fmt: skip
    """Write system units for root, else user units; return their paths.  Raises PolicyError.

    systemd starts the daemon with `arguments` and listens at `socket`; at the stop, running requests
    have `drain_seconds` to finish.  Members of `group` may connect.
    """
    place = (
        os.fspath(socket.absolute()).replace("%", "%%")
        if socket
        else _DEFAULT_PLACES[kind_of_user()]
    )
    kind = kind_of_user()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"cannot make {directory}: {error.strerror}") from None
    reload = "ExecReload=/bin/kill -HUP $MAINPID\n" if "--config" in arguments else ""
    written = []
    for name in NAMES:
        template = resources.files(__package__).joinpath(f"{kind}.{name.rpartition('.')[2]}")
        path = directory / name
        try:
            text = template.read_text().replace("@COMMAND@", _command(arguments))
            stop = f"{drain_seconds + _END_SECONDS:g}"
            mode = "0600" if group is None else f"0660\nSocketGroup={group}"
            text = text.replace("@SOCKET@", place).replace("@STOP@", stop).replace("@MODE@", mode)
            path.write_text(text.replace("@RELOAD@", reload))
        except OSError as error:
            raise PolicyError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return tuple(written)


def next_commands(directory: Path) -> str:
    """Return what to do after `write_units`, so that systemd listens, at boot too."""
    if kind_of_user() == "system":
        place, manager, after = "/etc/systemd/system", "systemctl", ""
    else:
        place, manager = "~/.config/systemd/user", "systemctl --user"
        after = "\n  loginctl enable-linger  # at boot too, before you log in"
    is_there = directory.absolute() == Path(place).expanduser()
    copy = (
        "" if is_there else f"  cp {' '.join(str(directory / name) for name in NAMES)} {place}/\n"
    )
    return f"next:\n{copy}  {manager} daemon-reload\n  {manager} enable --now {NAMES[0]}{after}"


def kind_of_user() -> str:
    return "system" if os.geteuid() == 0 else "user"


def _command(arguments: Sequence[str]) -> str:
    """Return the daemon's command line, quoted for systemd (systemd.service(5), "Command lines")."""
    words = ("-I", "-m", "cellwright", "serve", "--delegated", *arguments)
    return " ".join((_quoted(sys.executable), *(_quoted_if_needed(word) for word in words)))


def _quoted_if_needed(word: str) -> str:
    return word if re.fullmatch(r"[\w./:=-]+", word, re.ASCII) else _quoted(word)


def _quoted(word: str) -> str:
    """Return a quoted word in which systemd expands no specifier, variable or escape."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, plain)
    return f'"{word}"'
