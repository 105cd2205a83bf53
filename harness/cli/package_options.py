"""Options that say which packages cells have, and where their wheels come from."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...policies.errors import PolicyError
from ...policies.policy import Policy

if TYPE_CHECKING:
    from ..sandbox.packages.package_store import PackageStore, Requirements


def add_packages(parser: argparse.ArgumentParser) -> None:
    """Add --packages and --venv, and where wheels come from."""
    parser.add_argument(
        "--packages", action="append", metavar="P",
        help="a package for Python programs, such as 'pandas==2.3.*', or the file pylock.toml or "
        "requirements.txt; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--venv", metavar="DIR", help="import from this virtual environment, of the same Python"
    )
    add_python(parser, "run Python programs by this Python of the host")
    add_sources(parser)


def add_python(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--python",
        metavar="VERSION",
        help=f"{meaning}: a version such as 3.12, or a path; default this one",
    )


class _Once(argparse.Action):
    """An option of one value that is not silently replaced: pip's may be repeated."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: object,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "given twice; put all wheels into one folder")
        setattr(namespace, self.dest, value)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options of the store of packages that say where wheels come from."""
    parser.add_argument(
        "--find-links",
        metavar="DIR",
        action=_Once,
        help="a folder of wheels; default that of pip's settings",
    )
    parser.add_argument(
        "--no-index", action="store_true", help="use only the wheels of --find-links"
    )
    parser.add_argument(
        "--index-url", metavar="URL", help="the index of packages; default that of pip's settings"
    )


def requirements_of(name: str, given: Sequence[str]) -> "Requirements":
    """Return requirements, or the one file that is named instead; raises PolicyError for a mixture."""
    files = [
        each for each in given
        if "://" not in each and (each.endswith((".toml", ".txt")) or os.sep in each)
    ]  # fmt: skip
    if not files:
        return list(given)
    if len(given) > 1:
        raise PolicyError(f"{name}: must be requirements or one file, got {len(given)} values")
    from pathlib import Path  # seldom needed

    return Path(files[0])


def store_of(options: argparse.Namespace, directory: str | None = None) -> "PackageStore":
    from ..sandbox.packages.package_store import PackageStore

    return PackageStore(
        directory,
        find_links=getattr(options, "find_links", None),
        index=not getattr(options, "no_index", False),
        index_url=getattr(options, "index_url", None),
        optional_layers=getattr(options, "optional", ()),
        python=getattr(options, "python", None),
    )


def packages_of(
    options: argparse.Namespace,
) -> "tuple[Requirements | None, PackageStore | None]":
    """Return the packages that --packages names, and where they come from; neither without it.

    Raises PolicyError for a source of packages without --packages, which would fetch nothing.
    """
    if not options.packages:
        for name in ("find_links", "no_index", "index_url"):
            if getattr(options, name, None):
                raise PolicyError(f"--{name.replace('_', '-')}: needs --packages")
        return None, None
    wanted = requirements_of("--packages", options.packages)
    return wanted, store_of(options)


def add_server_packages(parser: argparse.ArgumentParser) -> None:
    """Add --packages, and where wheels come from, for a server."""
    parser.add_argument(
        "--packages", action="append", metavar="P",
        help="a package for the Python programs of all clients, such as 'pandas==2.3.*', or the file "
        "pylock.toml or requirements.txt; may be repeated",
    )  # fmt: skip
    add_sources(parser)


def packages_of_server(
    options: argparse.Namespace, policy: Policy
) -> "tuple[Requirements | None, PackageStore | None]":
    """Return the packages that --packages names, and where these come from and those that the policy
    requires or allows clients to choose.

    Says that the start waits for them: a client waits for the handshake about half a minute.
    """
    if options.packages or policy.packages.require:
        names = options.packages or policy.packages.require
        print(
            f"cellwright: preparing packages: {', '.join(names)[:200]}; `cellwright env build` makes "
            "their set beforehand", file=sys.stderr, flush=True,
        )  # fmt: skip
    if not options.packages and (policy.packages.require or policy.packages.allow):
        return None, store_of(options)
    return packages_of(options)


def packages_of_calls(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the packages that each call or session names: with --connect those of --packages, else
    none, since the sandbox has them."""
    if options.connect is None or not options.packages:
        return ()
    wanted = requirements_of("--packages", options.packages)
    if isinstance(wanted, os.PathLike):
        raise PolicyError(
            f"--packages: a daemon takes requirements, not the file {os.fspath(wanted)}",
            "name it in the policy of the daemon: require in [packages]",
        )
    return tuple(wanted)


def with_environment(policy: Policy, options: argparse.Namespace) -> Policy:
    """Return `policy` with the packages of --venv; raises PolicyError."""
    if options.venv is None:
        return policy
    from ..sandbox.packages.required import importing_from, site_of_environment
    from ..sandbox.pythons import find_python

    version = find_python(options.python).version[:2]
    return importing_from(policy, site_of_environment(options.venv, version))
