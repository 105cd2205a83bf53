"""`ToolFactory`: makes tools from source code, tests and stores them, and calls them in cells."""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...policies import errors
from ...policies.closing import Closing
from ...policies.permission_sets import PermissionSet
from ...policies.policy import Policy
from ...policies.source.findings import way_out
from ...policies.tool_rules import Tools
from ..sandbox.sandbox import Sandbox
from ..schemas.functions import describe_source
from ..schemas.spec import Provenance, ToolSpec, ToolState, normalised
from ..search.documents import Kind
from ..search.search import Model, model_of
from ..skills.skill import Skill
from ..skills.skill_store import KeptSkill, SkillStore, export_skill
from ..tools.approval import Approve, refuse_approval
from ..tools.broker import Broker
from ..tools.registry import ToolRegistry
from ..tools.results import ResultFilter
from ..tools.tool import CALLING, Caller, Tool, Vault
from ..tools.tool_search import ToolSearch
from .draft import draft
from .factory_catalogue import (
    ExportedTool,
    FactoryCatalogue,
    MergedTool,
    merge_similar,
    read_tool,
    skill_of_tool,
    tools_in,
    write_tool,
)
from .tool_executor import POOL, ToolExecutor, ToolSandboxes, program_of_call

if TYPE_CHECKING:
    from ..sandbox.packages.package_store import PackageStore

# The embedding program has no caps; programs in cells have those of their policy.
_UNBOUNDED = Tools(
    calls=2**52,
    calls_per_second=2**52,
    argument_bytes=2**52,
    result_bytes=2**52,
    shown_bytes=2**52,
    result_rows=2**52,
)
_KNOWN = 20  # known tools that an error message lists


class ToolFactory(Closing):
    """Tools made at run time.  Safe from many threads.

    A tool's cells have the profile `tool` and the permissions that the tool was made with (default
    none), but never more than `sandbox` allows; they share its trail, interpreter and source checks.
    `registry`, or the path of its file, stores the tools (default in memory). `maker` names the agent
    that makes tools here; it may replace and remove only its own. `rules`, `vault`, `approve` and
    `filters` are those of the `broker`, through which every call goes. `pool` is the number of cells
    kept ready for each set of permissions. `model`: a folder with a sentence encoder, by which search
    finds tools by meaning too (default: the registry's). Without `sandbox`, `optional_layers` are the
    layers that cells may do without, and `package_store` has the packages of tools. `close` closes the
    registry if the factory made it.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        registry: ToolRegistry | str | os.PathLike[str] | None = None,
        *,
        maker: str = "",
        rules: Tools = _UNBOUNDED,
        vault: Vault | None = None,
        approve: Approve = refuse_approval,
        filters: Sequence[ResultFilter] = (),
        model: Model | str | os.PathLike[str] | None = None,
        pool: int = POOL,
        optional_layers: Sequence[str] = (),
        package_store: "PackageStore | None" = None,
    ) -> None:
        if not isinstance(sandbox, Sandbox | None):
            raise errors.PolicyError(
                f"sandbox: must be a Sandbox, got {sandbox!r}",
                "ToolFactory(registry=path) stores the tools in a file",
            )
        self._owns_registry = not isinstance(registry, ToolRegistry)
        self.registry = registry if isinstance(registry, ToolRegistry) else ToolRegistry(registry)
        model = model_of(model) or self.registry.model
        self.maker = maker
        self._sandboxes = ToolSandboxes(sandbox, pool, optional_layers, package_store)
        audit = self._sandboxes.audit
        self._catalogue = FactoryCatalogue(self.registry, maker)
        self.broker = Broker(
            self._catalogue,
            rules=rules,
            vault=vault,
            approve=approve,
            filters=filters,
            audit=audit,
            model=model,
        )
        self._caller = Caller(id=maker or "host", rules=_UNBOUNDED)
        self._executor = ToolExecutor(self._sandboxes, self.broker, self._caller)
        self._catalogue.executor = self._executor
        self._search = ToolSearch(self.registry, model)

    # making

    def create_tool(
        self, name: str, description: str, source_code: str,
        input_schema: dict[str, Any] | None = None, permissions: PermissionSet | None = None,
        tests: Iterable[Any] | None = None, timeout: float = 30.0, *, calls: Sequence[str] = (),
        requirements: Sequence[str] = (), risky: bool = False, tags: Sequence[str] = (),
        provenance: Provenance | None = None, allow_similar: bool = False, is_new: bool = False,
    ) -> ToolSpec:  # fmt: skip
        """Check source code, test it in cells, and store it as a tool, or as a new version of one.

        The tool is the function with its name, or the only public function.  Its schema is
        `input_schema`, by default the one of signature and docstring.  A test is a pair of input and
        expected result, or source that asserts; a new version without `tests` has those of the version
        before, and `tests=[]` removes them.  `requirements` are packages that it imports, such as
        "idna==3.*", which are fetched on the host; with a sandbox, only those that `packages.allow` or
        `packages.require` of its policy name.  If a step fails, nothing is stored.  Raises
        ToolInvalid if the source cannot be a tool, ToolTestFailed, ToolExists if another maker has the
        name, or another tool does the same (unless `allow_similar`), with `is_new` if
        this maker has a tool of that name that is not retired, PolicyError for permissions or
        packages that cannot be granted, and PackageError if packages cannot be had.
        """
        provenance = replace(provenance or Provenance(), maker=self.maker, packages=())
        before = self._newest(name)
        inherited = before.tests if before and tests is None else ()
        spec, described = draft(
            name, description, source_code, input_schema=input_schema, permissions=permissions,
            tests=inherited if tests is None else tests, timeout=timeout, calls=calls,
            requirements=requirements, risky=risky, tags=tags, provenance=provenance,
        )  # fmt: skip
        spec = replace(spec, replaces=before.replaces if before else ())
        self._check_calls(spec)
        self._sandboxes.check_requirements(spec.requirements)
        with self._sandboxes.lend(spec.grants) as sandbox:
            _, why = sandbox.validate_source(source_code)
        if why:
            hint = way_out(why.rpartition(": ")[2])
            raise errors.ToolInvalid(f"{spec.name}: {why}", hint, tool=spec.name)
        if known := self._same(spec):
            return known
        if not allow_similar and (other := self.registry.alike(spec)):
            raise errors.ToolExists(
                f"{spec.name}: {other.name} does the same: {other.description[:200]}",
                "use it, or pass allow_similar=True",
                tool=spec.name,
                existing=other.name,
            )
        if spec.requirements:
            packages = self._sandboxes.build_packages(spec.grants, spec.requirements)
            spec = replace(spec, provenance=replace(provenance, packages=packages))
        try:
            return self.registry.add(self._executor.try_out(spec, described), is_new=is_new)
        except errors.ToolTestFailed as failed:
            if not inherited:
                raise
            hint = "these are the tests of the version before: pass tests that fit the new source"
            raise errors.ToolTestFailed(
                failed.what, hint, tool=failed.tool, result=failed.result
            ) from None

    def _newest(self, name: str) -> ToolSpec | None:
        """Return the newest version of a made tool; None if there is no such tool."""
        try:
            return self.registry.get(normalised(name))
        except errors.ToolNotFound:
            return None

    def _check_calls(self, spec: ToolSpec) -> None:
        for name in spec.calls:
            try:
                if name != spec.name:
                    self.registry.get(name)
            except errors.ToolNotFound:
                known = [each.name for each in self.registry.list_tools() if each.name != spec.name]
                more = f" and {len(known) - _KNOWN} more" if len(known) > _KNOWN else ""
                raise errors.ToolInvalid(
                    f"{spec.name}: calls: there is no tool {name!r}",
                    f"make it first; there are {', '.join(known[:_KNOWN]) or 'no others'}{more}",
                    tool=spec.name,
                ) from None

    def _same(self, spec: ToolSpec) -> ToolSpec | None:
        try:
            known = self.registry.get(spec.name)
        except errors.ToolNotFound:
            return None
        origin = replace(spec.provenance, packages=known.provenance.packages)
        alike = replace(
            spec, created_at=known.created_at, version=known.version, state=known.state,
            provenance=origin,
        )  # fmt: skip
        return known if alike == known and known.state is not ToolState.RETIRED else None

    # calling

    def call(self, name: str, input: dict[str, Any] | None = None) -> Any:
        """Call a tool, `name` or `name@version`, and return its result.

        Raises ToolNotFound, ToolDenied if it is retired, ToolArgumentsInvalid, ToolFailed with the
        result of the cell, and ToolResultInvalid.
        """
        arguments = _object(name, input)
        return self.broker.call(name, arguments, CALLING.get() or self._caller)

    def test_tool(self, name: str, input: dict[str, Any] | None = None) -> Any:
        """Call a made tool, also a retired one, without counting the call or asking for approval.

        A developer's or a server's tool is called as by `call`.
        """
        spec, arguments = self.registry.get(name), _object(name, input)
        if not self.registry.is_made(spec):
            return self.call(name, arguments)
        program = program_of_call(spec.source_code, describe_source(spec.source_code, spec.name))
        trial = Tool(
            replace(spec, risky=False), lambda given, _: self._executor.run(spec, program, given)
        )
        return self.broker.try_out(trial, arguments, CALLING.get() or self._caller)

    def run_tests(self, name: str) -> int:
        """Execute the tests of a made tool again; return their number.  Raises ToolTestFailed."""
        spec = self.registry.get(name)
        self._executor.try_out(spec, describe_source(spec.source_code, spec.name))
        return len(spec.tests)

    def get(self, name: str) -> Tool:
        """Return a tool that can be called; raises ToolNotFound, and ToolDenied if it is retired."""
        return self._catalogue.get(name)

    def specs(self) -> list[ToolSpec]:
        """Return the tools that may be offered to a program."""
        return self._catalogue.specs()

    def revision(self) -> int:
        """Return a number that changes with each change of the tools."""
        return self._catalogue.revision()

    # keeping

    @property
    def packages(self) -> tuple[str, ...] | None:
        """The packages that its tools may require, by name; None if every one."""
        return self._sandboxes.packages

    def list_tools(self) -> list[ToolSpec]:
        """Return every tool that can be called, by name."""
        return self.registry.list_tools()

    def search(
        self, query: str, limit: int = 5, offset: int = 0, *, detail: str = "summary",
        tags: Collection[str] = (), states: Collection[ToolState] = (),
        kinds: Collection[Kind] = (), server: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Search tools by name or purpose; the arguments are those of ToolSearch.search."""
        return self._search.search(
            query, limit, offset, detail=detail, tags=tags, states=states, kinds=kinds,
            server=server,
        )  # fmt: skip

    def get_tool(self, name: str) -> ToolSpec:
        """Return the spec of a tool; raises ToolNotFound."""
        return self.registry.get(name)

    def get_tool_source(self, name: str) -> str:
        """Return the source of a made tool, "" for another tool; raises ToolNotFound."""
        return self.registry.get(name).source_code

    def remove_tool(self, name: str) -> None:
        """Remove a tool of this maker; raises ToolNotFound, and ToolDenied for another maker's."""
        self.registry.remove(name, self.maker)

    def merge_similar(self) -> tuple[MergedTool, ...]:
        """Merge tools of this maker that do the same: each passes the tests of the other.

        One of them is kept, with the tests of both; the other is retired.
        """
        own = [each for each in self.registry.list_tools() if self._is_own(each)]
        return merge_similar(self.registry, self._executor, own)

    def clear_all(self) -> int:
        """Remove every tool of this maker; return their number."""
        specs = self.registry.list_tools(retired=True)
        own = [spec for spec in specs if self._is_own(spec)]
        for spec in own:
            self.registry.remove(spec.name, self.maker)
        return len(own)

    def _is_own(self, spec: ToolSpec) -> bool:
        return self.registry.is_made(spec) and spec.provenance.maker == self.maker

    def export_tool(
        self, name: str, directory: str | os.PathLike[str], *, as_skill: bool = False
    ) -> Path:
        """Write a made tool, or its skill, into a new folder below `directory`; return its path."""
        spec = self.registry.get(name)
        if not self.registry.is_made(spec):
            raise errors.ToolDenied(
                f"{spec.name} cannot be exported: it is not a made tool and has no source",
                tool=spec.name,
            )
        if as_skill:
            return export_skill(skill_of_tool(spec), directory)
        return write_tool(spec, Path(directory))

    def import_tool(
        self, folder: str | os.PathLike[str], *, grant: bool = False, allow_similar: bool = False
    ) -> ToolSpec:
        """Make a tool from an exported folder, checked and tested like any other.

        With `grant` the tool gets the permissions and calls that the folder asks for; without `grant`
        such a folder raises ToolDenied.  Raises what `create_tool` raises.
        """
        return self._make(read_tool(Path(folder)), grant=grant, allow_similar=allow_similar)

    def save_skill(
        self, name: str, store: SkillStore | None = None, *, allow_similar: bool = False
    ) -> KeptSkill:
        """Keep a made tool as a skill, with its definition and its tests, once these have passed again.

        `store`: default the user's.  Raises ToolNotFound, ToolDenied for a tool
        that is not made, ToolTestFailed, and what SkillStore.add raises.
        """
        spec = self.registry.get(name)
        if not self.registry.is_made(spec):
            raise errors.ToolDenied(
                f"{spec.name}: not a made tool, so it has no source", tool=spec.name
            )
        self.run_tests(spec.name)
        store = store or SkillStore()
        return store.add(skill_of_tool(spec), allow_similar=allow_similar)

    def add_skill(
        self, skill: Skill, *, grant: bool = False, allow_similar: bool = False
    ) -> tuple[ToolSpec, ...]:
        """Make tools of a skill: the one that it defines, else the functions of its scripts.

        Each is checked and tested like any other.  Permissions and calls are granted as by
        `import_tool`; tools made before one that fails stay.  Raises what `create_tool` raises,
        ToolDenied and SkillInvalid.
        """
        found = tools_in(skill)
        return tuple(self._make(each, grant=grant, allow_similar=allow_similar) for each in found)

    def _make(self, found: ExportedTool, *, grant: bool, allow_similar: bool) -> ToolSpec:
        if found.asks_for and not grant:
            raise errors.ToolDenied(
                f"{found.name} asks for {found.asks_for}", "review it, and pass grant=True",
                tool=found.name,
            )  # fmt: skip
        return self.create_tool(
            found.name, found.description, found.source_code, found.parameters or None,
            found.grants.permissions, found.tests, found.timeout, calls=found.calls,
            requirements=found.requirements, risky=found.risky, tags=found.tags,
            provenance=found.provenance, allow_similar=allow_similar,
        )  # fmt: skip

    def policy_of(self, name: str) -> Policy:
        """Return the policy of the cells of a made tool; raises ToolNotFound."""
        return self._sandboxes.policy_in_force(self.registry.get(name).grants)

    def settle(self) -> None:
        """Wait until all pools are full and all cells of past calls are gone."""
        self._sandboxes.settle()

    def close(self) -> None:
        """End every call, and close the sandboxes, and the registry if the factory made it.

        Closing twice is fine.
        """
        self._sandboxes.close()
        if self._owns_registry:
            self.registry.close()


def _object(name: str, arguments: object) -> dict[str, Any]:
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    raise errors.ToolArgumentsInvalid(
        f"{name}: arguments must be a dictionary by name, got {type(arguments).__name__}", tool=name
    )
