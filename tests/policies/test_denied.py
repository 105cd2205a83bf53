"""Denied paths: what a pattern takes away, by itself and on the way there."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.denied import denied_by, fixed_part


@pytest.mark.parametrize(
    ("pattern", "denied", "left"),
    [
        ("/srv/secret", ["/srv/secret", "/srv/secret/key"], ["/srv", "/srv/secrets", "/secret"]),
        ("/srv/*.key", ["/srv/a.key", "/srv/.key"], ["/srv/a.pem", "/srv/deep/a.key"]),
        ("/srv/**/.*", ["/srv/.env", "/srv/a/b/.git/x"], ["/srv", "/srv/a/b", "/.env"]),
        ("/srv/**", ["/srv/a", "/srv/a/b"], ["/srv", "/srvx"]),
        ("/**/a/**/b", ["/a/b", "/x/a/y/z/b"], ["/a", "/b/a", "/b"]),
        ("/srv/a[1]", ["/srv/a[1]", "/srv/a1"], ["/srv/a", "/srv/a2"]),
        ("/srv/?", ["/srv/a"], ["/srv/ab"]),
    ],
)
def test_a_pattern_denies_what_it_names_and_all_beneath(
    pattern: str, denied: list[str], left: list[str]
) -> None:
    rule = denied_by([pattern])
    assert [path for path in denied if not rule.denies(path)] == []
    assert [path for path in left if rule.denies(path)] == []


def test_only_directories_on_the_way_to_what_is_denied_concern_it() -> None:
    rule = denied_by(["/srv/conf/secrets", "/srv/log/*.key"])
    assert rule.beneath("/srv")
    assert rule.beneath("/srv/conf")
    assert not rule.beneath("/srv/src")
    assert not rule.beneath("/srv/log/deep")
    assert rule.beneath("/srv/conf/secrets") is None
    below = rule.beneath("/srv/conf")
    assert below is not None
    assert below.names == {"secrets"}
    anything = rule.beneath("/srv/log")
    assert anything is not None
    assert anything.names is None


def test_what_either_denies_both_deny() -> None:
    rule = denied_by(["/a/x"]).also(denied_by(["/a/*.key"]))
    assert rule.denies("/a/x")
    assert rule.denies("/a/b.key")
    assert not rule.denies("/a/b")


def test_the_fixed_part_ends_before_the_first_wildcard() -> None:
    assert fixed_part("/srv/a/*.key") == "/srv/a"
    assert fixed_part("/srv/**/b/*") == "/srv"
    assert fixed_part("/srv/a") == "/srv/a"


NAMES = st.sampled_from(["a", "b", ".a", "a.key"])
PARTS = st.sampled_from(["a", "b", "*", "**", "?", "*.key", ".*"])


def matches(parts: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """The plainest reading of a pattern, for a path or any directory above it."""
    if not parts:
        return True
    if parts[0] == "**":
        if parts[1:]:
            return any(matches(parts[1:], names[n:]) for n in range(len(names) + 1))
        return bool(names)
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and matches(parts[1:], names[1:])


@given(
    patterns=st.lists(st.lists(PARTS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3),
    names=st.lists(NAMES, min_size=1, max_size=5).map(tuple),
)
def test_every_path_is_judged_as_by_the_plainest_reading(
    patterns: list[tuple[str, ...]], names: tuple[str, ...]
) -> None:
    rule = denied_by("/" + "/".join(parts) for parts in patterns)
    assert rule.denies("/" + "/".join(names)) == any(matches(parts, names) for parts in patterns)
