"""The parts of tools and skills: HTTP requests, filters of results, typed files, origins, manifests."""

from .harness.schemas.spec import (
    Provenance,
    ToolOwner,
    ToolState,
)
from .harness.skills.manifest import (
    SkillManifest,
)
from .harness.skills.skill import (
    Skill,
    read_skill,
)
from .harness.skills.skill_store import (
    KeptSkill,
    SkillStore,
)
from .harness.skills.skills import (
    FoundSkill,
)
from .harness.stubs.stub_tree import (
    python_tree,
    typescript_tree,
)
from .harness.tools.http.http_client import HttpCaps, HttpClient
from .harness.tools.http.http_tool import (
    http_tool,
)
from .harness.tools.http.targets import (
    HttpCredential,
)
from .harness.tools.results import CapRows, RedactSecrets

__all__ = [
    "CapRows",
    "FoundSkill",
    "HttpCaps",
    "HttpClient",
    "HttpCredential",
    "KeptSkill",
    "Provenance",
    "RedactSecrets",
    "Skill",
    "SkillManifest",
    "SkillStore",
    "ToolOwner",
    "ToolState",
    "http_tool",
    "python_tree",
    "read_skill",
    "typescript_tree",
]
