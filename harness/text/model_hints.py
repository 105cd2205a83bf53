"""Hints for models: messages of ours without options of the command line, which a model cannot give."""

import re
from collections.abc import Iterable

from ...policies.policy import Policy

# Hints are written for people who choose options or arguments of Python; a model has neither.
_OPTION = r"--[a-z][a-z-]*(?: (?:[A-Z]+\b|-(?= |$)|'[^']*'|[a-z][\w.]*(?= \()))?"
_OWNER = "which {owner} decides"
_SET = r"([\w.]+ = \w+) in your policy"
_REWRITTEN = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"a program has no standard input but .*",
            "a program has no standard input: put the input into the program, or into files",
        ),
        (r"ask for its package with --packages (\S+) \(packages=\)", r"{packages \1}"),
        (
            rf"use the profile \w+ \(--policy \w+\), or set {_SET}",
            rf"the policy must have \1, {_OWNER}",
        ),
        (rf"(?:with|by) --policy \w+, or with {_SET}", rf"if the policy has \1, {_OWNER}"),
        (rf"with {_OPTION} \((files|collect|timeout|session|language)=\)", r"with the argument \1"),
        (rf" is higher with {_OPTION} \(\w+=\)", f" is the most, {_OWNER}"),
        (rf"(?: with| by)? ?{_OPTION} \((\w+)=\)", ""),
        (rf"(?: with| by)? ?\({_OPTION}\)", ""),
        (rf"(?: with| by)? {_OPTION}", ""),
        (r" \(\w+=\)", ""),
        (r"\b(in|of) your policy", rf"\1 the policy, {_OWNER}"),
    )
)  # fmt: skip


def for_model(
    text: str,
    policy: Policy,
    owner: str = "the owner of this server",
    *,
    has_arguments: bool = True,
) -> str:
    """Return a message as a model reads it.

    `owner` decides about the policy.  Without `has_arguments` a program cannot be given packages or
    files.
    """
    for pattern, words in _REWRITTEN:
        text = pattern.sub(words.replace("{owner}", owner), text)
    advice = (
        'ask for its package with packages=["{}"]' if has_arguments and policy.packages.allow
        else owner + " decides whether programs have the package {}"
    )  # fmt: skip
    if not has_arguments:
        text = re.sub(r",? or pass a file of your own with the argument files", "", text)
        text = re.sub(r"pass ([\w ]+) with the argument files", rf"ask {owner} for \1", text)
        text = text.replace(" and bring the file back with the argument collect", "")
    return re.sub(r"\{packages (\S+)\}", lambda found: advice.format(found[1]), text)


def advice(
    notices: Iterable[str], hints: Iterable[str], policy: Policy, *, is_ok: bool
) -> tuple[str, ...]:
    """Return what a model should read of a result beside its output and error: the notices, and the
    hints if it failed."""
    told = (*notices, *(() if is_ok else (f"hint: {each}" for each in hints)))
    return tuple(for_model(each, policy, "the user", has_arguments=False) for each in told)
