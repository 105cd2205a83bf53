"""The policy that a run of `cellwright exec --learn` needed, as TOML for a person to review.

What the person allowed and the run used is in force in it.  What the run was refused stands in
comments: a program chooses what it asks for, and must not write its own policy.
"""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from .....policies.advice.learning import collapse, quoted, text_with_rule
from .....policies.network.rule import NetworkRule
from .....policies.network.rules import covers_host
from .....policies.policy import Network, Policy
from .....runner.requests.result import SandboxResult
from ..known_programs import known_programs
from ..project_policy import ProjectOptions, ProjectPolicy

_OPENS = ("open", "openat", "openat2", "creat")
_MOST = 200  # lines of what was refused


def learned_policy(
    base: Policy, extends: str, found: ProjectPolicy, options: ProjectOptions, result: SandboxResult
) -> str:
    """Return the text of a policy that extends `extends`, which is `base`; `options` are those of the
    run. Raises PolicyError."""
    lines = [
        "# Learned from one run of cellwright exec: read it, and take the # from what you agree with.",
        *_refused(result),
        *_variables(options.variables),
        f"extends = {quoted(extends)}",
        f"name = {quoted(base.name)}",
    ]
    given = [(name, getattr(options, name)) for name in ("read", "write") if getattr(options, name)]
    if given:
        lines += ["", "[filesystem]"]
        for name, paths in given:
            real = (quoted(os.path.realpath(os.path.expanduser(each))) for each in paths)
            lines.append(f"{name} = [{', '.join(real)}]")
    text = "\n".join(lines) + "\n"
    agent = known_programs().agents.get(found.agent)
    for rule in _used(found.policy, result):
        if not agent or not any(covers_host(host, rule.host) for host in agent.hosts):
            text = text_with_rule(text, replace(base, network=Network()), rule)
    return text


def _used(policy: Policy, result: SandboxResult) -> list[NetworkRule]:
    """Return rules for the hosts to which the run made connections, each once."""
    rules: dict[NetworkRule, None] = {}
    for name, port in sorted({(each.name, each.port) for each in result.connections if each.name}):
        matching = [
            rule for rule in policy.network.allow
            if covers_host(rule.host, name) and port in rule.each_port()
        ]  # fmt: skip
        schemes = tuple(dict.fromkeys(each for rule in matching for each in rule.schemes_on(port)))
        addresses = tuple(dict.fromkeys(each for rule in matching for each in rule.addresses))
        made = NetworkRule(host=name, ports=(port,), addresses=addresses)
        if schemes and schemes != made.schemes_on(port):
            made = replace(made, schemes=schemes)
        rules[made] = None
    return list(rules)


def _refused(result: SandboxResult) -> list[str]:
    """Return comments about the hosts and the files of this host that programs were refused."""
    hosts = {
        each.arguments[0] for each in result.violations if each.syscall in ("resolve", "connect")
    }
    paths = {
        each.arguments[0].strip("'") for each in result.violations
        if each.syscall in _OPENS and each.arguments
    }  # fmt: skip
    shown = collapse({each for each in paths if os.path.isabs(each) and os.path.lexists(each)})
    comments = [
        f"# [[network.allow]]\n# host = {quoted(host)}" for host in sorted(hosts) if "." in host
    ]
    comments += [f"# [filesystem] read: {quoted(path)}" for path in shown]
    return ["# Refused:", *comments[:_MOST]] if comments else []


def _variables(names: Sequence[str]) -> list[str]:
    """Return a comment with the options for variables, whose values may be secrets."""
    options = " ".join(f"--env {name.partition('=')[0]}" for name in names)
    return (
        [f"# Its variables are given by options of exec: {ascii(options)[1:-1]}"] if options else []
    )
