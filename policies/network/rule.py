"""A network rule: one line of a policy that allows or denies. Data alone.

`rule_checks.py` refuses the invalid ones, and `rules.py` decides by the others.
"""

from typing import Literal, get_args

import msgspec

Scheme = Literal["http", "https", "tcp"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
Sni = Literal["match", "any"]
SNI: tuple[Sni, ...] = get_args(Sni)
_IN_EVERY_LINE = ("host", "ports", "sni", "any")
_STANDARD_PORTS: dict[Scheme, int] = {"http": 80, "https": 443}


def _have_tuples(rule: msgspec.Struct, names: tuple[str, ...]) -> None:
    """Make tuples of lists, so that rules can be compared and hashed."""
    for name in names:
        if isinstance(value := getattr(rule, name), list):
            msgspec.structs.force_setattr(rule, name, tuple(value))


class NetworkRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule that allows connections to a host.

    host: a name; `*.example.org` stands for every name below example.org, not for itself
    any: `host` may be `*`, or have a wildcard directly below a public suffix such as `com`
    ports: default 443, or the standard ports of `schemes`
    schemes: `https`, TLS that asks for the same name; `http`; `tcp`, any bytes.  Default http on port
        80 and https on others
    sni: `match`: over https the program must ask for `host` in its first message; `any`: it may ask for
        another server, for none, or for one that nobody can read (ECH)
    methods, paths: of requests, default all; a path that ends in `*` stands for all that begin with
        it.  Only for http: nothing outside the program can read a request over https, except that of
        the tool `http.request`
    addresses: networks that are not public and that the name may resolve to, such as 10.1.0.0/16
    connections: open at a time
    connections_per_second: with a burst of one second's worth
    sent_bytes, received_bytes: of all connections of one cell together, default unlimited
    lifetime_seconds: how long the rule holds, from the moment the sandbox is made, default unlimited

    If several rules match, a connection needs only one of them to allow it, and keeps the caps of all.
    """

    host: str
    any: bool = False
    ports: tuple[int, ...] | None = None
    schemes: tuple[Scheme, ...] | None = None
    sni: Sni = "match"
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    addresses: tuple[str, ...] = ()
    connections: int = 64
    connections_per_second: float = 100.0
    sent_bytes: int | None = None
    received_bytes: int | None = None
    lifetime_seconds: float | None = None

    def __post_init__(self) -> None:
        _have_tuples(self, ("ports", "schemes", "methods", "paths", "addresses"))

    @property
    def has_requests(self) -> bool:
        """Tell whether the rule allows only some requests."""
        return self.methods is not None or self.paths is not None

    def __str__(self) -> str:
        ports = ",".join(map(str, self.each_port()))
        return f"allow {self.host}:{ports}" + (" with any SNI" if self.sni == "any" else "")

    def in_full(self) -> str:
        """Return the rule with the settings beyond host and ports that differ from the default."""
        default, found = NetworkRule(host=self.host), []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in _IN_EVERY_LINE or value == getattr(default, name):
                continue
            found.append(f"{name} {' '.join(value) if isinstance(value, tuple) else value}")
        return f"{self} ({', '.join(found)})" if found else str(self)

    def each_port(self) -> tuple[int, ...]:
        if self.ports is not None:
            return self.ports
        standard = [_STANDARD_PORTS[each] for each in self.schemes or () if each != "tcp"]
        return tuple(dict.fromkeys(standard)) or (_STANDARD_PORTS["https"],)

    def schemes_on(self, port: int) -> tuple[Scheme, ...]:
        if self.schemes is not None:
            return self.schemes
        return ("http",) if port == _STANDARD_PORTS["http"] else ("https",)


class NetworkDenial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule that denies connections to a host, whatever else allows them.

    host: as in a NetworkRule; `*` is every name
    ports: default all
    """

    host: str
    ports: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _have_tuples(self, ("ports",))

    def __str__(self) -> str:
        ports = "" if self.ports is None else ":" + ",".join(map(str, self.ports))
        return f"deny {self.host}{ports}"
