"""`Lock`: the exact wheels of a set of packages, read from and written to pylock.toml (PEP 751)."""

import hashlib
import importlib.util
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from ....policies.errors import PackageError, PackageNotFound, PolicyError
from ....policies.extras import how_to_install
from ..pythons import HostPython

if TYPE_CHECKING:
    from packaging.pylock import Pylock

_MOST_BYTES = 16 << 20  # bytes of a lock file
_MOST_WHEELS = 1000
_MOST_TAGS = 100_000  # tags of all wheels in a lock, selected or not; 9 µs each (measured)
_MOST_REQUIREMENTS = 200
# RFC 3986, appendix A.  No blank, line end or "${": pip reads addresses from a requirements file.
_ADDRESS = re.compile(r"(https?|file)://[\w.~:/?#\[\]@!$&'()*+,;=%-]*", re.ASCII)
_FILENAME = re.compile(r"[\w.+!-]{1,251}\.whl", re.ASCII)  # NAME_MAX, limits.h
_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"--hash=sha(256|384|512):[0-9a-fA-F]{64,128}")
# Characters of a requirement, because some of its patterns take quadratic time.
_MOST_CHARACTERS = 2000
# Printable ASCII without "\\", which continues a line, and "${", which pip replaces by a variable.
_PLAIN = re.compile(r"(?!.*\$\{)[ -\[\]-~]*")
# Version of the layout of a set; a change keeps older sets from being used.
_FORMAT = "2"
_URL = re.compile(r"[a-zA-Z][\w+.]*://")


class Wheel(msgspec.Struct, frozen=True, order=True):
    """One wheel: its name and version, its source, and the digest of its bytes."""

    name: str  # normalised (PEP 503)
    version: str
    filename: str
    url: str
    sha256: str


class Lock(msgspec.Struct, frozen=True):
    """The wheels of a set, for one Python such as "cp311", by name."""

    python: str
    wheels: tuple[Wheel, ...]

    @property
    def id(self) -> str:
        """The name of the set: equal for equal bytes and the same Python, wherever they came from."""
        said = "\n".join((_FORMAT, self.python, *sorted(each.sha256 for each in self.wheels)))
        return hashlib.sha256(said.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {each.version}" for each in self.wheels) or "no packages"


def lock_of(python: str, wheels: Sequence[Wheel]) -> Lock:
    """Return the lock of `wheels`; raises PackageError if two are of one package."""
    names = [each.name for each in wheels]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PackageError(f"the lock has two wheels of {twice[0]}")
    if len(wheels) > _MOST_WHEELS:
        raise PackageError(f"the lock has {len(wheels)} wheels, at most {_MOST_WHEELS}")
    return Lock(python, tuple(sorted(wheels)))


def wheel_of(url: str, sha256: str) -> Wheel:
    """Return the wheel at `url`; raises PackageError for anything but a wheel with its digest."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    if not _ADDRESS.fullmatch(url):
        raise PackageError(f"the lock has an invalid address: {url[:200]!r}")
    filename = os.path.basename(unquote(urlsplit(url).path))
    if not filename.endswith(".whl"):
        raise PackageError(
            f"{filename} is not a wheel: building a source distribution runs its code",
            "build a wheel where you trust it (pip wheel), and name its folder with find_links",
        )
    if not _FILENAME.fullmatch(filename):
        raise PackageError(f"the lock has an invalid file name: {filename[:200]!r}")
    _check_tags([filename])
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise PackageError(f"{filename} has no sha256 in the lock")
    try:
        name, version, _, _ = parse_wheel_filename(filename)
    except InvalidWheelFilename as error:
        raise PackageError(str(error)) from None
    return Wheel(str(name), str(version), filename, url, sha256)


def _check_tags(names: Iterable[str]) -> None:
    """Raise PackageError if wheels have too many tags: a file name of 1,000 characters can stand for
    millions, "a.b.c-a.b.c-a.b.c" for 27 (PEP 425), and each is made before any is looked at."""
    left = _MOST_TAGS
    for name in names:
        parts = os.path.basename(name).removesuffix(".whl").split("-")[-3:]
        left -= math.prod(part.count(".") + 1 for part in parts)
        if left < 0:
            raise PackageError(
                f"the lock has wheels with more than {_MOST_TAGS} tags, at {name[:200]!r}"
            )


def check_requirements(name: str, requirements: Iterable[object]) -> tuple[str, ...]:
    """Return requirements such as "pandas==2.3.*" in one form, sorted.

    Raises PolicyError, which begins with `name`, for one that is invalid or names an address.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    given = [requirements] if isinstance(requirements, str) else list(requirements)
    found = set()
    for each in given:
        text = each if isinstance(each, str) and len(each) <= _MOST_CHARACTERS else ""
        try:
            requirement = Requirement(text if _PLAIN.fullmatch(text) else "")
        except (InvalidRequirement, RecursionError):
            if _URL.match(text):
                raise _address(name, text) from None
            raise PolicyError(
                f"{name}: must be requirements such as 'pandas==2.3.*', got {repr(each)[:200]}"
            ) from None
        if requirement.url:
            raise _address(name, text)
        found.add(str(requirement))
    if len(found) > _MOST_REQUIREMENTS:
        raise PolicyError(f"{name}: at most {_MOST_REQUIREMENTS}, got {len(found)}")
    return tuple(sorted(found))


def _address(name: str, given: str) -> PolicyError:
    return PolicyError(
        f"{name}: must not name an address (URL), got {given[:200]!r}",
        "use a requirement such as 'pandas==2.3.*', or the file pylock.toml or requirements.txt; put a "
        "wheel that no index has into a folder, and name that with find_links (--find-links)",
    )


def normalised(name: str) -> str:
    """Return the one form of the name of a package (PEP 503)."""
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def name_of(requirement: str) -> str:
    """Return the name of the package that a requirement such as "pandas==2.3.*" is about."""
    from packaging.requirements import Requirement

    return normalised(Requirement(requirement).name)


def require_extra() -> None:
    """Raise PackageNotFound if the extra of this module is not installed."""
    try:
        found = [importlib.util.find_spec(name) for name in ("packaging.pylock", "tomli_w")]
    except ImportError:
        found = [None]
    if None in found:
        raise PackageNotFound("packages: the extra is not installed", how_to_install("packages"))


def read_requirements(path: str | os.PathLike[str]) -> list[str]:
    """Return the requirements of a requirements file, with their hashes.

    Raises PackageError and PolicyError for all else that pip would read there, such as options: they
    could name another index, or source distributions.
    """
    found = []
    for line in _text_of(Path(path)).replace("\\\n", " ").splitlines():
        if not (line := _COMMENT.sub("", line).strip()):
            continue
        if line.startswith("-"):
            raise PackageError(
                f"{path}: only requirements and --hash are read, got {line[:200]!r}",
                "name the index and the folder of wheels as options of cellwright",
            )
        words = line.split()
        hashes = [word for word in words if _HASH.fullmatch(word)]
        requirement = " ".join(words[: len(words) - len(hashes)])
        found.append(" ".join([*check_requirements(str(path), [requirement]), *hashes]))
    if len(found) > _MOST_WHEELS:
        raise PackageError(f"{path}: has {len(found)} requirements, at most {_MOST_WHEELS}")
    return found


def read_pylock(path: str | os.PathLike[str], python: HostPython) -> Lock:
    """Return the wheels that a pylock.toml selects for this Python and machine.

    Raises PackageError if it cannot be read, or needs something other than wheels with a sha256.
    """
    from packaging.pylock import PackageWheel, PylockSelectError

    selected = _pylock(Path(path))
    try:
        chosen = list(selected.select(**_target(python)))
    except PylockSelectError as error:
        raise PackageError(f"{path}: {error}") from None
    wheels = []
    for package, source in chosen:
        if not isinstance(source, PackageWheel):
            raise PackageError(
                f"{path}: {package.name} is not a wheel: building it would run its code",
                "lock it with --only-binary :all:",
            )
        beside = Path(path).absolute().parent
        url = source.url or (beside / (source.path or source.filename)).as_uri()
        wheels.append(wheel_of(url, str(source.hashes.get("sha256", "")).lower()))
    return lock_of(python.tag, wheels)


def _target(python: HostPython) -> dict[str, Any]:
    """Return the environment and tags of a Python of another version, for `Pylock.select`."""
    if python.is_ours:
        return {}
    from packaging.markers import default_environment
    from packaging.tags import compatible_tags, cpython_tags, platform_tags

    major, minor, _ = python.version
    short, full = f"{major}.{minor}", ".".join(map(str, python.version))
    versions = {
        "python_version": short,
        "python_full_version": full,
        "implementation_version": full,
    }
    platforms, interpreter = list(platform_tags()), f"cp{major}{minor}"
    tags = [
        *cpython_tags((major, minor), [interpreter], platforms),
        *compatible_tags((major, minor), interpreter, platforms),
    ]
    return {"environment": default_environment() | versions, "tags": tags}


def _pylock(path: Path) -> "Pylock":
    from packaging.pylock import Pylock, PylockValidationError

    text = _text_of(path)
    try:
        data = tomllib.loads(text)
        _check_tags(_wheels_named(data))
        return Pylock.from_dict(data)
    except (ValueError, RecursionError, PylockValidationError) as error:
        raise PackageError(f"{path}: {error}") from None


def _wheels_named(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the file names of wheels in a lock that is not checked yet."""
    for package in _tables(data.get("packages")):
        for wheel in _tables(package.get("wheels")):
            yield str(wheel.get("name", ""))
            yield str(wheel.get("path", ""))
            yield unquote(urlsplit(str(wheel.get("url", ""))).path)


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    yield from (each for each in value if isinstance(each, dict)) if isinstance(value, list) else ()


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise PackageNotFound(f"{path}: no such file")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise PackageError(f"{path}: is longer than {_MOST_BYTES} bytes")
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise PackageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def pylock_text(lock: Lock) -> str:
    """Return `lock` as the text of a pylock.toml, which other installers read too."""
    import tomli_w
    from packaging.pylock import Package, PackageWheel, Pylock
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    packages = [
        Package(
            name=canonicalize_name(each.name),
            version=Version(each.version),
            wheels=[PackageWheel(name=each.filename, url=each.url, hashes={"sha256": each.sha256})],
        )
        for each in lock.wheels
    ]
    made = Pylock(lock_version=Version("1.0"), created_by="cellwright", packages=packages)
    data: dict[str, Any] = dict(made.to_dict())
    return tomli_w.dumps(data)
