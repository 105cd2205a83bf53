"""`SrtSettings`: the settings file of srt, another sandbox for commands, as `exec --settings` obeys it.

srt.toml says of each field whether it is honoured.  A file that is broken, or that has an unknown
field, is an error: no other settings take its place.
"""

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from .....policies.argument_checks import did_you_mean
from .....policies.denied import denied_by, patterns_beneath
from .....policies.errors import PolicyError
from .....policies.network.rule import NetworkDenial, NetworkRule
from .....policies.policy import Policy, check_policy, lies_in, named_paths
from ..known_programs import known_programs
from ..project_policy import ProjectOptions, ProjectPolicy

_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 200_000  # entries of directories that are searched for protected names
_SECTIONS = ("network", "filesystem", "credentials", "git")
_OWN = ("/dev", "/proc")  # each cell has its own, as of /tmp
_MAGIC = frozenset("*?[")
_WEB_PORTS = (80, 443)


class _Literal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    literal: Literal[True]


class _NetworkFields(msgspec.Struct, frozen=True):
    allowedDomains: tuple[str, ...]  # noqa: N815 - the names of srt
    deniedDomains: tuple[str, ...]  # noqa: N815
    deniedResolvedAddresses: tuple[str, ...] = ()  # noqa: N815
    allowAllUnixSockets: bool = False  # noqa: N815


class _FileFields(msgspec.Struct, frozen=True):
    denyRead: tuple[str | _Literal, ...]  # noqa: N815
    allowWrite: tuple[str | _Literal, ...]  # noqa: N815
    denyWrite: tuple[str | _Literal, ...]  # noqa: N815
    allowRead: tuple[str | _Literal, ...] = ()  # noqa: N815
    allowGitConfig: bool = False  # noqa: N815


class _Credential(msgspec.Struct, frozen=True):
    mode: Literal["deny", "mask"]
    path: str = ""
    name: str = ""


class _CredentialFields(msgspec.Struct, frozen=True):
    files: tuple[_Credential, ...] = ()
    envVars: tuple[_Credential, ...] = ()  # noqa: N815


class _GitFields(msgspec.Struct, frozen=True):
    safeDirectories: tuple[str, ...] = ()  # noqa: N815


class _SettingFields(msgspec.Struct, frozen=True):
    network: _NetworkFields
    filesystem: _FileFields
    credentials: _CredentialFields = _CredentialFields()
    git: _GitFields = _GitFields()
    mandatoryDenySearchDepth: int = 3  # noqa: N815


@cache
def srt_fields() -> dict[str, tuple[str, str]]:
    """Return each field of srt, such as network.allowedDomains: how it is treated, and a reason."""
    with open(os.path.join(os.path.dirname(__file__), "srt.toml"), "rb") as file:
        table = tomllib.load(file)
    return {
        name if section == "other" else f"{section}.{name}": (row[0], row[1])
        for section, rows in table.items()
        for name, row in rows.items()
    }


class SrtSettings:
    """A settings file of srt.  `notices`: its fields that are ignored, with the reason."""

    def __init__(self, path: str) -> None:
        """Raises PolicyError for a file that cannot be read, or cannot be honoured."""
        self.path = os.path.expanduser(path)
        self.notices: list[str] = []
        self._named: dict[str, str] = {}  # paths without links, as the file has them
        data = self._read()
        for name, value in _fields_of(data):
            self._check(name, value)
        try:
            found = msgspec.convert(data, _SettingFields)
        except msgspec.ValidationError as error:
            raise self._error(str(error)) from None
        self._found, self._files = found, found.filesystem
        self._allowed = tuple(map(self._rule, found.network.allowedDomains))
        self._denied = tuple(
            denial for each in found.network.deniedDomains if (denial := self._denial(each))
        )
        for each in found.network.deniedResolvedAddresses:
            self._require_refused(each, "network.deniedResolvedAddresses")
        self._hidden = (
            *(self._path(each, patterns=True) for each in self._files.denyRead),
            *(self._path(each, patterns=True) for each in self._denied_credentials()),
        )
        self._read_paths = self._paths("allowRead")
        self._written = tuple(
            each for each in self._paths("allowWrite")
            if not lies_in(each, _OWN) and each != "/tmp"  # noqa: S108
        )  # fmt: skip

    def _error(self, why: str, hint: str = "") -> PolicyError:
        return PolicyError(f"--settings: {self.path}: {why}", hint)

    def _read(self) -> dict[str, Any]:
        try:
            with open(self.path, "rb") as file:
                content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise self._error(f"is larger than {_MOST_BYTES} bytes")
            return msgspec.json.decode(content, type=dict[str, Any])
        except OSError as error:
            raise self._error(str(error.strerror)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error(str(error), "repair it: no other settings take its place") from None

    def _check(self, name: str, value: object) -> None:
        if name not in srt_fields():
            hint = did_you_mean(name, tuple(srt_fields()))
            raise self._error(f"unknown field {name!r}", hint)
        how, why = srt_fields()[name]
        if value in (False, None, [], {}, ""):
            return
        if how == "refused":
            raise self._error(f"{name}: not supported: {why}", "take it out of a copy of the file")
        if how == "ignored":
            self.notices.append(f"{self.path}: {name} is ignored: {why}")

    # network

    def _rule(self, entry: str) -> NetworkRule:
        host, port = self._split(entry, "network.allowedDomains")
        if host == "localhost":
            if port is None:
                raise self._error(
                    "network.allowedDomains: localhost must have a port, such as localhost:11434"
                )
            loopback = ("127.0.0.0/8", "::1/128")
            return NetworkRule(host=host, ports=(port,), schemes=("tcp",), addresses=loopback)
        if _address(host):
            raise self._error(f"network.allowedDomains: must be a name, got {entry!r}")
        if port is None or port in _WEB_PORTS:
            return NetworkRule(host=host, ports=_WEB_PORTS if port is None else (port,))
        return NetworkRule(host=host, ports=(port,), schemes=("tcp",))

    def _denial(self, entry: str) -> NetworkDenial | None:
        host, port = self._split(entry, "network.deniedDomains")
        if _address(host):
            self._require_refused(host, "network.deniedDomains")
            return None
        return NetworkDenial(host=host, ports=None if port is None else (port,))

    def _split(self, entry: str, field: str) -> tuple[str, int | None]:
        if entry.startswith("["):
            return entry[1:].partition("]")[0], None
        host, colon, port = entry.rpartition(":")
        if not colon or ":" in host:
            return entry, None
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            raise self._error(f"{field}: must be a host, or HOST:PORT, got {entry!r}")
        return host, int(port)

    def _require_refused(self, text: str, field: str) -> None:
        """Raise PolicyError unless every cell is refused these addresses in any case."""
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise self._error(f"{field}: {error}") from None
        if network.is_global:
            raise self._error(f"{field}: public addresses cannot be denied, got {text!r}")

    # files

    def _denied_credentials(self) -> Iterator[str]:
        credentials = self._found.credentials
        for each in (*credentials.files, *credentials.envVars):
            if each.mode == "mask":
                name = each.path or each.name
                why = f"credentials: {name}: mode mask is not supported"
                raise self._error(why, "use --credential")
        yield from (each.path for each in credentials.files)

    def _paths(self, field: str) -> tuple[str, ...]:
        return tuple(self._path(each) for each in getattr(self._files, field))

    def _path(self, entry: str | _Literal, *, patterns: bool = False) -> str:
        """Return the absolute path, without links, of an entry that is relative to this directory."""
        text = entry if isinstance(entry, str) else entry.path
        path = os.path.abspath(os.path.expanduser(text))
        if isinstance(entry, str) and not patterns and not os.path.lexists(path):
            path = path.removesuffix("/**")
        if _MAGIC & set(path) and not os.path.lexists(path):
            if patterns and isinstance(entry, str):
                return path.removesuffix("/**") if _MAGIC.isdisjoint(path[:-3]) else path
            raise self._error(f"filesystem: must be a path here, not a pattern, got {text!r}")
        real = os.path.realpath(path)
        self._named[real] = path
        return real

    def protect(self, root: str) -> tuple[str, ...]:
        """Return the paths in the project that its commands may not change."""
        names = [each for each in self._paths("denyWrite") if lies_in(each, (root,))]
        return (*names, *self._nested(root))

    def _nested(self, root: str) -> Iterator[str]:
        """Yield protected names below the root itself, in as many levels as the settings say."""
        wanted = {name.partition("/")[0] for name in known_programs().protected_names}
        waiting, seen = [(root, 1)], 0
        while waiting:
            directory, level = waiting.pop()
            try:
                entries = list(os.scandir(directory))
            except OSError:
                continue  # the command cannot read it either, except as root
            seen += len(entries)
            if seen > _MOST_ENTRIES:
                raise self._error(
                    f"mandatoryDenySearchDepth: the project has more than {_MOST_ENTRIES} entries "
                    "there",
                    "make it smaller",
                )
            if level > 1:
                yield from _protected_in(directory, wanted & {each.name for each in entries})
            if level < self._found.mandatoryDenySearchDepth:
                waiting += [
                    (each.path, level + 1) for each in entries
                    if each.is_dir(follow_symlinks=False) and each.name != ".git"
                ]  # fmt: skip

    @property
    def unprotect(self) -> tuple[str, ...]:
        return (".git/config",) if self._files.allowGitConfig else ()

    def options(self, options: ProjectOptions) -> ProjectOptions:
        """Return what a command may touch beside its project: `options`, and what the settings say."""
        safe = self._found.git.safeDirectories
        git = [f"GIT_CONFIG_COUNT={len(safe)}"] if safe else []
        for number, each in enumerate(safe):
            git += [f"GIT_CONFIG_KEY_{number}=safe.directory", f"GIT_CONFIG_VALUE_{number}={each}"]
        shown = [self._named[each] for each in self._read_paths if os.path.lexists(each)]
        written = [self._named[each] for each in self._written if os.path.lexists(each)]
        return replace(
            options, variables=(*options.variables, *git), read=(*options.read, *shown),
            write=(*options.write, *written),
        )  # fmt: skip

    def narrowed(self, found: ProjectPolicy) -> ProjectPolicy:
        """Return the policy of a command with the rules of the settings; raises PolicyError."""
        policy = self._with_writing(found)
        policy = self._with_hidden(policy, found.project.root)
        network, groups = policy.network, policy.syscalls.groups
        if not self._found.network.allowAllUnixSockets:
            groups = tuple(each for each in groups if each != "unix_sockets")
        denied = {each.name for each in self._found.credentials.envVars}
        kept = {name: value for name, value in policy.environment.items() if name not in denied}
        policy = replace(
            policy,
            network=replace(
                network, allow=(*network.allow, *self._allowed), deny=(*network.deny, *self._denied)
            ),
            syscalls=replace(policy.syscalls, groups=groups),
            environment=kept,
        )
        variables = tuple(each for each in found.variables if each not in denied)
        return replace(found, policy=check_policy(policy), variables=variables)

    def _with_writing(self, found: ProjectPolicy) -> Policy:
        """Return the policy in which the project is writable only where allowWrite says so."""
        policy, project = found.policy, found.project
        files, denied = policy.filesystem, self._paths("denyWrite")
        write, read, protected = list(files.write), list(files.read), [*files.protected]
        if not lies_in(project.root, self._written):
            closed = (project.root, *project.git)
            write = [each for each in write if each not in closed or each in self._written]
            read += closed
        for each in denied:
            if not lies_in(each, tuple(write)):
                continue
            if each in write:
                write.remove(each)
            else:  # nor may it be made
                protected.append(each)
            if os.path.lexists(each):
                read.append(each)
        shown = replace(
            files, write=tuple(write), read=tuple(dict.fromkeys(read)),
            protected=patterns_beneath(dict.fromkeys(protected), tuple(write)),
        )  # fmt: skip
        return replace(policy, filesystem=shown)

    def _with_hidden(self, policy: Policy, root: str) -> Policy:
        """Return the policy without the paths that denyRead hides."""
        gone: set[str] = set()
        kept: list[str] = []
        for pattern in self._hidden:
            denied = denied_by((pattern,))
            opened = (*self._read_paths, *self._written)
            allowed = [each for each in opened if denied.beneath(each) is None]
            beneath = [(path, denied.beneath(path)) for _, path in named_paths(policy)]
            gone |= {
                path for path, rest in beneath if rest is None and not lies_in(path, tuple(allowed))
            }
            around = [path for path, rest in beneath if rest]
            if around and allowed:
                raise self._error(
                    f"filesystem: {allowed[0]} is allowed and lies in {pattern}, which is hidden in "
                    f"{around[0]}",
                    "name the other entries of that directory in denyRead",
                )
            kept += [pattern] if around else []
        if root in gone:
            raise self._error("filesystem.denyRead hides the project", "name it in allowRead")
        files, processes = policy.filesystem, policy.processes

        def rest(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(each for each in paths if each not in gone)

        return replace(
            policy,
            filesystem=replace(
                files, read=rest(files.read), write=rest(files.write),
                hidden=(*files.hidden, *dict.fromkeys(kept)),
            ),
            processes=replace(processes, execute=rest(processes.execute)),
        )  # fmt: skip


def _fields_of(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name in _SECTIONS and isinstance(value, dict):
            yield from ((f"{name}.{each}", inner) for each, inner in value.items())
        elif name not in _SECTIONS:  # another type: its conversion says what it must be
            yield name, value


def _address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _protected_in(directory: str, names: set[str]) -> Iterator[str]:
    for name in known_programs().protected_names:
        path = os.path.join(directory, name)
        if name.partition("/")[0] in names and os.path.lexists(path):
            yield path
