"""Rules that are added to the text of a policy, and texts that take none."""

from pathlib import Path

import pytest

from cellwright.policies.advice.learning import text_with_rule
from cellwright.policies.errors import PolicyError
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.policy import Policy
from cellwright.policies.profiles.loading import load_policy

RULE = NetworkRule(host="b.example.org", ports=(80, 443), schemes=("http", "https"), any=True)


def loaded(tmp_path: Path, text: str) -> Policy:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return load_policy(str(file))


@pytest.mark.parametrize(
    "text",
    ["", 'name = "web"\n', "[network]\nloopback = true", '[[network.allow]]\nhost = "a.example.org"\n'],
)  # fmt: skip
def test_the_longer_text_is_the_policy_with_the_rule(tmp_path: Path, text: str) -> None:
    before = loaded(tmp_path, text)
    longer = text_with_rule(text, before, RULE)
    after = loaded(tmp_path, longer)
    assert after.network.allow == (*before.network.allow, RULE)
    assert longer.startswith(text.rstrip())
    assert text_with_rule(longer, after, RULE) == longer
    denied = loaded(tmp_path, text_with_rule(longer, after, NetworkDenial(host="c.example.org")))
    assert denied.network.deny == (NetworkDenial(host="c.example.org"),)
    assert denied.network.allow == after.network.allow


def test_rules_in_another_form_are_left_to_a_person(tmp_path: Path) -> None:
    for text in (
        'network = { allow = [{ host = "a.example.org" }] }\n',
        '[network]\nallow = [{ host = "a.example.org" }]\n',
    ):
        with pytest.raises(PolicyError, match="how the file has them"):
            text_with_rule(text, loaded(tmp_path, text), RULE)


def test_inherited_rules_are_not_replaced(tmp_path: Path) -> None:
    """A denial that is inherited would hold no more once the file has one of its own."""
    (tmp_path / "base.toml").write_text('[[network.deny]]\nhost = "d.example.org"\n')
    text = 'extends = "base.toml"\n'
    given = loaded(tmp_path, text)
    with pytest.raises(PolicyError, match="inherits"):
        text_with_rule(text, given, NetworkDenial(host="c.example.org"))
    assert "b.example.org" in text_with_rule(text, given, RULE)


@pytest.mark.parametrize("host", ["", "1.2.3.4", "*.com", "a b"])
def test_an_invalid_rule_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(PolicyError, match=r"network\.allow"):
        text_with_rule("", loaded(tmp_path, ""), NetworkRule(host=host))


def test_hosts_are_quoted_as_toml_has_it(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        text_with_rule("", loaded(tmp_path, ""), NetworkRule(host='a"\n[limits]\n"'))
