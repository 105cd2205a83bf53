"""URLs are read once, strictly; headers of callers cannot reframe a request."""

import pytest

from cellwright.harness.tools.http.targets import (
    HttpCredential,
    TargetError,
    check_credentials,
    checked_headers,
    redirected,
    target_of,
)
from cellwright.policies.errors import PolicyError, ToolArgumentsInvalid

READ = {
    "https://api.example.org": "https://api.example.org/",
    "HTTPS://API.example.org.:443/a?b=c#d": "https://api.example.org/a?b=c",
    "http://api.example.org:8080?x": "http://api.example.org:8080/?x",
    "https://b%2fx.example/": None,
    "https://api.example.org/a%2Fb/../c;d=1": "https://api.example.org/a%2Fb/../c;d=1",
}
REFUSED = (
    "", "api.example.org", "//api.example.org/", "ftp://api.example.org/", "file:///etc/passwd", "https:/api.example.org",
    "https:///path", "https://user@api.example.org/", "https://api.example.org@evil.example/",
    "https://api.example.org:443@evil.example/", "https://api.example.org\\@evil.example/", "https://evil.example\\.api.example.org/",
    "https://api.example.org\0.evil.example/", "https://api.example.org/\r\nHost: evil.example", "https://api.example.org/a b",
    "https://api.example.org/\t", " https://api.example.org/", "https://127.0.0.1/", "https://2130706433/", "https://0x7f.1/",
    "https://[::1]/", "https://[::ffff:127.0.0.1]:80/", "https://127.1:80/", "https://api.example.org:/", "https://api.example.org:0/",
    "https://api.example.org:65536/", "https://api.example.org:4a3/", "https://api.example.org:443:80/", "https://api.example.org/%zz",
    "https://api.example.org/%2", "https://api.example.org/\u00e9", "https://api.example.org/?\"", "https://api.example.org/<a>",
    "https://api.example.org/" + "a" * 9000, "https://api%2eexample.org/", "https://*.example.org/", "https://a,b/",
    "https://b\u00fccher.example/",
)  # fmt: skip


@pytest.mark.parametrize(("url", "read"), READ.items())
def test_a_url_is_read_in_one_way(url: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(TargetError):
            target_of(url)
    else:
        assert str(target_of(url)) == read


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_that_clients_read_in_different_ways_is_refused(url: str) -> None:
    with pytest.raises(TargetError):
        target_of(url)


def test_a_redirect_is_read_as_strictly() -> None:
    here = target_of("https://api.example.org/a/b?c")
    assert str(redirected(here, "../d")) == "https://api.example.org/d"
    assert str(redirected(here, "//other.example/x")) == "https://other.example/x"
    assert str(redirected(here, "?d")) == "https://api.example.org/a/b?d"
    for location in (
        "http://127.0.0.1/",
        "//[::1]/",
        "\\\\evil.example",
        "https://a@b.example/",
        "file:///etc/passwd",
        "//[x",
        "/a b",
        "/\u00e9",
        "https://a.example/, https://b.example/",
    ):
        with pytest.raises(TargetError):
            redirected(here, location)


HEADERS = (
    {"Host": "evil.example"}, {"hOST": "x"}, {"Connection": "Upgrade"}, {"Upgrade": "h2c"}, {"HTTP2-Settings": "AAMAAABk"},
    {"Transfer-Encoding": "chunked"}, {"Content-Length": "5"}, {"TE": "trailers"}, {"Expect": "100-continue"},
    {"Proxy-Authorization": "Basic x"}, {"X-HTTP-Method-Override": "DELETE"}, {"X_HTTP_Method.Override": "DELETE"}, {"Content_Length": "5"},
    {"Transfer_Encoding": "chunked"}, {"X-A": "1", "X_A": "2"}, {"Proxy_Authorization": "Basic x"}, {"X-Original-URL": "/admin"},
    {"X-Forwarded-For": "127.0.0.1"}, {"X-Rewrite-Url": "/admin"}, {"Accept-Encoding": "br"}, {"A B": "x"}, {"A:": "x"}, {"": "x"},
    {"A\r\nHost": "x"}, {"A": "x\r\nHost: evil.example"}, {"A": "x\n"}, {"A": "x\0"}, {"A": "\u2028"}, {"A": "1", "a": "2"},
    {f"A{n}": "" for n in range(65)}, {"A": "x" * 20_000},
)  # fmt: skip


@pytest.mark.parametrize("headers", HEADERS)
def test_headers_that_reframe_a_request_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ToolArgumentsInvalid, match="^headers: "):
        checked_headers(headers)


def test_other_headers_are_kept() -> None:
    given = {"Accept": "text/html", "X-Trace": "\ta b", "Authorization": "Bearer of the guest"}
    assert checked_headers(given) == given


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "*"}, {"host": "10.0.0.1"}, {"template": "Bearer"}, {"template": "{} {}"}, {"template": "{}\r\nX: y"},
        {"header": "Host"}, {"header": "a b"}, {"paths": ("v1/*",)},
    ],
)  # fmt: skip
def test_an_invalid_credential_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(PolicyError, match="credentials: 'K'"):
        check_credentials([HttpCredential(**({"key": "K", "host": "api.example.org"} | fields))])


def test_a_credential_belongs_to_its_host_port_method_and_path_over_https() -> None:
    credential = HttpCredential(
        key="K", host="*.example.org", methods=("GET",), paths=("/v1/*", "/me")
    )
    for url in ("https://api.example.org/v1/x?y", "https://a.b.example.org/me"):
        assert credential.belongs_to(target_of(url), "GET")
        assert not credential.belongs_to(target_of(url), "POST")
    for url in (
        "http://api.example.org:443/v1/x", "https://api.example.org:8443/v1/x", "https://example.org/v1/x", "https://evilexample.org/v1/x",
        "https://api.example.org.evil.example/v1/x", "https://api.example.org/v2", "https://api.example.org/v1/../v2", "https://api.example.org/v1/%2e%2e/v2",
    ):  # fmt: skip
        assert not credential.belongs_to(target_of(url), "GET")
