"""Rules for calls of the host's tools: which tools, with which arguments, and how often."""

import fnmatch
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from .errors import PolicyError

_EXACT = 2**53  # beyond this a float stands for several integers

Effect = Literal["allow", "deny", "approve"]
_EFFECTS = get_args(Effect)


class ToolRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule that allows, denies or sends to approval a call whose tool and arguments match.

    `tool` is a glob over names.  `arguments` maps names of arguments to globs, all of which must match:
    text as it is, any other value as JSON; a missing argument never matches.  A refused caller gets
    `reason`.
    """

    tool: str
    effect: Effect
    arguments: dict[str, str] = {}
    reason: str = ""

    def matches(self, name: str, arguments: Mapping[str, Any]) -> bool:
        return fnmatch.fnmatchcase(name, self.tool) and all(
            key in arguments and fnmatch.fnmatchcase(_text(arguments[key]), pattern)
            for key, pattern in self.arguments.items()
        )

    def __str__(self) -> str:
        where = "".join(f" {name}={pattern}" for name, pattern in self.arguments.items())
        return f"{self.effect} {self.tool}{where}"


class Tools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rules and caps for calls of tools.

    rules: the first rule that matches decides; if there are rules and none matches, the call is
        denied; without rules, every tool that the host offers may be called
    further: more lists of rules, each of which must allow a call too; `narrow` adds them
    calls: calls of one execution, or of one request to a session
    calls_per_second: the rate of these calls
    depth: nested calls, of tools that call tools
    argument_bytes: JSON of the arguments of one call, checked before it is decoded
    result_bytes: JSON of one result that a program gets; a longer one raises ToolResultTooLarge
    shown_bytes: text of one result that a model reads; a longer one is read in pages
    result_rows: items of any list in a result; further items are left out

    No rule lets a program call a tool that the host does not offer.
    """

    rules: tuple[ToolRule, ...] = ()
    further: tuple[tuple[ToolRule, ...], ...] = ()
    calls: int = 1000
    calls_per_second: float = 1000.0
    depth: int = 4
    argument_bytes: int = 1_048_576
    result_bytes: int = 8_388_608
    shown_bytes: int = 65_536
    result_rows: int = 1_000_000


_CAPS = (
    "calls", "calls_per_second", "depth", "argument_bytes", "result_bytes", "shown_bytes",
    "result_rows",
)  # fmt: skip


class ToolDecision(NamedTuple):
    """The decision about a call; `trace` tells for each rule that was tried whether it matched."""

    effect: Effect
    reason: str
    trace: tuple[str, ...]


def judge(tools: Tools, name: str, arguments: Mapping[str, Any]) -> ToolDecision:
    """Return the decision about a call: the strictest one of all lists of rules."""
    if not tools.rules and not tools.further:
        return ALLOWED
    verdicts = [_judge(rules, name, arguments) for rules in rule_lists(tools)]
    trace = tuple(line for each in verdicts for line in each.trace)
    return strictest(verdicts)._replace(trace=trace)


def strictest(verdicts: list[ToolDecision]) -> ToolDecision:
    return max(verdicts, key=lambda each: _STRICTNESS[each.effect])


def may_allow(tools: Tools, name: str) -> bool:
    """Tell whether the rules allow a call of `name` with some arguments."""
    return all(_may_allow(rules, name) for rules in rule_lists(tools))


def _may_allow(rules: tuple[ToolRule, ...], name: str) -> bool:
    for rule in rules:
        if fnmatch.fnmatchcase(name, rule.tool) and (rule.effect != "deny" or not rule.arguments):
            return rule.effect != "deny"
    return False


def rule_lists(tools: Tools) -> tuple[tuple[ToolRule, ...], ...]:
    """Return every list of rules that must allow a call."""
    return tuple(rules for rules in (tools.rules, *tools.further) if rules)


_STRICTNESS: dict[Effect, int] = {"allow": 0, "approve": 1, "deny": 2}
ALLOWED = ToolDecision("allow", "", ())


def _judge(rules: tuple[ToolRule, ...], name: str, arguments: Mapping[str, Any]) -> ToolDecision:
    trace: list[str] = []
    for number, rule in enumerate(rules, 1):
        try:
            matches = rule.matches(name, arguments)
        except (RecursionError, ValueError):  # ValueError: an integer of more than 4,300 digits
            why = "the arguments are nested too deeply, or too long, for the rules"
            return ToolDecision("deny", why, (*trace, f"rule {number}: {rule}: {why}"))
        if matches:
            trace.append(f"rule {number}: {rule}: matches")
            return ToolDecision(rule.effect, rule.reason, tuple(trace))
        trace.append(f"rule {number}: {rule}: does not match")
    return ToolDecision("deny", "no rule allows it", (*trace, "no rule matches: deny"))


def _text(value: Any) -> str:
    """Return the text of an argument that a glob matches.

    The same JSON has one text: characters are not escaped, and 1000.0, which a schema takes for the
    integer 1000, is written as that.
    """
    if isinstance(value, str):
        return value
    import json  # most arguments are text, and most programs call no tool

    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def check_tools(tools: Tools) -> None:
    """Raise PolicyError for an invalid rule or cap."""
    for rules in (tools.rules, *tools.further):
        for rule in rules:
            if rule.effect not in _EFFECTS:
                effects = ", ".join(_EFFECTS)
                raise PolicyError(
                    f"tools.rules: effect must be one of {effects}, got {rule.effect!r}"
                )
            if not rule.tool:
                raise PolicyError(
                    "tools.rules: tool must be a glob over names, got ''; * matches any"
                )
    for name in _CAPS:
        value = getattr(tools, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
            raise PolicyError(f"tools.{name}: must be a number from 0 to 2^53, got {value!r}")


def narrow_tools(tools: Tools, by: Tools) -> Tools:
    """Return the rules and caps that allow what both allow."""
    own = rule_lists(tools)
    lists = (*own, *(rules for rules in rule_lists(by) if rules not in own))
    return Tools(
        rules=lists[0] if lists else (),
        further=lists[1:],
        **{name: min(getattr(tools, name), getattr(by, name)) for name in _CAPS},
    )


def tools_exceed(tools: Tools, limit: Tools) -> tuple[str, ...]:
    """Return as text where `tools` may allow what `limit` does not.

    A list of rules in `limit` that is missing in `tools` counts, even if other rules have the same
    effect.
    """
    missing = [rules for rules in rule_lists(limit) if rules not in rule_lists(tools)]
    return (
        *(f"tools.rules: without {'; '.join(map(str, rules))}" for rules in missing),
        *(
            f"tools.{name}: {getattr(tools, name):g} instead of {getattr(limit, name):g}"
            for name in _CAPS
            if getattr(tools, name) > getattr(limit, name)
        ),
    )
