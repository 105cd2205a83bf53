"""Exported tools: a folder with `tool.py`, the source, and `tool.json`, everything else.

A folder to import is untrusted: no text in it is used as a path, and nothing in it is executed here.

Made tools as skills, and skills as tools: a tool's definition travels in its skill, with its tests.

A skill that becomes tools is untrusted: its code runs only in cells, and its requests are granted only
if the caller says so.

`FactoryCatalogue`: the tools of a registry for a broker; made tools are executed in cells.

Merging of near-duplicate tools: of two that do the same, one is kept, with the tests of both.

Drafts of several runs at once cannot see each other, so that two runs make two tools for one job.  That
tools look alike is a guess; that each passes the tests of the other too decides.
"""

import ast
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ...policies import errors
from ...policies.source.python_check import TooDeep, parse
from ..schemas.functions import describe_source
from ..schemas.spec import Grants, Provenance, ToolSpec, ToolState, ToolTest, normalised
from ..skills.manifest import MOST_DESCRIPTION, SkillManifest
from ..skills.skill import Skill, make_skill
from ..tools.registry import ToolRegistry
from ..tools.tool import Caller, Tool
from ..tools.tool_store import are_near, shape_of
from .tool_executor import ToolExecutor, program_of_call

_SOURCE, _ABOUT = "tool.py", "tool.json"
_MAX_BYTES = 1024 * 1024
_FORMAT = 1


class ExportedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `tool.json`.  State and version are left out: a registry assigns its own."""

    format: int
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    grants: Grants = Grants()
    timeout: float = 30.0
    calls: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    risky: bool = False
    tags: tuple[str, ...] = ()
    tests: tuple[ToolTest, ...] = ()
    provenance: Provenance = Provenance()
    source_code: str = ""

    @property
    def asks_for(self) -> str:
        """Return the permissions, calls and packages that it asks for as text, "" if none."""
        wanted = [repr(each) for each in self.grants.permissions.permissions]
        wanted += [f"calling {name}" for name in self.calls]
        return ", ".join([*wanted, *(f"the package {name}" for name in self.requirements)])

    def with_source(self, source: str) -> "ExportedTool":
        return msgspec.structs.replace(self, source_code=source)


def encode_tool(spec: ToolSpec) -> bytes:
    """Return the content of `tool.json`."""
    about = {name: getattr(spec, name) for name in _FIELDS}
    exported = ExportedTool(format=_FORMAT, **about)
    return msgspec.json.format(msgspec.json.encode(exported), indent=2) + b"\n"


def decode_tool(data: bytes, where: str) -> ExportedTool:
    """Return the tool in the content of `tool.json`, without its source; raises ToolInvalid."""
    try:
        exported = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.ToolInvalid(f"{where}: {error}") from None
    if exported.format != _FORMAT:
        raise errors.ToolInvalid(f"{where}: format must be {_FORMAT}, got {exported.format}")
    return exported


def write_tool(spec: ToolSpec, directory: Path) -> Path:
    """Write a tool into a new folder of its name below `directory`; raises RegistryError."""
    folder = directory / normalised(spec.name)
    try:
        folder.mkdir(parents=True)
        for name, data in ((_SOURCE, spec.source_code.encode()), (_ABOUT, encode_tool(spec))):
            with open(folder / name, "xb") as file:
                file.write(data)
    except OSError as error:
        raise errors.RegistryError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def read_tool(folder: Path) -> ExportedTool:
    """Return the tool in a folder; raises ToolInvalid if the folder does not hold one."""
    exported = decode_tool(_read(folder / _ABOUT), str(folder))
    try:
        return exported.with_source(_read(folder / _SOURCE).decode())
    except UnicodeDecodeError as error:
        raise errors.ToolInvalid(f"{folder}: {error}") from None


def _read(path: Path) -> bytes:
    """Read a regular file; refuse links, which could lead to files that only this process may read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise errors.ToolInvalid(f"{path}: not a regular file")
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise errors.ToolInvalid(f"cannot read {path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise errors.ToolInvalid(f"{path}: more than {_MAX_BYTES} bytes")
    return data


_FIELDS = tuple(
    name for name in ExportedTool.__struct_fields__ if name not in ("format", "source_code")
)
_DECODER = msgspec.json.Decoder(ExportedTool)


_PREFIX = "cellwright-"
_DEFINITION = "assets/tool.json"
_UNPARSABLE = (TooDeep, SyntaxError, ValueError, RecursionError, MemoryError)


def skill_of_tool(spec: ToolSpec) -> Skill:
    """Return a skill with the source of a made tool, its definition and its tests.

    The tools that it calls become `allowed-tools`.  Raises SkillInvalid.
    """
    module, name = spec.name, spec.name.replace("_", "-").replace(".", "-").lower()
    files = {f"scripts/{module}.py": spec.source_code.encode(), _DEFINITION: encode_tool(spec)}
    for number, test in enumerate(spec.tests, 1):
        if test.source:
            files[f"tests/test_{number}.py"] = test.source.encode()
    origin = spec.provenance
    about = {"tool": spec.name, "task": origin.task, "model": origin.model, "maker": origin.maker}
    manifest = SkillManifest(
        name=name,
        description=(spec.description or f"Calls {spec.name}.")[:MOST_DESCRIPTION],
        body=_body(spec, name),
        metadata={f"{_PREFIX}{key}": text for key, text in about.items() if text},
        allowed_tools=spec.calls,
    )
    return make_skill(manifest, {**files})


def _body(spec: ToolSpec, name: str) -> str:
    parameters = ", ".join(spec.parameters.get("properties", {}))
    module = f"skills.{name.replace('-', '_')}.scripts.{spec.name}"
    return "\n".join(
        [
            f"# {name}", "", spec.description, "",
            f"    from {module} import {spec.function}", f"    {spec.function}({parameters})",
        ]
    )  # fmt: skip


def tools_in(skill: Skill) -> list[ExportedTool]:
    """Return the tools that a skill holds: the one that it defines, else each public function of its
    scripts whose parameters all have annotations.

    Raises SkillInvalid if there are none, ToolInvalid for an invalid definition.
    """
    files = skill.tree.files
    if _DEFINITION in files:
        defined = decode_tool(files[_DEFINITION].content, f"{skill.name}/{_DEFINITION}")
        source = files.get(f"scripts/{defined.name}.py")
        if source is None:
            raise errors.ToolInvalid(f"{skill.name}: has no scripts/{defined.name}.py")
        return [defined.with_source(_text(skill, source.content))]
    found = [each for path in files for each in _functions_in(skill, path)]
    if not found:
        raise errors.SkillInvalid(
            f"{skill.name}: no function in its scripts can be a tool",
            "annotate every parameter of a public function",
        )
    return found


def _functions_in(skill: Skill, path: str) -> Iterator[ExportedTool]:
    place = PurePosixPath(path)
    if place.parts[0] != "scripts" or place.suffix != ".py":
        return
    source = _text(skill, skill.tree.files[path].content)
    try:
        tree = parse(source)
    except _UNPARSABLE as error:
        raise errors.ToolInvalid(f"{skill.name}: {path}: {type(error).__name__}: {error}") from None
    tests = tuple(ToolTest(source=each) for each in _tests_of(skill, place.stem))
    metadata = skill.manifest.metadata
    origin = Provenance(
        task=metadata.get(f"{_PREFIX}task", ""), model=metadata.get(f"{_PREFIX}model", ""),
        parent=skill.reference,
    )  # fmt: skip
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _can_be_tool(node):
            yield ExportedTool(
                format=1, name=node.name, source_code=source, calls=skill.manifest.allowed_tools,
                tests=tests, provenance=origin,
            )  # fmt: skip


def _can_be_tool(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    has_only_named = not (given.posonlyargs or given.vararg or given.kwarg)
    return (
        not node.name.startswith("_") and has_only_named and all(each.annotation for each in every)
    )


def _tests_of(skill: Skill, module: str) -> Iterator[str]:
    """Yield the tests of one script, without their imports from it: a tool's tests run behind its
    source.  Tests that import other scripts are left out."""
    for path, file in skill.tree.files.items():
        if not (path.startswith("tests/") and path.endswith(".py")):
            continue
        try:
            tree = parse(_text(skill, file.content))
        except _UNPARSABLE:
            continue
        own = f"skills.{skill.name.replace('-', '_')}.scripts.{module}"
        kept = [node for node in tree.body if not _imports(node, own)]
        if len(kept) < len(tree.body) and "skills." not in ast.unparse(ast.Module(kept, [])):
            yield ast.unparse(ast.Module(kept, []))


def _imports(node: ast.stmt, module: str) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == module and not node.level


def _text(skill: Skill, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise errors.ToolInvalid(
            f"{skill.name}: a source is not UTF-8: byte {error.start}"
        ) from None


_REMEMBERED = 1024


class FactoryCatalogue:
    """The catalogue of a factory's broker.  Safe from many threads; counts calls of made tools.

    The factory sets `executor` before the first call: the executor needs the broker, and the broker
    needs this catalogue.
    """

    executor: ToolExecutor

    def __init__(self, registry: ToolRegistry, maker: str = "") -> None:
        """`maker` calls the tools; "" is the host, which may retire the tools of every maker."""
        self._registry = registry
        self._maker = maker
        self._lock = threading.Lock()
        self._tools: OrderedDict[tuple[str, ToolState], Tool] = OrderedDict()

    def get(self, name: str) -> Tool:
        """Return a tool that can be called; raises ToolNotFound, and ToolDenied if it is retired."""
        spec = self._registry.get(name)
        if here := self._registry.developers(name) or self._registry.served(name):
            return here
        if spec.state is ToolState.RETIRED:
            raise self._retired(spec)
        key = spec.reference, spec.state
        with self._lock:
            known = self._tools.get(key)
            if known and known.spec == spec:
                self._tools.move_to_end(key)
                return known
        made = self._made(spec)
        with self._lock:
            self._tools[key] = made
            if len(self._tools) > _REMEMBERED:
                self._tools.popitem(last=False)
        return made

    def specs(self) -> list[ToolSpec]:
        """Return the tools that may be offered to a program."""
        return self._registry.list_tools()

    def revision(self) -> int:
        """Return a number that changes with each change of the tools."""
        return self._registry.revision()

    def _retired(self, spec: ToolSpec) -> errors.ToolDenied:
        if kept := self._registry.successor(spec.name):
            signature = f"{kept.name}({', '.join(kept.parameters.get('properties', ()))})"
            return errors.ToolDenied(
                f"{spec.name} is retired: {kept.name} does the same", f"call {signature}",
                tool=spec.name,
            )  # fmt: skip
        return errors.ToolDenied(
            f"{spec.name} is retired: it failed too often, or a person retired it",
            "make a new version of it, or call an older one by name@version",
            tool=spec.name,
        )

    def _made(self, spec: ToolSpec) -> Tool:
        program = program_of_call(spec.source_code, describe_source(spec.source_code, spec.name))
        is_own = self._maker in ("", spec.provenance.maker)

        def perform(arguments: dict[str, Any], caller: Caller) -> Any:
            try:
                value = self.executor.run(spec, program, arguments)
            except (errors.ToolFailed, errors.ToolResultInvalid):
                self._registry.note(spec, well=False, may_retire=is_own)
                raise
            self._registry.note(spec, well=True, may_retire=is_own)
            return value

        return Tool(spec, perform)


_MOST_PAIRS = 200  # tested pairs; each costs one cell for each test


class MergedTool(NamedTuple):
    """The merge of two equivalent tools: `kept` has the tests of both."""

    kept: ToolSpec
    retired: ToolSpec


def merge_similar(
    registry: ToolRegistry, executor: ToolExecutor, specs: Sequence[ToolSpec]
) -> tuple[MergedTool, ...]:
    """Merge equivalent tools among the living `specs`; return the merges.

    A trusted tool is kept before others, and an older one before a newer one, so that two processes
    choose alike.  A tool without a test that calls it is left alone: any other one would pass its
    tests.
    """
    left = sorted((each for each in specs if _is_tested(each)), key=_rank)
    merged: list[MergedTool] = []
    tried = 0
    while left:
        kept = left.pop(0)
        for other in tuple(left):
            if not _may_be_same(kept, other) or tried >= _MOST_PAIRS:
                continue
            tried += 1
            if _passes(executor, kept, other) and _passes(executor, other, kept):
                kept = _with_tests_of(registry, kept, other)
                retired = registry.set_state(other.reference, ToolState.RETIRED)
                merged.append(MergedTool(kept, retired))
                left.remove(other)
    return tuple(merged)


def _rank(spec: ToolSpec) -> tuple[bool, str, str]:
    return spec.state is not ToolState.TRUSTED, spec.created_at, spec.name


def _is_tested(spec: ToolSpec) -> bool:
    calls = re.compile(rf"\b{re.escape(spec.function)}\s*\(")
    return any(not each.source or calls.search(each.source) for each in spec.tests)


def _may_be_same(kept: ToolSpec, other: ToolSpec) -> bool:
    """Tell whether two tools take arguments of the same kinds, may do the same, and read alike."""
    rights = [(each.grants, each.calls, each.risky) for each in (kept, other)]
    shapes = [shape_of(each.parameters) for each in (kept, other)]
    return rights[0] == rights[1] and shapes[0] == shapes[1] and are_near(kept, other)


def _passes(executor: ToolExecutor, spec: ToolSpec, other: ToolSpec) -> bool:
    tried = replace(spec, tests=_tests_for(spec, other))
    try:
        executor.try_out(tried, describe_source(spec.source_code, spec.name))
    except errors.ToolError:
        return False
    return True


def _tests_for(spec: ToolSpec, other: ToolSpec) -> tuple[ToolTest, ...]:
    if spec.function == other.function:
        return other.tests
    alias = f"{other.function} = {spec.function}\n"
    return tuple(
        replace(each, source=alias + each.source) if each.source else each for each in other.tests
    )


def _with_tests_of(registry: ToolRegistry, kept: ToolSpec, other: ToolSpec) -> ToolSpec:
    """Store the next version of a tool, which has the tests of another too, and the state as before:
    its source is the same.  The name of the other leads to it from now on."""
    more = [each for each in _tests_for(kept, other) if each not in kept.tests]
    replaces = dict.fromkeys((*kept.replaces, *other.replaces, other.name))
    return registry.add(replace(kept, tests=(*kept.tests, *more), replaces=tuple(replaces)))
