"""Host names have one spelling, and an address is never a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.network.canonical import HostNameError, canonical_name

SAME = {
    "case": "API.Example.ORG",
    "trailing dot": "api.example.org.",
    "full-width letters": "\uff41pi.example.org",
    "ideographic dot": "api\u3002example\uff0eorg",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_spellings_of_one_name_are_one(text: str) -> None:
    assert canonical_name(text) == "api.example.org"


def test_names_beyond_ascii_are_encoded() -> None:
    assert canonical_name("B\u00fccher.example") == "xn--bcher-kva.example"
    assert canonical_name("XN--BCHER-KVA.example") == "xn--bcher-kva.example"
    assert canonical_name("_dmarc.my_host.example") == "_dmarc.my_host.example"
    assert canonical_name("\u212aelvin.example") == "kelvin.example"


ADDRESSES = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7F.1",
    "0177.0.0.1",
    "0x7f.0.0.0x1",
    "0",
    "0x",
    "example.1",
    "1.2.3.4.5",
    "\uff11\uff12\uff17.0.0.1",
    "\u2460\u2461\u2466.1",
    "::1",
    "[::1]",
    "[::1]:80",
    "::ffff:127.0.0.1",
    "fe80::1%eth0",
    "fe80::1%25eth0",
    "[fe80::1%25eth0]",
]


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_is_not_a_name(text: str) -> None:
    with pytest.raises(HostNameError):
        canonical_name(text)


INVALID = {
    "empty": "",
    "only a dot": ".",
    "two trailing dots": "example.org..",
    "an empty part": "a..example.org",
    "NUL": "allowed.example\0.evil.example",
    "newline": "example.org\n",
    "space": "example.org ",
    "tab": "exa\tmple.org",
    "DEL": "example.org\x7f",
    "user": "user@example.org",
    "port": "example.org:443",
    "path": "example.org/x",
    "backslash": "example.org\\x",
    "percent": "example%2eorg",
    "wildcard": "*.example.org",
    "hyphen first": "-rf.example.org",
    "hyphen last": "a-.example.org",
    "label of 64": "a" * 64 + ".org",
    "254 characters": "a." * 126 + "aa",
    "long": "a" * 100_000,
    "sharp s": "fa\u00df.example",
    "final sigma": "\u03b2\u03cc\u03bb\u03bf\u03c2.example",
    "soft hyphen": "exam\u00adple.org",
    "zero width joiner": "exam\u200dple.org",
    "bidi": "exam\u202eple.org",
    "slash in disguise": "example.org\u2100evil",
    "surrogate": "exam\ud800ple.org",
    "NEL": "example.org\u0085",
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_what_is_not_a_name_is_refused(text: str) -> None:
    with pytest.raises(HostNameError):
        canonical_name(text)


@given(st.text(max_size=300))
def test_a_canonical_name_stays_as_it_is(text: str) -> None:
    try:
        name = canonical_name(text)
    except HostNameError:
        return
    assert canonical_name(name) == name
    assert name.isascii()
    assert name == name.lower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
