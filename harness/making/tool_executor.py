"""`ToolExecutor`: executes calls of made tools, and their own tests, each in a cell.

Programs of made tools: the source of the tool, followed by one call or one test.

`ToolSandboxes`: the sandboxes of made tools, one for each set of permissions.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ...policies.errors import (
    PolicyError,
    ToolError,
    ToolFailed,
    ToolResultInvalid,
    ToolTestFailed,
)
from ...policies.narrowing import exceeds, narrow
from ...policies.permission_sets import PermissionLevel
from ...policies.policy import Policy, named_layers
from ...policies.profiles.loading import load_policy
from ...policies.source.findings import Rules, rules_with
from ...runner.audit.log import AuditLog
from ...runner.concurrency import CANCEL
from ...runner.messages import NOT_JSON
from ...runner.requests.result import SandboxResult
from ...runner.settings import PoolSettings
from ..sandbox.calls.admission import rules_of, with_rules
from ..sandbox.faces.permissions import policy_of
from ..sandbox.lending_cache import LendingCache
from ..sandbox.sandbox import Sandbox
from ..sandbox.sandbox_arguments import HostSettings
from ..schemas.functions import FunctionSchema
from ..schemas.spec import Grants, ToolSpec, ToolState, ToolTest
from ..schemas.validation import is_same
from ..text.terminal_text import harmless
from ..tools.broker import Broker
from ..tools.sanitizer import check_arguments, check_result
from ..tools.tool import CALLING, Caller

if TYPE_CHECKING:
    from ..sandbox.packages.package_store import PackageStore

ARGUMENTS = "arguments_of_this_call"  # the input variable that holds them
# Appended to the source, so that its lines keep their numbers, if a type of the tool is not JSON.
_OBJECTS = r"""
def _cellwright_given(hint, value):
    import base64, dataclasses, datetime, decimal, enum, types, typing, uuid
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Annotated:
        return _cellwright_given(inside[0], value)
    if kind in (typing.Union, types.UnionType):
        for each in inside:
            made = _cellwright_given(each, value)
            if made is not value:
                return made
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        if value.keys() - hints.keys():
            return value
        return hint(**{name: _cellwright_given(hints[name], each) for name, each in value.items()})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value) if value in [each.value for each in hint] else value
    if isinstance(value, str) and isinstance(hint, type):
        if hint in (bytes, bytearray):
            return hint(base64.b64decode(value, validate=True))
        if hint in (datetime.datetime, datetime.date, datetime.time):
            return hint.fromisoformat(value)
        if hint is datetime.timedelta:
            return _cellwright_duration(value)
        if hint in (decimal.Decimal, uuid.UUID):
            return hint(value)
    if isinstance(value, dict) and len(inside) == 2:
        return {name: _cellwright_given(inside[1], each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        return hint(*map(_cellwright_given, hints.values(), value))
    if kind is tuple and not (len(inside) == 2 and inside[1] is ...):
        return tuple(map(_cellwright_given, inside, value))
    made = [_cellwright_given(inside[0], each) for each in value] if inside else value
    for plain in (tuple, set, frozenset):
        if kind is plain or hint is plain:
            return plain(made)
    return made

def _cellwright_duration(text):
    import datetime, re
    found = re.fullmatch(r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", text)
    if not found or text[-1] in "PT":
        raise ValueError(f"{text!r} is not an ISO 8601 duration, such as P1DT2H or PT90S")
    sign, days, hours, minutes, seconds = (part or 0 for part in found.groups())
    made = datetime.timedelta(int(days), float(seconds), 0, 0, int(minutes), int(hours))
    return -made if sign else made

def _cellwright_call(function, arguments):
    import typing
    hints = typing.get_type_hints(function, include_extras=True)
    made = {name: _cellwright_given(hints.get(name), each) for name, each in arguments.items()}
    return function(**made)
"""
_ALL = "async def _cellwright_all(items): return [each async for each in items]\n"


def program_of_call(source: str, described: FunctionSchema) -> str:
    """Return the program whose value is the tool's result."""
    function = described.function
    call = f"{function}(**{ARGUMENTS})"
    if described.has_objects:
        call = f"_cellwright_call({function}, {ARGUMENTS})"
    before = "import asyncio\n" if described.is_async else ""
    if described.is_async_generator:
        before += _ALL
        call = f"_cellwright_all({call})"
    if described.is_async:
        call = f"asyncio.run({call})"
    return f"{source}\n{_OBJECTS if described.has_objects else ''}{before}{call}"


def program_of_test(source: str, test: str, word: str) -> str:
    """Return the program that executes the source and then a test.

    Its value is `word` only if both ran to their end; a test cannot know the word.
    """
    return f"{source}\n{test}\n{word!r}"


PROFILE = "tool"
ALIVE = 8  # sandboxes at a time; each has a launcher and a pool of cells
_TRAIL_ENTRIES = 1000
_BUILD_SECONDS = 300.0  # to resolve, fetch and build the packages of a tool
POOL = 4  # cells kept ready for each set of permissions


def _rules(grants: Grants, policy: Policy, ceiling: Policy | None) -> Rules:
    """Return the rules of the source checks: lists that the operator wrote into the policy of the
    ceiling, else those of `policy`, relaxed by permissions."""
    rules = rules_of(policy.validation)
    if ceiling:
        own, usual = rules_of(ceiling.validation), Rules()
        names = [
            each for each in usual.__struct_fields__ if getattr(own, each) != getattr(usual, each)
        ]
        rules = replace(rules, **{name: getattr(own, name) for name in names})
    return rules_with(
        rules,
        files=any(each.level is not PermissionLevel.NONE for each in grants.files),
        programs=any(each.allow_subprocess for each in grants.processes),
        hosts=any(each.allowed_hosts for each in grants.network),
    )


class ToolSandboxes:
    """Lends sandboxes by permissions; the one that was idle longest is closed for a new one.

    No sandbox allows more than `ceiling`; without a ceiling, every permission is granted.
    """

    def __init__(
        self,
        ceiling: Sandbox | None = None,
        pool: int = POOL,
        optional_layers: Sequence[str] = (),
        package_store: "PackageStore | None" = None,
    ) -> None:
        self._ceiling = ceiling
        self._package_store = ceiling.package_store if ceiling else package_store
        self.audit = ceiling.audit if ceiling else AuditLog(max_entries=_TRAIL_ENTRIES)
        self._pool = PoolSettings(size=pool)
        self._optional_layers = named_layers("optional_layers", optional_layers)
        self._sandboxes = LendingCache[Sandbox](ALIVE, "the tool factory")

    def policy(self, grants: Grants) -> Policy:
        """Return the policy of cells with these permissions: the profile `tool` plus the permissions.

        Raises PolicyError for invalid permissions, and for more than the ceiling allows.
        """
        profile = load_policy(PROFILE)
        if self._ceiling is None:
            profile = replace(profile, optional_layers=self._optional_layers)
            return policy_of(grants.permissions, profile)
        most = self._ceiling.policy
        profile = replace(profile, optional_layers=most.optional_layers, python=most.python)
        wanted = policy_of(grants.permissions, profile)
        usual = exceeds(profile, most)
        if beyond := [line for line in exceeds(wanted, most) if line not in usual]:
            raise PolicyError(
                f"permissions: more than the sandbox allows: {'; '.join(beyond)}",
                "ask for less, or give the factory a sandbox that allows it",
            )
        return narrow(wanted, most)

    @property
    def packages(self) -> tuple[str, ...] | None:
        """The packages that tools may require, by name; None if every one.

        Raises PackageError if there are some, and the extra `packages` is not installed.
        """
        if self._ceiling is None:
            return None
        most = self._ceiling.policy.packages
        if not most.allow and not most.require:
            return ()
        from ..sandbox.packages.lock import name_of, require_extra  # seldom needed

        require_extra()
        return tuple(sorted({name_of(each) for each in (*most.allow, *most.require)}))

    def check_requirements(self, requirements: Sequence[str]) -> None:
        """Raise PolicyError for a package that the policy of the sandbox does not name.

        A model chooses the requirements: an index would learn whatever it writes as a name, so an empty
        list of allowed packages allows none here.
        """
        if not requirements or (allowed := self.packages) is None:
            return
        from ..sandbox.packages.lock import name_of  # seldom needed

        if unknown := [each for each in requirements if name_of(each) not in allowed]:
            raise PolicyError(
                f"requirements: not among the packages that tools may have: {', '.join(unknown)}",
                f"use {', '.join(allowed)}, or the standard library" if allowed
                else "use the standard library; packages.allow of the policy names packages",
            )  # fmt: skip

    def build_packages(self, grants: Grants, requirements: Sequence[str]) -> tuple[str, ...]:
        """Fetch and build the set of `requirements` if it is missing; return its exact versions.

        Raises PackageError.
        """
        from ..sandbox.packages.package_store import PackageStore
        from ..sandbox.packages.store_directory import Deadline

        store = (self._package_store or PackageStore()).limited_to(self.policy(grants))
        deadline = Deadline(_BUILD_SECONDS, CANCEL.get())
        opened = store.open(requirements, deadline=deadline)
        pins = tuple(f"{each.name}=={each.version}" for each in opened.made.lock.wheels)
        opened.close()
        opened = store.open(
            pins, deadline=deadline
        )  # the same set, found by the list that calls name
        opened.close()
        return pins

    @contextlib.contextmanager
    def lend(self, grants: Grants, tools: Broker | None = None) -> Iterator[Sandbox]:
        """Lend a sandbox with these permissions for one call; its programs can call `tools`.

        Raises what making a Sandbox raises.
        """
        key = msgspec.json.encode((grants, tools is not None))
        with self._sandboxes.lend(key, lambda: self._make(grants, tools)) as sandbox:
            yield sandbox

    def _make(self, grants: Grants, tools: Broker | None) -> Sandbox:
        policy = self.policy(grants)
        rules = _rules(grants, policy, self._ceiling.policy if self._ceiling else None)
        if self._ceiling is None:
            host = HostSettings(package_store=self._package_store)
            return Sandbox(
                policy=with_rules(policy, rules), pool=self._pool, audit=self.audit, tools=tools,
                host=host,
            )  # fmt: skip
        return self._ceiling.sibling(policy, self._pool, tools, rules=rules)

    def policy_in_force(self, grants: Grants) -> Policy:
        """Return the policy of the sandbox for these permissions."""
        with self.lend(grants) as sandbox:
            return sandbox.policy

    def settle(self) -> None:
        """Wait until all pools are full."""
        self._sandboxes.settle()

    def close(self) -> None:
        """End every call and close every sandbox; closing twice is fine."""
        self._sandboxes.close()


_OF_A_CALL = re.compile(r"tools\.ToolError: ([\w.-]+)(?= >|:)")


class ToolExecutor:
    """Executes made tools in cells of `sandboxes`; they call other tools through `broker`."""

    def __init__(self, sandboxes: ToolSandboxes, broker: Broker, caller: Caller) -> None:
        self._sandboxes = sandboxes
        self._broker = broker
        self._caller = caller

    def try_out(self, spec: ToolSpec, described: FunctionSchema) -> ToolSpec:
        """Execute a tool's tests, and return it, tested if it has any; raises ToolTestFailed."""
        for number, test in enumerate(spec.tests, 1):
            try:
                self._test(spec, described, test)
            except ToolError as error:
                raise ToolTestFailed(
                    f"{spec.name}: test {number}: {error}", tool=spec.name,
                    result=getattr(error, "result", None),
                ) from None  # fmt: skip
        return replace(spec, state=ToolState.TESTED) if spec.tests else spec

    def _test(self, spec: ToolSpec, described: FunctionSchema, test: ToolTest) -> None:
        if test.source:
            word = os.urandom(8).hex()
            result = self._execute(spec, program_of_test(spec.source_code, test.source, word), {})
            if not result.ok or result.value != word:
                raise _failed(spec, result)
            return
        check_arguments(spec, test.input)
        value = self.run(spec, program_of_call(spec.source_code, described), test.input)
        if not is_same(value, test.expected):
            raise ToolFailed(f"expected {_shown(test.expected)}, not {_shown(value)}")

    def run(self, spec: ToolSpec, program: str, arguments: dict[str, Any]) -> Any:
        """Execute one call in a cell, and return its value, which is as untrusted as the tool."""
        result = self._execute(spec, program, {ARGUMENTS: arguments}, plain=True)
        said = result.error or ""
        if said.startswith(NOT_JSON):
            raise ToolResultInvalid(f"{spec.name}: the result is {harmless(said)}", tool=spec.name)
        if not result.ok:
            raise _failed(spec, result)
        check_result(spec, result.value)
        return result.value

    def _execute(
        self, spec: ToolSpec, program: str, inputs: dict[str, Any], *, plain: bool = False
    ) -> SandboxResult:
        above = CALLING.get() or self._caller
        token = CALLING.set(replace(above, tools=frozenset(spec.calls)))
        try:
            with self._sandboxes.lend(spec.grants, self._broker if spec.calls else None) as sandbox:
                timeout = min(spec.timeout, sandbox.policy.limits.wall_seconds)
                return sandbox.execute(
                    program, inputs=inputs, timeout=timeout, cancel=CANCEL.get(), plain=plain,
                    packages=spec.provenance.packages,
                )  # fmt: skip
        finally:
            CALLING.reset(token)


def _failed(spec: ToolSpec, result: SandboxResult) -> ToolFailed:
    said = harmless(result.error or f"{result.status.value}, {result.reason}")
    inner = _OF_A_CALL.match(said)  # a tool that it called failed: `a > b: why`, at any depth
    if inner and inner[1] in spec.calls:
        return ToolFailed(f"{spec.name} > {said[inner.start(1) :]}", tool=spec.name, result=result)
    return ToolFailed(f"{spec.name}: {said}", tool=spec.name, result=result)


def _shown(value: object) -> str:
    return ascii(value)[:200]
