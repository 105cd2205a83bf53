"""Mutations of the way out by name: each check of the egress process, and of the rules that it applies."""

from tests.mutations import Edit, Mutation, drop, replace

_EGRESS, _RULES, _TESTS = "runner/egress", "policies/network", "tests/runner/egress"
_CELL, _HTTP = f"{_EGRESS}/served_cell.py", f"{_EGRESS}/http_relay.py"


def _escape(name: str) -> str:
    return f"tests/escapes/test_network.py::test_{name}"


def _is(layer: str, asked: str, *edits: Edit) -> Mutation:
    return Mutation(layer, (asked,), edits)


_SERVED, _REQUESTS = f"{_TESTS}/test_served_cell.py", f"{_TESTS}/test_http_relay.py"
_CREDENTIALS, _EXCHANGE = "tests/escapes/test_credentials.py", f"{_EGRESS}/credential_exchange.py"
_HELLO, _DNS = f"{_TESTS}/test_client_hello.py", f"{_TESTS}/test_dns.py"
_ADDRESSES = f"{_TESTS}/test_synthetic_addresses.py"
_CONFINED, _POLICY = f"{_TESTS}/test_confinement.py", f"{_TESTS}/test_cell_policy.py"
_ALLOWED, _NAMES = "tests/policies/network/test_rules.py", "tests/policies/network/test_names.py"
_INSIDE = "runner/confined/confinement.py"
_PUBLIC = "tests/policies/network/test_addresses.py"
EGRESS = (
    # names
    _is("name that no rule allows", _escape("a_name_that_no_rule_allows_does_not_exist"),
        replace(_CELL, "ServedCell._answer", "self._policy.why_not(query.name)", '("", query.name)')),
    _is("label that no host name has", _DNS,
        replace(f"{_EGRESS}/dns.py", "_labels", "_LABEL.fullmatch(label)", "True")),
    _is("pointer in a question, or a name without end", _DNS,
        replace(f"{_EGRESS}/dns.py", "_labels", "at - _HEADER.size >= _MOST_NAME_BYTES or at >= len(message)", "at >= len(message)"),
        replace(f"{_EGRESS}/dns.py", "_labels", "len(label) != length or not _LABEL.fullmatch(label)", "not _LABEL.fullmatch(label or b'a')")),
    _is("answer that gets no answer", _DNS,
        replace(f"{_EGRESS}/dns.py", "parse", "flags & _IS_ANSWER", "0")),
    _is("oversized query", _DNS,
        replace(f"{_EGRESS}/dns.py", "parse", "_HEADER.size <= len(message) <= MOST_BYTES", "_HEADER.size <= len(message)")),
    _is("search domains of the host", _CONFINED,
        replace(f"{_EGRESS}/main.py", "confine", "'.'", "'corp.example'")),
    _is("address of a name with a connection", _ADDRESSES,
        replace(f"{_EGRESS}/addresses.py", "SyntheticAddresses._forget_one", "name not in self._connections", "True")),
    _is("hold on the name of a connection", _escape("many_names_of_a_wildcard_keep_a_connection_where_it_is"),
        drop(_CELL, "ServedCell._admit", "self._names.hold"), drop(_CELL, "ServedCell._finish", "self._names.release")),
    _is("names of each cell", _ADDRESSES,
        replace(f"{_EGRESS}/addresses.py", "SyntheticAddresses.address_of", "self._share.has_room()", "True")),
    # connections
    _is("record of a connection to an address", _escape("an_address_that_is_no_name_of_ours_has_no_route"),
        replace("runner/listening/cell_listener.py", "Listener._on_connect", "evidence.leads_outside(words[1])", "False")),
    _is("port that the name's rules do not have", _escape("each_name_has_its_own_ports"),
        replace(_CELL, "ServedCell._admit", "verdict.is_allowed", "True")),
    _is("addresses of an allowed name", _escape("a_private_address_needs_a_rule_that_names_it"),
        replace(_CELL, "ServedCell._dial", "refusal_of(address, networks, is_own=is_own_address)", "None")),
    _is("one lookup for a connection", _escape("a_name_is_resolved_once_and_its_answer_is_vetted"),
        replace(f"{_EGRESS}/name_resolution.py", "Resolver.resolve", "dict.fromkeys(found)", "dict.fromkeys((await self._found(name, port)))")),
    _is("caps of a rule", _escape("a_cap_of_a_rule_holds"),
        replace(_CELL, "ServedCell._admit", "use.begin()", "''"), drop(_CELL, "ServedCell._finish", "use.end")),
    _is("bytes of a rule", _escape("a_cap_of_a_rule_holds"),
        replace(f"{_EGRESS}/cell_connection.py", "CellConnection.count", "use.count(sent_bytes, received_bytes)", "''")),
    _is("connections of each cell", _SERVED,
        replace(_CELL, "ServedCell._has_room", "self._room.has_room()", "True")),
    _is("want of descriptors", _SERVED,
        replace(_CELL, "ServedCell._accept_from", "error.errno in _SHORT_OF", "False")),
    _is("lookups of each cell", _SERVED,
        replace(f"{_EGRESS}/name_resolution.py", "Resolver.__init__", "asyncio.Semaphore(_THREADS_OF_CELL)", "asyncio.Semaphore(_THREADS)")),
    _is("lookups of all cells", _SERVED,
        replace(f"{_EGRESS}/name_resolution.py", "resolving_threads", "_THREADS", "32")),
    _is("end of a stream that was cut off", _SERVED,
        replace(_CELL, "ServedCell._finish", "leave if connection.relay and connection.relay.is_uploaded else reset", "leave")),
    # TLS
    _is("server name (SNI)", _SERVED, drop(f"{_EGRESS}/connection_relay.py", "first_bytes", "_require_name")),
    _is("encrypted server name (ECH)", _SERVED,
        replace(f"{_EGRESS}/connection_relay.py", "_require_name", "hello.is_encrypted", "False")),
    _is("no server name", _SERVED,
        replace(f"{_EGRESS}/connection_relay.py", "_require_name", "hello.server_name is None", "False"),
        replace(f"{_EGRESS}/connection_relay.py", "_require_name", "canonical_name(hello.server_name)", "canonical_name(hello.server_name or name)")),
    _is("TLS where only http is allowed", _SERVED,
        replace(f"{_EGRESS}/connection_relay.py", "first_bytes", "'https' not in schemes", "False")),
    _is("other bytes where only https is allowed", _SERVED,
        replace(f"{_EGRESS}/connection_relay.py", "first_bytes", "'http' not in schemes", "False")),
    _is("second server name extension", _HELLO,
        replace(f"{_EGRESS}/client_hello.py", "_extensions", "kind in found", "False")),
    # requests
    _is("method and path", _REQUESTS,
        replace(_HTTP, "RequestReader._why_refused", "self._why_not(self.request)", "''")),
    _is("header Host", _REQUESTS,
        replace(_HTTP, "RequestReader._why_refused", "self._is_own(value.decode('latin-1'))", "True")),
    _is("target that is no path", _REQUESTS,
        replace(_HTTP, "RequestReader._why_refused", "request.target.startswith(b'/')", "True")),
    _is("CONNECT", _REQUESTS,
        replace(_HTTP, "RequestReader._why_refused", "request.method == b'CONNECT'", "False")),
    _is("request with two lengths", _REQUESTS,
        replace(_HTTP, "RequestReader._why_refused", "b'transfer-encoding' in names", "False")),
    _is("header that names another request", _REQUESTS,
        replace(f"{_RULES}/rules.py", "NetworkRules.decide_request", "overriding_header(asked.headers)", "''")),
    _is("spelling of a header's name", _REQUESTS,
        replace(f"{_RULES}/canonical.py", "canonical_header", "_OTHER.sub('-', name.lower())", "name.lower()")),
    _is("header that names a second path", _REQUESTS,
        replace(f"{_RULES}/rules.py", "NetworkRules.decide_request", "header_with_path(asked.headers)", "''")),
    _is("parameter that names another method", _REQUESTS,
        replace(f"{_RULES}/rules.py", "NetworkRules.decide_request", "parameter_with_method(asked.query)", "''")),
    _is("characters that servers fold to dots", _REQUESTS,
        replace(f"{_RULES}/canonical.py", "_has_dot_segment", "_folded(text)", "text")),
    _is("upgrade", _REQUESTS,
        replace(_HTTP, "RequestReader._passed_on", "_OF_CONNECTION | {b'host'}", "frozenset({b'host'})")),
    _is("unasked answer", _REQUESTS,
        replace(_HTTP, "RequestRelay._exchange", "self._outside.http.trailing_data[0]", "b''"),
        replace(_HTTP, "RequestRelay._next", "self._outside.http.trailing_data != (b'', False)", "False")),
    _is("interim answers without end", _REQUESTS,
        replace(_HTTP, "RequestRelay._final_answer", "interim > _MOST_INTERIM", "False")),
    _is("time for a head", _REQUESTS,
        replace(_HTTP, "RequestReader._head", "_HEAD_SECONDS if is_begun else None", "None"),
        drop(_HTTP, "RequestReader._head", "timer.reschedule")),
    _is("pieces of a head", _REQUESTS,
        replace(_HTTP, "RequestReader._head", "pieces > _MOST_PIECES", "False")),
    _is("request that is being answered when its rule ends", _REQUESTS,
        replace(_HTTP, "RequestReader.why_not_now", "self._why_not(self.request)", "''")),
    # credentials
    _is("credential of another request", _CREDENTIALS,
        replace(f"{_RULES}/credential.py", "HostCredential.is_for", "self.methods is not None", "False")),
    _is("value in answers", _CREDENTIALS, replace(_EXCHANGE, "CredentialExchange.answer", "masks.__getitem__", "bytes")),
    _is("parts of answers", _CREDENTIALS,
        replace(_EXCHANGE, "CredentialExchange.headers", "name.lower() not in _LEFT_OUT", "True")),
    _is("compressed answers", _CREDENTIALS,
        replace(_HTTP, "RequestRelay._require_readable", "_has_body(answer, method)", "False")),
    _is("record of a placeholder for another host", _CREDENTIALS, drop(_EXCHANGE, "CredentialExchange._value_of", "self._on_foreign")),
    _is("certificate of the real server", _CREDENTIALS,
        replace(f"{_EGRESS}/tls_stream.py", "TlsContexts.__init__", "ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)", "ssl._create_unverified_context()")),
    # rules
    _is("denial", _ALLOWED,
        replace(f"{_RULES}/rules.py", "NetworkRules.decide", "self.denial_of(name, port)", "None")),
    _is("dot before the suffix of a wildcard", _ALLOWED,
        replace(f"{_RULES}/rules.py", "matches_host", "pattern[1:]", "pattern[2:]")),
    _is("lifetime of a rule", _ALLOWED,
        replace(f"{_RULES}/rules.py", "_allows", "age_seconds < rule.lifetime_seconds", "True")),
    _is("address in place of a name", _NAMES,
        replace(f"{_RULES}/canonical.py", "canonical_name", "_NUMBER.fullmatch(labels[-1])", "False")),
    _is("metadata services", _PUBLIC,
        replace(f"{_RULES}/address_ranges.py", "refusal_of", "_METADATA.isdisjoint((given, *_carried(given)))", "True")),
    _is("own addresses of this host", _PUBLIC,
        replace(f"{_RULES}/address_ranges.py", "refusal_of", "is_own(meant)", "False")),
    _is("connection whose rule was narrowed", _POLICY,
        replace(f"{_EGRESS}/cell_connection.py", "CellPolicy.why_ended", "grant.is_within(self.grant(verdict, port))", "True")),
    _is("open connection of a denied name", "tests/harness/test_live_network.py::test_an_open_connection_ends_when_its_name_is_denied",
        replace(f"{_EGRESS}/main.py", "Management._set", "cell.follow_rules()", "[]")),
    _is("flood of refused names", _POLICY,
        replace(f"{_EGRESS}/cell_connection.py", "CellPolicy.note_refused", "len(self._refused) > _MOST_NAMES", "False")),
    _is("flood of records", _SERVED,
        replace(f"{_EGRESS}/cell_connection.py", "Records.refuse", "len(self._refusals) >= _MOST_RECORDS", "False")),
    # the process
    _is("filter of the process", _CONFINED, drop(_INSIDE, "confine", "privileges.install_seccomp_filter")),
    _is("Landlock of the process", _CONFINED, drop(_INSIDE, "confine", "landlock.restrict")),
    _is("unprivileged id of the process", _CONFINED, drop(_INSIDE, "confine", "privileges.become")),
    _is("turn of other connections", f"{_TESTS}/test_turns.py",
        replace(f"{_EGRESS}/connection_relay.py", "Turns.wait", "asyncio.sleep(0)", "asyncio.Lock().acquire()")),
    _is("turns of each cell", f"{_TESTS}/test_turns.py",
        replace(f"{_EGRESS}/connection_relay.py", "Turns.wait", "self._turn", "asyncio.Lock()")),
)  # fmt: skip
