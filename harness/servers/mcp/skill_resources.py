"""Skills over MCP: two tools, and resources with the names `skill://NAME/PATH`.

Every text is labelled as untrusted.  A URI is parsed, and its parts are looked up; nothing is opened.
"""

import base64
import urllib.parse
from functools import partial

from mcp import MCPError, types
from msgspec import UNSET

from ....policies.errors import PolicyError, SkillError
from ...privacy.naming import PROGRAM
from ...skills.manifest import FILE
from ...skills.skills import SkillSet
from ...text.hidden import line
from ..client_turns import run_in_thread
from ..owned_sessions import OwnedSessions
from ..services import ClientServices, ServicesByClient
from .answers import LoadedSkill, SavedSkill, answered
from .arguments import LoadSkillArguments, SaveSkillArguments
from .calls import Outcome
from .clients import Context, Owner, owner_of

_SCHEME = "skill"
_AUTHOR = "Described by its author: "
_UNTRUSTED = "kept, and not used until a person trusts it: cellwright skills trust"


def load(services: ClientServices, asked: LoadSkillArguments) -> Outcome:
    """Return the instructions of a skill, or one of its files."""
    return answered(LoadedSkill(text=_text(services.sandbox.skills, asked.name, asked.path)))


def save(open_sessions: OwnedSessions, owner: Owner, asked: SaveSkillArguments) -> Outcome:
    """Keep what a session did as a skill of this client; a person decides whether it is trusted."""
    kept = open_sessions.get(owner, asked.session).save_skill(
        asked.name, asked.description, files=None if asked.files is UNSET else asked.files,
        body=asked.body, tests=asked.tests, task=asked.task, maker=f"mcp {owner.client}",
    )  # fmt: skip
    return answered(
        SavedSkill(reference=kept.skill.reference, version=kept.version, hint=_UNTRUSTED)
    )


class SkillResources:
    """The resources of the client that asks."""

    def __init__(self, services: ServicesByClient) -> None:
        self._services = services

    async def list(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """Return the SKILL.md of each skill; it names the other files."""
        services = await self._services_of(context)
        found = [
            types.Resource(
                name=each.name, uri=f"{_SCHEME}://{each.name}/{FILE}", mime_type="text/markdown",
                description=_shown(services, _AUTHOR + line(each.description)),
            )
            for each in services.sandbox.skills.usable()
        ]  # fmt: skip
        return types.ListResourcesResult(resources=found)

    async def read(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        """Return a file of a skill: text as a labelled block, other files as they are."""
        services = await self._services_of(context)
        most = owner_of(context).answer_bytes * 7 // 10  # base64 takes 4 bytes for 3
        try:
            content = _content(services.sandbox.skills, params.uri, most)
        except (SkillError, PolicyError) as error:
            raise MCPError(types.INVALID_PARAMS, _shown(services, error.what)[:500]) from None
        return types.ReadResourceResult(contents=[_shown_content(services, content)])

    async def _services_of(self, context: Context) -> ClientServices:
        find = partial(self._services.of, owner_of(context).client)
        return await run_in_thread(find)


def _shown(services: ClientServices, text: str) -> str:
    return services.privacy.text(text, PROGRAM) if services.privacy else text


def _shown_content(
    services: ClientServices, content: types.TextResourceContents | types.BlobResourceContents
) -> types.TextResourceContents | types.BlobResourceContents:
    """Return a content as a model may see it."""
    if services.privacy is None:
        return content
    from .private_answers import private_resource  # seldom needed

    return private_resource(content, services.privacy)


def _content(
    skills: SkillSet, uri: str, most: int
) -> types.TextResourceContents | types.BlobResourceContents:
    parts = urllib.parse.urlsplit(uri)
    name, path = parts.netloc, urllib.parse.unquote(parts.path.removeprefix("/"))
    if parts.scheme != _SCHEME or parts.query or parts.fragment:
        raise PolicyError(f"uri: must be skill://NAME/PATH, got {ascii(uri)[:200]}")
    data = skills.read(name, path)
    if len(data) > most:
        raise PolicyError(f"uri: the file has {len(data)} bytes, an answer at most {most}")
    try:
        data.decode()
    except UnicodeDecodeError:
        return types.BlobResourceContents(uri=uri, blob=base64.b64encode(data).decode())
    text = _text(skills, name, path)
    return types.TextResourceContents(uri=uri, text=text, mime_type="text/markdown")


def _text(skills: SkillSet, name: str, path: str) -> str:
    return skills.load(name) if path in ("", FILE) else skills.read_text(name, path)
