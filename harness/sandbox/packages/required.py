"""The packages that a sandbox asks for, in its policy and in its arguments."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ....policies.errors import PolicyError
from ....policies.policy import Policy, check_policy
from .lock import check_requirements
from .modules import has_module
from .store import OpenSet, PackageStore, Requirements

_VERSION = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", re.MULTILINE)


def open_required(
    policy: Policy, packages: Requirements | None, store: PackageStore | None
) -> tuple[Policy, OpenSet | None]:
    """Return `policy` with the directory of the packages that it and `packages` ask for, and the set.

    Raises PolicyError and PackageError.
    """
    named = policy.packages.require
    wanted: Requirements = named
    if isinstance(packages, os.PathLike):
        if named:
            raise PolicyError(
                "packages: a file cannot be combined with packages.require of the policy",
                "name all packages in one of the two",
            )
        wanted = packages
    elif packages is not None:
        policy = requiring(policy, listed("packages", packages))
        wanted = policy.packages.require
    if not isinstance(wanted, os.PathLike) and not wanted:
        return policy, None
    opened = (store or PackageStore()).limited_to(policy).open(wanted)
    try:
        return importing_from(policy, opened.made.directory), opened
    except BaseException:
        opened.close()
        raise


def listed(name: str, packages: object) -> list[str]:
    """Return a requirement or several as a list; raises PolicyError, which begins with `name`, for
    anything else."""
    if isinstance(packages, str):
        return [packages]
    if isinstance(packages, Iterable) and not isinstance(packages, bytes):
        return list(packages)
    kind = type(packages).__name__
    raise PolicyError(
        f"{name}: must be a list of requirements, or the path of a lock file, got {kind}"
    )


def requiring(policy: Policy, given: list[str]) -> Policy:
    """Return `policy` with `given` among the packages that it requires; raises PolicyError."""
    require = check_requirements("packages", [*policy.packages.require, *given])
    packages = msgspec.structs.replace(policy.packages, require=require)
    return msgspec.structs.replace(policy, packages=packages)


def importing_from(policy: Policy, directory: str) -> Policy:
    """Return `policy` with `directory` in `python.path`, and with those modules of it to be preloaded
    that `packages.preload` names."""
    path = tuple(dict.fromkeys((*policy.python.path, directory)))
    ahead = [name for name in policy.packages.preload if has_module(directory, name)]
    preload = tuple(dict.fromkeys((*policy.python.preload, *ahead)))
    python = msgspec.structs.replace(policy.python, path=path, preload=preload)
    return check_policy(msgspec.structs.replace(policy, python=python))


def site_of_environment(directory: str | os.PathLike[str], version: tuple[int, int]) -> str:
    """Return the packages of the virtual environment in `directory`, which is of Python `version`.

    Raises PolicyError if it is none, or of another version: packages with shared libraries work
    in one version only.
    """
    top = Path(directory).resolve()
    try:
        found = _VERSION.search((top / "pyvenv.cfg").read_text())
    except (OSError, ValueError):
        found = None
    wanted = f"{version[0]}.{version[1]}"
    if found is None:
        raise PolicyError(f"venv: must be a virtual environment, got {os.fspath(directory)!r}")
    if found[1] != wanted:
        raise PolicyError(
            f"venv: must have Python {wanted}, as cells do, got {found[1]}",
            f"make one with python{wanted} -m venv",
        )
    return str(top / "lib" / f"python{wanted}" / "site-packages")
