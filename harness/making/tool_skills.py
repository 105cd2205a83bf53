"""Made tools as skills, and skills as tools: a tool's definition travels in its skill, with its tests.

A skill to make tools of is untrusted: nothing of it runs outside cells, and what it asks for is
granted only if the caller says so.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from ...policies.errors import SkillInvalid, ToolInvalid
from ...policies.source.parsing import TooDeep, parse
from ..schemas.spec import Provenance, ToolSpec, ToolTest
from ..skills.manifest import MOST_DESCRIPTION, SkillManifest
from ..skills.skill import Skill, make_skill
from .tool_files import ExportedTool, decode_tool, encode_tool

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
            raise ToolInvalid(f"{skill.name}: has no scripts/{defined.name}.py")
        return [defined.with_source(_text(skill, source.content))]
    found = [each for path in files for each in _functions_in(skill, path)]
    if not found:
        raise SkillInvalid(
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
        raise ToolInvalid(f"{skill.name}: {path}: {type(error).__name__}: {error}") from None
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
        raise ToolInvalid(f"{skill.name}: a source is not UTF-8: byte {error.start}") from None
