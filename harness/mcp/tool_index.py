"""`ToolIndex`: the callable tools of all servers, and why others cannot be called.

Pinned tools are known before their server starts. A server's list is compared with its pins; only
unchanged tools can be called.

Results of tool calls as values for programs; failures as exceptions.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from mcp import types

from ...policies.errors import ToolDenied, ToolFailed, ToolInvalid, ToolNotFound, ToolResultInvalid
from ...runner.concurrency import Budget
from ..schemas.spec import ToolSpec, key_of
from ..text.redaction import Redaction
from ..tools.tool import Tool
from .definitions import (
    Definition,
    Drift,
    Pins,
    check,
    difference,
    drift_of,
    shown,
    spec_of,
    unwrapped,
)
from .managed_server import Listing
from .server_config import ServerConfig, tool_names
from .transports import Transport


class _ServerTools(NamedTuple):
    """The tools of one server: `tools` by name, and the names of those that `drifted` from their
    pins."""

    tools: dict[str, Tool]
    drifted: frozenset[str] = frozenset()
    drift: Drift = Drift()
    dropped: tuple[str, ...] = ()
    pinned: Mapping[str, Definition] = MappingProxyType({})
    listed: Mapping[str, Definition] | None = None


class ToolIndex:
    """Safe from many threads.

    A server's definitions are read, checked and pinned before the index is locked, so a slow server
    delays only the callers that wait for it.
    """

    def __init__(
        self, configs: Iterable[ServerConfig], pins: Pins, tool: Callable[[ToolSpec], Tool]
    ) -> None:
        """Load the pins; raises RegistryError."""
        self._pins = pins
        self._tool = tool
        self._lock = threading.RLock()
        self._reading: dict[str, threading.Lock] = defaultdict(threading.Lock)  # by server
        self._servers: dict[str, _ServerTools] = {}
        self._keys: dict[str, Tool] = {}
        self.revision = 0
        for config in configs:
            if not config.disabled and (pinned := pins.of(config)) is not None:
                self._put(config, _ServerTools(self._tools(config, pinned, pinned), pinned=pinned))

    def knows(self, server: str) -> bool:
        return server in self._servers

    def update(self, config: ServerConfig, listing: Listing, budget: Budget) -> None:
        """Compare a server's listing with its pins; pin it if it has none.

        Raises BudgetExceeded, and changes nothing, if checking the definitions takes too long.
        """
        with self._reading[config.name]:
            pinned = self._pins.of(config)
            now, dropped = listing
            if pinned is None:
                now, worse = _checked(now, budget)
                pinned, dropped = now, (*dropped, *worse)
                self._pins.pin(config, now.values())
            self._compare(config, pinned, now, dropped)

    def pin(self, config: ServerConfig, budget: Budget) -> Drift:
        """Pin the last listing; return what that changes.  Raises BudgetExceeded, as `update`."""
        with self._reading[config.name]:
            page = self._servers[config.name]
            now, worse = _checked(page.listed or {}, budget)
            self._pins.pin(config, now.values())
            self._compare(config, now, now, (*page.dropped, *worse))
        return page.drift

    def _compare(
        self, config: ServerConfig, pinned: Mapping[str, Definition], now: Mapping[str, Definition],
        dropped: tuple[str, ...],
    ) -> None:  # fmt: skip
        drift = drift_of(pinned, now)
        same = {
            wire: each for wire, each in now.items() if wire not in (*drift.added, *drift.changed)
        }
        drifted = {
            *(
                name
                for name, wire in tool_names(config.name, pinned).items()
                if wire in drift.changed
            ),
            *tool_names(config.name, drift.added),
        }
        tools = self._tools(config, pinned, same)
        page = _ServerTools(tools, frozenset(drifted) - tools.keys(), drift, dropped, pinned, now)
        self._put(config, page)

    def _tools(
        self, config: ServerConfig, pinned: Mapping[str, Definition], same: Mapping[str, Definition]
    ) -> dict[str, Tool]:
        names = tool_names(config.name, pinned)
        return {
            name: self._tool(spec_of(same[wire], name, config))
            for name, wire in names.items() if wire in same
        }  # fmt: skip

    def _put(self, config: ServerConfig, page: _ServerTools) -> None:
        with self._lock:
            old = self._servers.get(config.name)
            if old and old.tools.keys() == page.tools.keys():
                known = old.tools  # keep equal objects: search indexes compare by identity
                page = page._replace(tools={
                    name: known[name] if known[name].spec == tool.spec else tool
                    for name, tool in page.tools.items()
                })  # fmt: skip
            self._servers[config.name] = page
            self._keys = {
                key_of(name): tool for each in self._servers.values()
                for name, tool in each.tools.items()
            }  # fmt: skip
            if old is None or old.tools != page.tools:
                self.revision += 1

    # lookup

    def find(self, key: str) -> Tool | None:
        """Return the tool with that key (its name without separators), or None."""
        return self._keys.get(key)

    def get(self, name: str) -> Tool:
        """Return a tool; raises ToolNotFound, and ToolDenied for one that has drifted."""
        try:
            tool = self._keys.get(key_of(name))
        except ToolInvalid as error:
            raise ToolNotFound(f"tool not found: {error.what}") from None
        return tool or self._refuse(name)

    def check(self, spec: ToolSpec) -> None:
        """Raise ToolDenied or ToolNotFound if a tool changed since it was looked up."""
        tool = self._keys.get(key_of(spec.name))
        if tool is None or tool.spec.source_hash != spec.source_hash:
            self._refuse(spec.name)

    def _refuse(self, name: str) -> NoReturn:
        server = name.lower().partition(".")[0]
        page = self._servers.get(server)
        if page and name.lower() in page.drifted:
            raise ToolDenied(
                f"{name} differs from its pin", f"compare: cellwright servers diff {server}",
                tool=name,
            )  # fmt: skip
        raise ToolNotFound(f"tool not found: {name!r}", tool=name)

    def specs(self) -> list[ToolSpec]:
        with self._lock:
            tools = [tool for page in self._servers.values() for tool in page.tools.values()]
        return sorted((tool.spec for tool in tools), key=lambda spec: spec.name)

    def difference(self, server: str) -> str:
        page = self._servers[server]
        return difference(page.pinned, page.listed or {})

    def summary(self, server: str) -> tuple[int, tuple[str, ...], Drift]:
        page = self._servers.get(server, _ServerTools({}))
        return len(page.tools), page.dropped, page.drift


def _checked(
    found: Mapping[str, Definition], budget: Budget
) -> tuple[dict[str, Definition], tuple[str, ...]]:
    """Return the definitions with valid schemas, and why the others are left out.

    Raises BudgetExceeded if all of them together take too long.  Leaving out only the late ones would
    make the result depend on the speed of the machine.
    """
    good: dict[str, Definition] = {}
    bad: list[str] = []
    for wire, each in found.items():
        try:
            check(each, budget)
            good[wire] = each
        except ToolInvalid as error:
            budget.spend()
            budget.look()
            bad.append(f"{wire!a}: {error.what}")
    return good, tuple(bad)


_MOST_BLOCKS = 10_000


def value_of(result: types.CallToolResult, spec: ToolSpec, transport: Transport) -> Any:
    """Return the structured content if there is any; else the text of a single text block; else a list
    of blocks, in which text is str.

    Text is never parsed: the type of a value must not depend on its content.  Raises ToolFailed if the
    tool reports an error, ToolResultInvalid if its schema promises structured content and it sent none.
    """
    secrets = transport.secrets
    if result.is_error:
        words = transport.clean(_words(result))
        raise ToolFailed(f"{words}{transport.network_hint(words)}", tool=spec.name)
    if result.structured_content is not None:
        return _without(unwrapped(result.structured_content, spec.output_schema), secrets, spec)
    if spec.output_schema is not None:
        raise ToolResultInvalid(
            f"{spec.name}: its output schema requires structured content, and it sent none",
            tool=spec.name,
        )
    blocks = [_block(each) for each in result.content[:_MOST_BLOCKS]]
    alone = blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else blocks
    return _without(alone if blocks else None, secrets, spec)


def _block(block: types.ContentBlock) -> Any:
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent() | types.AudioContent():
            return {"type": block.type, "mime_type": block.mime_type, "data": block.data}
        case types.ResourceLink():
            return {"type": "resource_link", "uri": str(block.uri), "name": block.name}
        case types.EmbeddedResource(resource=inside):
            what = {"type": "resource", "uri": str(inside.uri), "mime_type": inside.mime_type}
            if isinstance(inside, types.TextResourceContents):
                return what | {"text": inside.text}
            return what | {"data": inside.blob}


def _words(result: types.CallToolResult) -> str:
    texts = [each.text for each in result.content if isinstance(each, types.TextContent)]
    return shown(" ".join(texts)) or "it failed and gave no reason"


def _without(value: Any, secrets: tuple[str, ...], spec: ToolSpec) -> Any:
    if not secrets:
        return value
    text = json.dumps(value)
    clean = Redaction(secrets).text(text)
    if clean == text:
        return value
    try:
        return json.loads(clean)
    except ValueError:  # the credential was part of a number
        raise ToolResultInvalid(
            "the result contains a credential that cannot be redacted", tool=spec.name
        ) from None
