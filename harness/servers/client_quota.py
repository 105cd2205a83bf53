"""Clients of a server: their tokens, each with a name, and their limits: `ClientQuota` for each and for
all together, `HeldAmount` for what one request holds of it, `OwnedTable` for things by key, such as
sessions, that count for their owner, and the limit of open descriptors of the process.

`http_access.py` has limits for work that waits.
"""

import contextlib
import os
import re
import resource
import stat
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...policies.errors import PolicyError, QuotaExceeded


class QuotaLevel(NamedTuple):
    """A limit of each holder; `of` returns the holder that a client belongs to, `word` is its name in
    the error."""

    most: float
    word: str = "client"
    of: Callable[[Any], Hashable] = lambda client: client


class ClientQuota:
    """Counts `what` (such as connections, or bytes) for each client; safe from many threads.

    `per_client` is the limit of one client, `total` that of all clients together.  `hint` is added to
    the error; `above` are limits of those that several clients belong to.
    """

    def __init__(
        self, what: str, per_client: int | QuotaLevel, total: float, hint: str = "",
        above: Sequence[QuotaLevel] = (),
    ) -> None:  # fmt: skip
        self._what = what
        own = per_client if isinstance(per_client, QuotaLevel) else QuotaLevel(per_client)
        everybody = QuotaLevel(total, f"all {own.word}s together", lambda client: None)
        self._levels = (own, everybody, *above)
        self._hint = hint
        self._lock = threading.Lock()
        self._held: Counter[tuple[int, Hashable]] = Counter()

    def take(self, client: Hashable, amount: int = 1) -> None:
        """Count `amount` more for a client; beyond a limit raises QuotaExceeded and counts nothing."""
        with self._lock:
            for holder, level in self._holders_of(client):
                if self._held[holder] + amount > level.most:
                    each = "" if level.word.startswith("all") else "each "
                    limit = f"{level.most} for {each}{level.word}"
                    break
            else:
                self._add(client, amount)
                return
        raise QuotaExceeded(f"too many {self._what}: at most {limit}", self._hint, limit=self._what)

    def give_back(self, client: Hashable, amount: int = 1) -> None:
        """Count `amount` less for a client."""
        with self._lock:
            self._add(client, -amount)

    @contextlib.contextmanager
    def held(self, client: Hashable, amount: int = 1) -> Iterator[None]:
        """Count `amount` more during the block; raises QuotaExceeded before it."""
        self.take(client, amount)
        try:
            yield
        finally:
            self.give_back(client, amount)

    def _holders_of(self, client: Hashable) -> Iterator[tuple[tuple[int, Hashable], QuotaLevel]]:
        for number, level in enumerate(self._levels):
            yield (number, level.of(client)), level

    def _add(self, client: Hashable, amount: int) -> None:
        """Count, and drop the entries of holders of nothing: clients come and go without bound."""
        for holder, _ in self._holders_of(client):
            self._held[holder] += amount
            if not self._held[holder]:
                del self._held[holder]


class HeldAmount:
    """The part of a quota that one request of a client holds until the end of the block."""

    def __init__(self, quota: ClientQuota, client: Hashable) -> None:
        self._quota = quota
        self._client = client
        self._amount = 0

    def __enter__(self) -> "HeldAmount":
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.give_back(self._client, self._amount)
        self._amount = 0

    def grow_to(self, amount: int) -> None:
        """Raise the held amount to `amount`; raises QuotaExceeded and leaves the amount unchanged."""
        if amount > self._amount:
            self._quota.take(self._client, amount - self._amount)
            self._amount = amount


_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


class OwnersQuota(Protocol):
    """Counts the things of each owner."""

    def take(self, owner: Any, amount: int = 1, /) -> None:
        """Count `amount` more; raises QuotaExceeded and counts nothing."""

    def give_back(self, owner: Any, amount: int = 1, /) -> None: ...


class OwnedTable(Generic[_K, _T]):
    """Safe from many threads.

    The table drops things for which `is_over` holds before it lists or adds any; `on_over` gets the key
    and the thing.
    """

    def __init__(
        self, quota: OwnersQuota, is_over: Callable[[_T], object],
        on_over: Callable[[_K, _T], object] = lambda key, thing: None,
    ) -> None:  # fmt: skip
        self._quota = quota
        self._is_over = is_over
        self._on_over = on_over
        self._lock = threading.Lock()
        self._all: dict[_K, tuple[Any, _T]] = {}

    @contextmanager
    def room(self, owner: Any, n: int = 1) -> Iterator[Callable[[_K, _T], _T]]:
        """Keep room for `n` more things of an owner during the block; raises QuotaExceeded.

        The block adds each by the function that it gets, which returns the thing that has the key: the
        given one, or one that another thread added first.
        """
        self.drop_over()
        self._quota.take(owner, n)
        left = n

        def put(key: _K, thing: _T) -> _T:
            nonlocal left
            with self._lock:
                known = self._all.get(key)
                if known and not self._is_over(known[1]):
                    return known[1]
                if known is None and left:
                    left -= 1
                elif known is None:
                    self._quota.take(owner)
                self._all[key] = owner, thing
                return thing

        try:
            yield put
        finally:
            self._quota.give_back(owner, left)

    def get(self, key: _K) -> _T | None:
        """Return the thing of a key, even if it is over; None if there is none."""
        with self._lock:
            return self._all.get(key, (None, None))[1]

    def pop(self, key: _K) -> _T | None:
        """Remove and return the thing of a key; None if there is none."""
        with self._lock:
            owner, thing = self._all.pop(key, (None, None))
        if thing is not None:
            self._quota.give_back(owner)
        return thing

    def items(self) -> list[tuple[_K, _T]]:
        """Return all things by key, the oldest first."""
        self.drop_over()
        with self._lock:
            return [(key, thing) for key, (_, thing) in self._all.items()]

    def of(self, owner: Any) -> list[_T]:
        """Return the things of an owner, the oldest first."""
        self.drop_over()
        with self._lock:
            return [thing for whose, thing in self._all.values() if whose == owner]

    def drop_over(self) -> None:
        """Drop the things that are over."""
        with self._lock:
            over = [(key, *each) for key, each in self._all.items() if self._is_over(each[1])]
            for key, _, _ in over:
                del self._all[key]
        for key, owner, thing in over:
            self._quota.give_back(owner)
            self._on_over(key, thing)


_WANTED = 65_536


def allow_descriptors() -> None:
    """Raise the soft RLIMIT_NOFILE to 65,536, or the hard limit if that is lower: a cell takes a dozen
    descriptors, a connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


MCP_VARIABLE, WEB_VARIABLE = "CELLWRIGHT_MCP_TOKEN", "CELLWRIGHT_WEB_TOKEN"
OPERATOR = "operator"  # a role
# In the scope of an admitted request: the name of its token, and an event that is set once the client
# has disconnected.
CLIENT, GONE = "cellwright.client", "cellwright.gone"
_SHORTEST = 16
_LARGEST_FILE = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ONLY = "client"


class Tokens:
    """Maps tokens to the names of clients; keeps only hashes of the tokens."""

    def __init__(self, by_name: dict[str, str], operators: Set[str] = frozenset()) -> None:
        """Raise PolicyError for a token that is too short or not unique.

        `operators`: the clients that act for a person who looks after the server.
        """
        for name, token in by_name.items():
            if len(token) < _SHORTEST:
                raise PolicyError(
                    f"the token of {name!r} must have at least {_SHORTEST} characters"
                )
        self._operators = operators
        self._hashes = {name: _hash(token) for name, token in by_name.items()}
        if len(set(self._hashes.values())) < len(self._hashes):
            raise PolicyError("two clients have the same token", "give each client its own")

    def client_of(self, authorization: str) -> str | None:
        """Return the client's name for an Authorization header, None for an unknown token.

        It compares every token, each in constant time.
        """
        from hmac import compare_digest  # loads OpenSSL, which a daemon does without

        scheme, _, token = authorization.partition(" ")
        given = _hash(token.strip())
        found = [name for name, known in self._hashes.items() if compare_digest(given, known)]
        return found[0] if found and scheme.lower() == "bearer" else None

    def is_operator(self, client: str) -> bool:
        """Tell whether a client is an operator."""
        return client in self._operators


class HttpSettings(NamedTuple):
    """Where the server listens and who may connect.  `made` is a generated token, "" if the clients
    have theirs; `hosts` are the allowed names of this server, `origins` the allowed origins of web
    pages."""

    host: str
    port: int
    tokens: Tokens
    made: str
    hosts: tuple[str, ...]
    origins: tuple[str, ...]


def _hash(token: str) -> bytes:
    from hashlib import sha256

    return sha256(token.encode("utf-8", "replace")).digest()


def make_token() -> str:
    from secrets import token_urlsafe

    return token_urlsafe(32)


def tokens_of(
    path: str | None,
    variable: str,
    roles: Set[str] = frozenset(),
    make: Callable[[], str] = make_token,
) -> tuple[Tokens, str]:
    """Return the tokens of a file, else of the environment, else one that `make` generates, which is
    also returned.

    A line of the file is a token, or a name and a token, or with `roles` a name, a token and one of
    them; without a file, the only client has every role.  Raises PolicyError.
    """
    if path is not None:
        return _parsed(_read(path), path, roles), ""
    operators = frozenset((_ONLY,) if OPERATOR in roles else ())
    if given := os.environ.get(variable):
        return Tokens({_ONLY: given.strip()}, operators), ""
    made = make()
    return Tokens({_ONLY: made}, operators), made


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise PolicyError(f"{path} can be read by other users", f"chmod 600 {path}")
            return file.read(_LARGEST_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read {path}: {error}") from None


def _parsed(text: str, path: str, roles: Set[str]) -> Tokens:
    lines = [line.split() for line in text.splitlines() if line.strip() and line[0] != "#"]
    found: dict[str, str] = {}
    operators = set()
    for words in lines:
        name, token, *role = words if len(words) > 1 else (_ONLY, words[0])
        if len(role) > 1 or not roles >= {*role} or not _NAME.fullmatch(name) or name in found:
            forms = " or ".join(("TOKEN", "NAME TOKEN", *(f"NAME TOKEN {each}" for each in roles)))
            raise PolicyError(f"{path}: each line must be {forms}, with unique names")
        found[name] = token
        if OPERATOR in role:
            operators.add(name)
    if not found:
        raise PolicyError(f"{path} contains no token")
    return Tokens(found, operators)
