"""`HttpClient`: makes requests that its rules allow, with the credentials that belong to them.

The order of a request: read the URL, decide by its name, resolve it once, check each address, dial a
checked one, and only then send.  Each redirect takes the same way.

Tunnels of the HTTP tool through an upstream proxy of the host.

The proxy resolves the names, so that addresses cannot be checked: rules then hold by name alone.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ....policies.errors import PolicyError, ToolArgumentsInvalid, ToolDenied, ToolFailed
from ....policies.network.address_ranges import refusal_of
from ....policies.network.rule import NetworkDenial, NetworkRule
from ....policies.network.rule_checks import check_rules
from ....policies.network.rules import HttpRequest, NetworkRules, NetworkVerdict, RuleUse
from ....policies.network.upstream_proxy import ProxyError, UpstreamProxy, is_open, proxy_of
from ....runner.egress.addresses import is_own_address
from . import targets
from .http_exchange import (
    CallDeadline,
    HttpAnswer,
    HttpError,
    Resolve,
    addresses_of,
    dial,
    receive,
    request_bytes,
    secured,
    send,
    system_addresses,
)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_REDIRECTS = (301, 302, 303, 307, 308)
_SAME_METHOD = (307, 308)


class HttpCaps(NamedTuple):
    """Caps of one call, redirects included.

    `request_bytes` caps the body; `response_bytes` the answer's body, as it is sent and again as it is
    decompressed.
    """

    seconds: float = 30.0
    request_bytes: int = 1_048_576
    response_bytes: int = 8_388_608
    redirects: int = 5


class RequestRecord(NamedTuple):
    """The record of one request in the audit trail, without its path, headers and body."""

    host: str
    port: int
    scheme: str
    method: str
    address: str  # the dialled address; "" if none
    status: int  # 0 without an answer
    sent_bytes: int
    received_bytes: int
    seconds: float
    rule: str
    outcome: str  # "ok", or why there is no answer
    is_allowed: bool


Record = Callable[[RequestRecord], None]


class _Hop(NamedTuple):
    """One request of a call."""

    target: targets.Target
    method: str
    headers: dict[str, str]
    body: bytes
    caller: str


class _Progress:
    """The known facts of one request."""

    def __init__(self) -> None:
        self.verdict = NetworkVerdict(False, None, "")
        self.address = ""
        self.status = self.sent_bytes = self.received_bytes = 0
        self.outcome = "not sent"
        self.is_allowed = True


class HttpClient:
    """Makes requests that rules allow.  Safe from many threads.

    `allow`, `deny` and `addresses` are those of a policy's network; methods and paths hold for https
    too, and the caps of a rule for all callers together.  `resolve` returns the addresses of a name.
    With `proxy`, a URL or "environment" for HTTPS_PROXY, requests go through that proxy, which resolves
    the names: addresses are not checked then.  Raises PolicyError for invalid arguments.
    """

    def __init__(
        self,
        allow: Sequence[NetworkRule],
        deny: Sequence[NetworkDenial] = (),
        addresses: Sequence[str] = (),
        *,
        credentials: Sequence[targets.HttpCredential] = (),
        ca_file: str | None = None,
        proxy: str | None = None,
        caps: HttpCaps = HttpCaps(),  # noqa: B008 - a constant
        resolve: Resolve = system_addresses,
    ) -> None:
        check_rules(allow, deny, addresses, "http", reads_requests=True)
        targets.check_credentials(credentials)
        for name, value in caps._asdict().items():
            if isinstance(value, bool) or not 0 < value < 2**53:
                raise PolicyError(f"{name}: must be more than 0, got {value!r}")
        self.credentials = tuple(credentials)
        self._rules = NetworkRules(allow, deny, addresses)
        self._caps = caps
        self._resolve = resolve
        self._context = _tls(ca_file)
        self._proxy = None if proxy is None else proxy_of(proxy)
        self._made_at = time.monotonic()
        self._uses: dict[NetworkRule, RuleUse] = {}
        self._lock = threading.Lock()

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes,
        secrets: Mapping[str, str], record: Record, caller: str = "",
    ) -> tuple[targets.Target, HttpAnswer]:  # fmt: skip
        """Return the answer to a request and the target that gave it, after redirects.

        `secrets` are the credentials by their key; each `caller` has its share of lookups.  Raises
        ToolDenied, ToolArgumentsInvalid and ToolFailed.
        """
        if method not in METHODS:
            raise ToolArgumentsInvalid(f"method: must be one of {', '.join(METHODS)}")
        if len(body) > self._caps.request_bytes:
            raise ToolArgumentsInvalid(f"body: must have at most {self._caps.request_bytes} bytes")
        try:
            first = targets.target_of(url)
        except targets.TargetError as error:
            raise ToolDenied(f"url: {error}") from None
        deadline = CallDeadline(self._caps.seconds)
        hop, is_away = _Hop(first, method, targets.checked_headers(headers), body, caller), False
        for _ in range(self._caps.redirects + 1):
            # No credentials even for the first origin, once a redirect of another origin has chosen the
            # URL.
            given = {} if is_away else secrets
            answer = self._perform(hop, given, deadline, record)
            following = _following(hop, answer)
            if following is None:
                return hop.target, answer
            is_away = is_away or following.target.origin != first.origin
            hop = following
        raise ToolFailed(f"{hop.target.host}: more than {self._caps.redirects} redirects")

    def _perform(
        self, hop: _Hop, secrets: Mapping[str, str], deadline: CallDeadline, record: Record
    ) -> HttpAnswer:
        target, progress, began = hop.target, _Progress(), time.monotonic()
        try:
            return self._exchange(hop, secrets, deadline, progress)
        except ToolDenied as error:
            progress.outcome, progress.is_allowed = error.what, False
            raise
        except HttpError as error:
            progress.outcome = str(error)
            raise ToolFailed(f"{target.host}: {error}") from None
        finally:
            record(
                RequestRecord(
                    host=target.host, port=target.port, scheme=target.scheme, method=hop.method,
                    address=progress.address, status=progress.status,
                    sent_bytes=progress.sent_bytes, received_bytes=progress.received_bytes,
                    seconds=time.monotonic() - began, rule=progress.verdict.rule or "",
                    outcome=progress.outcome, is_allowed=progress.is_allowed,
                )
            )  # fmt: skip

    def _exchange(
        self, hop: _Hop, secrets: Mapping[str, str], deadline: CallDeadline, progress: _Progress
    ) -> HttpAnswer:
        target = hop.target
        progress.verdict = verdict = self._decide(hop)
        headers = self._with_credentials(hop, secrets)
        with self._counted(verdict, progress):
            sock = self._connected(hop, verdict, deadline, progress)
            with contextlib.closing(sock):
                is_plain = target.scheme == "http"
                if self._proxy and is_plain:
                    headers = headers | self._proxy.headers
                data = request_bytes(
                    hop.method, target, headers, hop.body,
                    is_absolute=is_plain and self._proxy is not None,
                )  # fmt: skip
                progress.sent_bytes = len(data)
                send(sock, data, deadline)
                answer = receive(sock, hop.method, self._caps.response_bytes, deadline)
            progress.status, progress.received_bytes = answer.status, answer.received_bytes
            progress.outcome = "ok"
        return answer

    def _decide(self, hop: _Hop) -> NetworkVerdict:
        """Return the verdict of the rules, before the name is resolved: a lookup tells it to others."""
        scheme, host, port, path, query = hop.target
        asked = HttpRequest(hop.method, path, query, tuple(hop.headers))
        age = time.monotonic() - self._made_at
        verdict = self._rules.decide_request(host, port, scheme, asked, age_seconds=age)
        if not verdict.is_allowed:
            raise ToolDenied(verdict.reason)
        return verdict

    def _with_credentials(self, hop: _Hop, secrets: Mapping[str, str]) -> dict[str, str]:
        for credential in self.credentials:
            if credential.key in secrets and credential.belongs_to(hop.target, hop.method):
                return targets.with_credential(hop.headers, credential, secrets[credential.key])
        return hop.headers

    def _vetted(self, hop: _Hop, verdict: NetworkVerdict, deadline: CallDeadline) -> Sequence[str]:
        """Return the addresses of a name; raises ToolDenied if one of them must not be dialled.

        An answer that mixes public and private addresses is an attack or a mistake.
        """
        target, networks = hop.target, self._rules.networks(verdict)
        found = addresses_of(target.host, target.port, self._resolve, deadline, hop.caller)
        for address in found:
            if refusal_of(address, networks, is_own=is_own_address):
                raise ToolDenied(
                    f"{target.host}: has an address that is not public: no rule names its network"
                )
        return found

    def _connected(
        self, hop: _Hop, verdict: NetworkVerdict, deadline: CallDeadline, progress: _Progress
    ) -> socket.socket:
        """Return a connection to a checked address of the target, or through the proxy."""
        target = hop.target
        if self._proxy:
            host, port = self._proxy.host, self._proxy.port
            sock = dial(
                addresses_of(host, port, self._resolve, deadline, hop.caller), port, deadline
            )
        else:
            sock = dial(self._vetted(hop, verdict, deadline), target.port, deadline)
        try:
            progress.address = str(sock.getpeername()[0])
            if target.scheme == "http":
                return sock
            if self._proxy:
                open_tunnel(sock, self._proxy, target, deadline)
            return secured(sock, target.host, self._context, deadline)
        except BaseException:
            sock.close()
            raise

    @contextlib.contextmanager
    def _counted(self, verdict: NetworkVerdict, progress: _Progress) -> Iterator[None]:
        """Count a request against the caps of every rule that allows it; raises ToolDenied."""
        begun: list[RuleUse] = []
        try:
            with self._lock:
                for rule in verdict.matching:
                    use = self._uses.setdefault(rule, RuleUse(rule))
                    if why := use.begin():
                        raise ToolDenied(why)
                    begun.append(use)
            yield
        finally:
            with self._lock:
                for use in begun:
                    use.count(progress.sent_bytes, progress.received_bytes)
                    use.end()


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise PolicyError(f"ca_file: {ca_file}: {error.strerror or error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _following(hop: _Hop, answer: HttpAnswer) -> _Hop | None:
    location = answer.headers.get("location")
    if answer.status not in _REDIRECTS or location is None:
        return None
    try:
        target = targets.redirected(hop.target, location)
    except targets.TargetError as error:
        raise ToolDenied(f"{hop.target.host}: {error}") from None
    method, headers, body = hop.method, hop.headers, hop.body
    if answer.status not in _SAME_METHOD and method != "HEAD":
        method, body = "GET", b""
        headers = {name: value for name, value in headers.items() if name.lower() != "content-type"}
    if target.origin != hop.target.origin:
        headers = targets.for_another_origin(headers)
    return _Hop(target, method, headers, body, hop.caller)


_CHUNK_BYTES = 16_384


def open_tunnel(
    sock: socket.socket, proxy: UpstreamProxy, target: targets.Target, deadline: CallDeadline
) -> None:
    """Have the proxy connect to a target; raises HttpError."""
    send(sock, proxy.connect_request(target.host, target.port), deadline)
    answer = b""
    try:
        while not is_open(answer):
            answer += _received(sock, deadline)
    except ProxyError as error:
        raise HttpError(str(error)) from None


def _received(sock: socket.socket, deadline: CallDeadline) -> bytes:
    sock.settimeout(deadline.left())
    try:
        part = sock.recv(_CHUNK_BYTES)
    except OSError as error:
        deadline.left()
        raise HttpError(f"the connection to the proxy broke: {error.strerror or error}") from None
    if not part:
        raise HttpError("the proxy closed the connection")
    return part
