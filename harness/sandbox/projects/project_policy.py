"""The policy of a command on a project, and its ten lines of explanation."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ....policies.denied import patterns_beneath
from ....policies.errors import PolicyError
from ....policies.network.credential import CellCredential
from ....policies.network.rule import NetworkRule
from ....policies.network.rules import NetworkRules
from ....policies.policy import Policy, check_policy, lies_in
from ...user_data import cache_directory, state_directory
from .known_programs import KnownAgent, known_programs
from .project import Project, home_directory
from .review_directory import ReviewDirectory, name_of

# Places of programs that are not the distribution's.
_PROGRAMS = ("/usr/local", "/opt", "/nix/store", "/snap")
# What a program may know of the user and the terminal; none is a secret.
_VARIABLES = (
    "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "COLORTERM", "TERM_PROGRAM", "NO_COLOR",
    "FORCE_COLOR", "CI", "EDITOR", "VISUAL", "PAGER",
)  # fmt: skip
_MOST_LINKS = 40  # the kernel's limit (path_resolution(7))
# No host has this name (RFC 6761).  A policy with a rule gives cells a resolver, which tells refused
# names, and these ports, at which a person may allow further hosts while they live.
_LATER = NetworkRule(host="allowed-later.invalid", ports=(80, 443))


class ProjectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The things beside its project that a command may touch.

    `allow`: hosts by name, each with a port after a colon if it is not 443, and after @ the network of
    its addresses if that is not public. `registries`: those of
    package managers, too. `variables`: names of the host's environment, or NAME=VALUE. `read`, `write`:
    further paths. `review`: what is changed in the project waits for a person, elsewhere.
    `host_ports`: of servers on the host's loopback, which programs reach at localhost. `credentials`:
    programs have placeholders for them, and may reach their hosts. `settings`: files that say what
    programs may touch, which they cannot change.
    """

    allow: tuple[str, ...] = ()
    registries: bool = False
    variables: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    review: bool = False
    host_ports: tuple[int, ...] = ()
    credentials: tuple[CellCredential, ...] = ()
    settings: tuple[str, ...] = ()


class ProjectPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy, and the facts by which `explain` tells it."""

    policy: Policy
    project: Project
    agent: str
    missing: str  # the command's name, if this host does not have it
    cache: str
    variables: tuple[str, ...]
    credentials: tuple[CellCredential, ...] = ()

    def explain(self) -> str:
        """Return what programs may touch, in about ten lines."""
        return "\n".join(f"{name:<11}{text}" for name, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        shown, limits = self.policy.filesystem, self.policy.limits
        is_written = self.project.root in shown.write
        how = "read; changes wait for review" if shown.changes else "read and write"
        how = how if is_written else "read"
        yield "project", f"{self.project.root} ({how})"
        words = _named(self.project.protected, self.project.root) or "nothing"
        absent = len(self.project.absent)
        yield "protected", words + (f"; {absent} more may not be made" if absent else "")
        others = [each for each in shown.write if each not in (self.project.root, self.cache)]
        yield "also write", _named(others) or "nothing"
        yield "cache", self.cache
        protected = self.project.protected
        yield "read", _named([each for each in shown.read if each not in protected]) or "nothing"
        programs = [each for each in self.policy.processes.execute if each not in shown.write]
        yield "programs", _named(programs)
        gone = f"; no directory of PATH has {self.missing}" if self.missing else ""
        yield "agent", (self.agent or "none that is known") + gone
        hosts = [each.host for each in self.policy.network.allow if each != _LATER]
        yield "hosts", _named(hosts) or "none"
        yield "variables", _named(self.variables) or "none of the host's"
        for each in self.credentials:
            yield (
                "credential",
                f"{each.variable}, a placeholder: its value goes to {each.host} alone",
            )
        words = f"{limits.memory_bytes >> 20} MiB, {limits.cpus:g} processors"
        yield "limits", f"{words}, {limits.processes} processes"


def _named(words: Sequence[str], root: str = "") -> str:
    """Return a list in one line; of a long one the beginning."""
    short = [each.removeprefix(f"{root}/") if root else each for each in words]
    return ", ".join(short[:12]) + (f" and {len(short) - 12} more" if len(short) > 12 else "")


def policy_of_project(
    base: Policy, project: Project, command: Sequence[str], options: ProjectOptions,
    environment: Mapping[str, str] = os.environ,
) -> ProjectPolicy:  # fmt: skip
    """Return `base` with all that `command` may touch to work on `project`; makes the directories of
    its caches and of a known agent's state.

    Raises PolicyError.
    """
    known, found = known_programs(), _file_of(command, environment)
    name = os.path.basename(command[0]) if command else ""
    cache = _cache_of(project)
    own_files = (project.root, *project.git, cache)
    if name not in known.agents or lies_in(os.path.realpath(found), own_files):
        name = ""  # a file that programs made gets no agent's keys, whatever its name is
    agent = known.agents.get(name, KnownAgent(state=()))
    home = home_directory()
    state, settings = _made(_below(home, agent.state)), _below(home, agent.settings)
    programs = _existing((*_PROGRAMS, *_below(home, known.home.programs)))
    own = _program_directories(found, home, (*programs, project.root))
    git, only_read = project.git, project.protected
    if options.review:  # changes of git directories elsewhere cannot wait
        git, only_read = (), (*only_read, *git)
    own_files = (*own_files, *state)
    write = (
        project.root, *git, *state, cache,
        *(_given("write", each, own_files) for each in options.write),
    )  # fmt: skip
    _check_own((str(state_directory()), str(cache_directory())), write)
    obeyed = [each for each in map(os.path.realpath, options.settings) if lies_in(each, write)]
    read = (
        *_existing((*only_read, *_below(home, known.home.read), *settings)), *obeyed,
        *(_given("read", each, own_files) for each in options.read),
    )  # fmt: skip
    session = environment.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    _check_own((session,), (*write, *read))  # connecting to a socket needs no right to write
    _check_credentials(options.credentials, (*write, *read))
    variables = dict(_variables((*agent.variables, *options.variables), environment))
    for credential in options.credentials:
        variables.pop(credential.variable, None)
    execute = _distinct(base.processes.execute, (*programs, *own, *write))
    hosts = (*agent.hosts, *options.allow, *(known.registries.hosts if options.registries else ()))
    shown, network = base.filesystem, base.network
    changes = dict(shown.changes)
    if options.review:
        changes[project.root] = str(ReviewDirectory(project.root).path)
    # In a review a person decides.  What programs would make in the agent's state is there at once.
    of_project = () if options.review else (*project.protected, *project.absent, *project.patterns)
    protected = (*of_project, *settings, *obeyed)
    policy = replace(
        base,
        filesystem=replace(
            shown, changes=changes, write=_distinct(shown.write, write),
            protected=_distinct(shown.protected, patterns_beneath(protected, write)),
            read=_distinct(shown.read, read),
        ),
        processes=replace(base.processes, execute=execute),
        network=replace(
            network,
            allow=_with_credentials(
                (*network.allow, *map(rule_of, dict.fromkeys(hosts)), *_of_host(options), _LATER),
                options,
            ),
        ),
        environment={
            **_usual_variables(environment, cache),
            **base.environment,
            **agent.environment,
            **variables,
            "HOME": home,
            "PATH": _path(environment, execute),
        },
    )  # fmt: skip
    return ProjectPolicy(
        policy=check_policy(policy), project=project, agent=name,
        missing=command[0] if command and not found else "", cache=cache,
        variables=tuple(variables), credentials=options.credentials,
    )  # fmt: skip


def _usual_variables(environment: Mapping[str, str], cache: str) -> dict[str, str]:
    """Return the variables that every command has, unless something else sets them."""
    known = known_programs()
    return {
        **{each: environment[each] for each in _VARIABLES if each in environment},
        **known.variables,
        **{each: value.format(cache=cache) for each, value in known.caches.items()},
    }


def _cache_of(project: Project) -> str:
    """Make and return the directory for caches of package managers, which no other project has: a
    program could leave a changed package there."""
    cache = os.path.join(os.path.realpath(cache_directory()), "projects", name_of(project.root))
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
    except OSError as error:
        raise PolicyError(
            f"cache: cannot make {cache}: {error.strerror}",
            "set XDG_CACHE_HOME to a directory that you can write",
        ) from None
    return cache


def _below(home: str, paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(home + path[1:] if path.startswith("~/") else path for path in paths)


def _existing(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that exist and are no links: what a link leads to was not chosen by us."""
    return tuple(each for each in paths if os.path.lexists(each) and not os.path.islink(each))


def _made(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that exist, once those that were missing are made: a path with the suffix of
    JSON is a file with an empty object, others are directories."""
    for each in paths:
        if not each.endswith(".json"):
            os.makedirs(each, mode=0o700, exist_ok=True)
        elif not os.path.lexists(each):
            Path(each).write_text("{}\n")
            os.chmod(each, 0o600)
    return _existing(paths)


def _distinct(*lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for paths in lists for each in paths))


def _given(where: str, path: str, own_files: tuple[str, ...]) -> str:
    """Return a path that a person named, without links; raises PolicyError for a link that a program of
    an earlier command can have made: it leads where the program wants."""
    done, links = "/", 0
    rest = os.path.abspath(os.path.expanduser(path)).split("/")
    while rest:
        here = os.path.normpath(os.path.join(done, rest.pop(0)))
        if not os.path.islink(here):
            done = here
            continue
        links += 1
        if links > _MOST_LINKS or lies_in(done, own_files):
            raise PolicyError(
                f"{where}: {path}: programs could have made the link {here}",
                f"name what it leads to, if you want that: {os.path.realpath(path)}",
            )
        target = os.readlink(here)
        done, rest = "/" if target.startswith("/") else done, target.split("/") + rest
    return done


def _check_own(own: Sequence[str], shown: Sequence[str]) -> None:
    """Raise PolicyError if programs would get directories that cellwright keeps, or that have the
    sockets of the user's session."""
    for each, path in product(shown, map(os.path.realpath, own)):
        if lies_in(path, (each,)):
            raise PolicyError(
                f"{each} holds {path}, by which programs could leave their cell",
                "choose a directory below it, or set XDG_STATE_HOME, XDG_CACHE_HOME or "
                "XDG_RUNTIME_DIR to one outside",
            )


def _check_credentials(credentials: Sequence[CellCredential], shown: Sequence[str]) -> None:
    for each in credentials:
        kind, _, path = each.key.partition(":")
        if kind == "file" and lies_in(os.path.realpath(path), tuple(shown)):
            raise PolicyError(
                f"credential: {each.variable}: programs could read the file of its value",
                "keep it outside the paths that the command has",
            )


def _variables(wanted: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for each in wanted:
        name, has_value, value = each.partition("=")
        if has_value:
            yield name, value
        elif name in environment:
            yield name, environment[name]


def _file_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the path of the command's file on the host, empty if there is none."""
    import shutil

    return (shutil.which(command[0], path=environment.get("PATH")) or "") if command else ""


def _program_directories(found: str, home: str, shown: tuple[str, ...]) -> tuple[str, ...]:
    """Return what has to be shown so that a command that lies elsewhere can be executed: the directory
    of its file, or the one above it if that is bin and not the home directory."""
    if not found:
        return ()
    wanted = []
    for path in (os.path.abspath(found), os.path.realpath(found)):
        directory = os.path.dirname(path)
        above = os.path.dirname(directory)
        if os.path.basename(directory) == "bin" and not lies_in(home, (above,)):
            directory = above
        if not lies_in(directory, (*shown, "/usr", "/bin", "/sbin")) and not lies_in(
            home, (directory,)
        ):
            wanted.append(os.path.realpath(directory))
    return tuple(wanted)


def _path(environment: Mapping[str, str], execute: Sequence[str]) -> str:
    """Return the directories of the host's PATH that cells see."""
    places = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", *execute)
    mine = [each for each in environment.get("PATH", "").split(":") if each.startswith("/")]
    kept = [each for each in mine if lies_in(os.path.realpath(each), places)]
    return ":".join(dict.fromkeys((*kept, "/usr/bin", "/bin")))


def _of_host(options: ProjectOptions) -> tuple[NetworkRule, ...]:
    if not options.host_ports:
        return ()
    loopback = ("127.0.0.0/8", "::1/128")
    return (
        NetworkRule(
            host="localhost", ports=options.host_ports, schemes=("tcp",), addresses=loopback
        ),
    )


def _with_credentials(
    rules: tuple[NetworkRule, ...], options: ProjectOptions
) -> tuple[NetworkRule, ...]:
    """Return `rules` and those that let programs reach the hosts of credentials."""
    for each in options.credentials:
        known = NetworkRules(rules)
        if not all(known.decide(each.host, port, each.scheme).is_allowed for port in each.ports):
            rules = (*rules, each.rule)
    return rules


def rule_of(host: str) -> NetworkRule:
    """Return the rule of HOST[:PORT][@NETWORK]; raises PolicyError."""
    place, _, networks = host.partition("@")
    name, colon, port = place.partition(":")
    if colon and not port.isdigit():
        raise PolicyError(
            f"allow: must be HOST[:PORT][@NETWORK], got {host!r}",
            "such as registry.example.org, or registry.example.org:8443@10.1.0.0/16",
        )
    return NetworkRule(
        host=name, ports=(int(port),) if colon else None,
        addresses=tuple(networks.split(",")) if networks else (),
    )  # fmt: skip
