"""`FactoryCatalogue`: the tools of a registry for a broker; made tools are executed in cells."""

import threading
from collections import OrderedDict
from typing import Any

from ...policies.errors import ToolDenied, ToolFailed, ToolResultInvalid
from ..schemas.functions import describe_source
from ..schemas.spec import ToolSpec, ToolState
from ..tools.caller import Caller, Tool
from ..tools.registry import ToolRegistry
from .call_program import program_of_call
from .execution import ToolExecutor

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

    def _retired(self, spec: ToolSpec) -> ToolDenied:
        if kept := self._registry.successor(spec.name):
            signature = f"{kept.name}({', '.join(kept.parameters.get('properties', ()))})"
            return ToolDenied(
                f"{spec.name} is retired: {kept.name} does the same", f"call {signature}",
                tool=spec.name,
            )  # fmt: skip
        return ToolDenied(
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
            except (ToolFailed, ToolResultInvalid):
                self._registry.note(spec, well=False, may_retire=is_own)
                raise
            self._registry.note(spec, well=True, may_retire=is_own)
            return value

        return Tool(spec, perform)
