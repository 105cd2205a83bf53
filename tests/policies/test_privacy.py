"""Rules about personal data: which are valid, and how they are narrowed."""

import pytest

from cellwright import Policy, PolicyError, exceeds, load_policy, narrow
from cellwright.policies.privacy_rules import PrivacyRules, check_privacy

LOOSE = PrivacyRules(
    enabled=True, restore=("mail.send:to", "a:b"), inputs="values", kinds=("email",)
)
STRICT = PrivacyRules(enabled=True, restore=("a:b", "c:d"), inputs="texts", scope="session",
                      kinds=("card",), names=("Ann",), fields={"t:x": "name"}, keep_days=1)  # fmt: skip


@pytest.mark.parametrize(("field", "value", "said"), [
    ("kinds", ("mail",), "privacy.kinds"), ("fields", {"t:x": "A B"}, "privacy.fields"),
    ("fields", {"x": "name"}, "privacy.fields"), ("restore", ("mail.send",), "privacy.restore"),
    ("regions", ("us",), "privacy.regions"), ("inputs", "all", "privacy.inputs"),
    ("scope", "x", "privacy.scope"), ("keep_days", 0, "privacy.keep_days"),
    ("key", "KEY", "privacy.key"), ("vault", "/x", "privacy.vault"), ("key", "env:X", "privacy.vault"),
    ("enabled", False, "privacy.enabled"),
])  # fmt: skip
def test_an_invalid_field_is_named(field: str, value: object, said: str) -> None:
    given = {"enabled": True, "names": ("Ann",), field: value}
    with pytest.raises(PolicyError, match=f"^{said}: "):
        check_privacy(PrivacyRules(**given))  # type: ignore[arg-type]


def test_both_find_what_either_finds_and_restore_where_both_do() -> None:
    both = narrow(Policy(privacy=LOOSE), Policy(privacy=STRICT)).privacy
    assert both.kinds == ("email", "card")
    assert both.restore == ("a:b",)
    assert (both.inputs, both.scope, both.keep_days) == ("texts", "session", 1)
    assert (both.names, both.fields) == (("Ann",), {"t:x": "name"})
    assert (
        narrow(Policy(privacy=LOOSE), Policy(privacy=PrivacyRules(enabled=True))).privacy.kinds
        == ()
    )
    for pair in ((Policy(), Policy(privacy=STRICT)), (Policy(privacy=STRICT), Policy())):
        assert narrow(*pair).privacy == STRICT


def test_what_exceeds_is_said() -> None:
    limit = Policy(privacy=STRICT)
    assert exceeds(Policy(), limit) == ("privacy.enabled: personal data is passed on",)
    said = exceeds(Policy(privacy=LOOSE), limit)
    for field in ("kinds", "restore", "names", "fields", "inputs", "scope"):
        assert [line for line in said if line.startswith(f"privacy.{field}:")], field
    assert exceeds(limit, limit) == ()
    assert exceeds(limit, Policy()) == ()


def test_a_policy_file_has_a_section(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "p.toml"
    path.write_text('[privacy]\nenabled = true\nrestore = ["mail.send:to"]\n')
    assert load_policy(path).privacy == PrivacyRules(enabled=True, restore=("mail.send:to",))
