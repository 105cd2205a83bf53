"""Additions to the text of a policy: a network rule that a person decided on.  Pure."""

import tomllib
from typing import Any

import msgspec

from .errors import PolicyError
from .learning import quoted
from .network.rule import NetworkDenial, NetworkRule
from .policy import Network, Policy, check_policy


def text_with_rule(text: str, policy: Policy, rule: NetworkRule | NetworkDenial) -> str:
    """Return the TOML `text` of `policy` with a network rule at its end; unchanged if it has the rule.

    Raises PolicyError if the policy would be invalid, if the file has its rules in another form, or if
    it inherits them: the rules of a file replace those of the policy that it extends.
    """
    key = "allow" if isinstance(rule, NetworkRule) else "deny"
    own = _rules_in(text, key)
    if not own and getattr(policy.network, key):
        raise PolicyError(
            f"network.{key}: the file inherits its rules, which one of its own would replace",
            "add the rule to the file that it extends",
        )
    written = _written(rule)
    if written in own:
        return text
    _check_with(policy, rule)
    block = "\n".join(f"{name} = {_value(value)}" for name, value in written.items())
    longer = f"{text.rstrip()}\n\n[[network.{key}]]\n{block}\n".lstrip()
    try:
        is_there = _rules_in(longer, key) == [*own, written]
    except PolicyError:
        is_there = False
    if not is_there:
        raise PolicyError(
            f"network.{key}: a rule cannot be added to how the file has them",
            f"write a table for each host: [[network.{key}]], then host = ...",
        )
    return longer


def _rules_in(text: str, key: str) -> list[dict[str, Any]]:
    try:
        return list(tomllib.loads(text).get("network", {}).get(key, []))
    except (ValueError, AttributeError, TypeError) as error:
        raise PolicyError(f"not the text of a policy: {error}") from None


def _written(rule: NetworkRule | NetworkDenial) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as TOML has them."""
    found = {}
    for field in msgspec.structs.fields(rule):
        value = getattr(rule, field.name)
        if value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _check_with(policy: Policy, rule: NetworkRule | NetworkDenial) -> None:
    network: Network = policy.network
    if isinstance(rule, NetworkRule):
        network = msgspec.structs.replace(network, allow=(*network.allow, rule))
    else:
        network = msgspec.structs.replace(network, deny=(*network.deny, rule))
    check_policy(msgspec.structs.replace(policy, network=network))


def _value(value: object) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
