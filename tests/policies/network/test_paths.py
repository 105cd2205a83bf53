"""Paths have one spelling, and ambiguous ones have none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.network.canonical import PathError, canonical_path

SAME = {
    "/": "/",
    "/a/b": "/a/b",
    "/a/b/": "/a/b/",
    "/%61/%7e%2D": "/a/~-",
    "/caf%c3%a9": "/caf%C3%A9",
    "/a;v=1/b@c:d": "/a;v=1/b@c:d",
    "/...": "/...",
    "/%e4%bb%80%e4%b9%88%ef%bc%9f": "/%E4%BB%80%E4%B9%88%EF%BC%9F",
    "/wait%e2%80%a6/100%c2%a5": "/wait%E2%80%A6/100%C2%A5",
}
AMBIGUOUS = (
    "", "a", "*", "http://example.org/", "//example.org/x", "/a//b", "/a/../b", "/a/..", "/.", "/./a",
    "/a/%2e%2e/b", "/a/%2E./b", "/a/.%2e", "/a%2fb", "/a%2F..%2Fb", "/a%5cb", "/a\\b", "/a/..;/b",
    "/a/%c0%ae%c0%ae/b", "/a/%e0%80%ae/b", "/a/%f8%80%80%80%ae/b", "/a/..%c0%afb", "/caf%e9",
    "/a/%ef%bc%8e%ef%bc%8e/b", "/a/%e2%80%a5/b", "/a/.%e2%80%a4", "/a/..%ef%bc%8fb", "/a/..%ef%bc%bcb",
    "/a/..%e2%88%95b", "/a/..%e2%a7%b8b", "/a/.%c2%ad./b", "/a/%e2%80%8b../b", "/a/%e3%80%82%ef%bd%a1/b", "/a/..%c2%a5b", "/a/..%ef%bc%9b/b", "/a/..%20/b", "/a/%2e%20",
    "/a/..;x=1/b", "/a/.;/b", "/a%3bx", "/a%00", "/a%0d%0ab", "/a%7f", "/a%252e", "/a%25", "/a%", "/a%2",
    "/a%zz", "/a b", "/a\nb", "/a\0", "/a?b", "/a#b", "/caf\u00e9", "/a|b", "/a\"b", "/" + "a" * 10_000,
)  # fmt: skip


@pytest.mark.parametrize(("path", "canonical"), SAME.items())
def test_spellings_of_one_path_are_one(path: str, canonical: str) -> None:
    assert canonical_path(path) == canonical


@pytest.mark.parametrize("path", AMBIGUOUS)
def test_a_path_that_servers_may_read_in_different_ways_is_refused(path: str) -> None:
    with pytest.raises(PathError):
        canonical_path(path)


@given(st.text(alphabet="/.%2eEfF5cC;a0 \\", max_size=20).map(lambda text: f"/{text}"))
def test_a_canonical_path_stays_and_climbs_nowhere(path: str) -> None:
    import posixpath

    try:
        found = canonical_path(path)
    except PathError:
        return
    assert canonical_path(found) == found
    assert posixpath.normpath(found).rstrip("/") == found.rstrip("/")
