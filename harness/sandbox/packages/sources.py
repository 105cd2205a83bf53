"""`WheelSource`: where wheels come from, and the options and variables by which pip looks there."""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ....policies.errors import PackageError
from .lock import Wheel
from .pip_settings import PipSettings

ONLY_WHEELS = (
    "check the name and the version; only wheels are used: if there is only a source "
    "distribution, build a wheel where you trust it (pip wheel), and name its folder with "
    "find_links"
)
# Variables that would require more, place wheels elsewhere, or start another Python.
_MISLEADING = frozenset(
    f"PIP_{name}"
    for name in (
        "EDITABLE", "GROUP", "NO_BINARY", "PREFIX", "PYTHON", "REQUIREMENT",
        "REQUIREMENTS_FROM_SCRIPT", "REQUIRE_VIRTUALENV", "ROOT", "TARGET", "USER",
    )
)  # fmt: skip


class WheelSource(msgspec.Struct, frozen=True):
    """Where wheels come from.

    find_links: a folder of wheels
    index: use an index too: `index_url`, else the one that pip is configured with
    """

    find_links: str | None = None
    index: bool = True
    index_url: str | None = None

    def options(self) -> list[str]:
        """Return pip's options."""
        found = ["--only-binary", ":all:"]
        if self.find_links is not None:
            found += ["--find-links", os.path.abspath(self.find_links)]
        if not self.index:
            found += ["--no-index", "--retries", "0"]
        elif self.index_url is not None:
            found += ["--index-url", self.index_url]
        return found

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for pip: no settings without an index, and one index if it is named."""
        if not self.index:
            found = {key: value for key, value in inherited.items() if not key.startswith("PIP_")}
            return found | {"PIP_CONFIG_FILE": os.devnull}
        found = {key: value for key, value in inherited.items() if key not in _MISLEADING}
        found["PIP_NO_DEPS"] = "0"  # a variable counts more than a file of settings
        return found | ({} if self.index_url is None else {"PIP_EXTRA_INDEX_URL": self.index_url})

    def address_of(self, wheel: Wheel, settings: PipSettings) -> str:
        """Return where to fetch `wheel`: a folder, if it is there; raises PackageError if there is
        no other place and it is not."""
        folders = [] if self.find_links is None else [self.find_links]
        if self.index:
            folders += [each for each in settings.find_links if "://" not in each]
        for folder in folders:
            path = Path(folder, wheel.filename).absolute()
            if path.is_file():
                return path.as_uri()
        if (not self.index or settings.no_index) and not wheel.url.startswith("file:"):
            told = "" if not self.index else ", and pip's settings say no-index"
            raise PackageError(
                f"{wheel.filename} is not in {' or '.join(folders) or 'a folder of wheels'}{told}",
                "copy it there, or use an index",
            )
        return wheel.url

    def check(self) -> None:
        """Raise PackageError for what would keep a reader of the folder waiting, such as a pipe."""
        if self.find_links is None:
            return
        with os.scandir(self.find_links) as entries:
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # a link to nothing
                    mode = each.stat().st_mode
                    if each.name.endswith(".whl") and not (
                        stat.S_ISREG(mode) or stat.S_ISDIR(mode)
                    ):
                        raise PackageError(
                            f"{os.path.join(self.find_links, each.name)!r} is no regular file",
                            "remove it from the folder of wheels",
                        )
