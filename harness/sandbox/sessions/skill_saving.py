"""Skills from sessions: chosen files or the history become a skill, which a fresh cell tries first.

Everything that comes from the session is hostile: paths and contents pass the checks of any skill, and
nothing is kept that does not work again without the session, its tools and the network.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ....policies.errors import PolicyError, SkillInvalid
from ....policies.languages import LANGUAGES, PYTHON, language_of_file
from ....policies.policy import Network, Policy
from ....runner.requests.result import SandboxResult
from ....runner.shared_files import SharedFiles
from ....runner.supervisor import Supervisor
from ...skills.manifest import PREFIX, SkillManifest
from ...skills.skill import Skill, make_skill
from ...skills.skill_store import KeptSkill, SkillStore
from ...text.secrets import find_secrets
from ..calls.admission import Admission
from ..parameters import CallArguments

if TYPE_CHECKING:
    from ..sandbox_skills import SandboxSkills

Files = Mapping[str, str | bytes]
MakeSupervisor = Callable[[Policy, str, SharedFiles], Supervisor]
_FOLDERS = ("scripts", "references", "assets", "tests")


class SkillDraft(NamedTuple):
    """The arguments of `save_skill` about a skill."""

    name: str
    description: str
    body: str = ""
    tests: str = ""
    task: str = ""
    model: str = ""
    allowed_tools: Sequence[str] = ()
    maker: str = ""


def module_name(name: str) -> str:
    """Return the name under which programs import a skill from `skills`."""
    return name.replace("-", "_")


def script_of(name: str, language: str) -> str:
    """Return the path of the only script of a skill."""
    suffix = ".py" if language == PYTHON else LANGUAGES[language].suffix
    return f"scripts/{module_name(name)}{suffix}"


def chosen(patterns: Sequence[str], there: Sequence[str], read: Callable[[str], bytes]) -> Files:
    """Return the files below /workspace that match, in the folders of a skill.

    Raises PolicyError for a pattern that matches none.
    """
    found: dict[str, bytes] = {}
    for pattern in patterns:
        if not isinstance(pattern, str) or not (matching := fnmatch.filter(there, pattern)):
            raise PolicyError(f"files: no file below /workspace matches {pattern!r}")
        found |= {_place(path): read(path) for path in matching}
    return found


def _place(path: str) -> str:
    if PurePosixPath(path).parts[0] in _FOLDERS:
        return path
    folder = "references" if path.endswith(".md") else "assets"
    return f"{'scripts' if language_of_file(path) else folder}/{path}"


def drafted(draft: SkillDraft, files: Files, language: str, origin: str) -> Skill:
    """Return the skill of a draft and its files, with its provenance; raises SkillInvalid."""
    if draft.tests:
        suffix = ".py" if language == PYTHON else LANGUAGES[language].suffix
        files = {**files, f"tests/check{suffix}": draft.tests}
    given = {path: _content(path, each) for path, each in files.items()}
    about = {
        "origin": origin, "task": draft.task, "model": draft.model, "maker": draft.maker
    }  # fmt: skip
    manifest = SkillManifest(
        name=draft.name,
        description=draft.description,
        body=draft.body or _body(draft, list(given)),
        metadata={f"{PREFIX}{key}": text for key, text in about.items() if text},
        allowed_tools=tuple(draft.allowed_tools),
    )
    skill = make_skill(manifest, {**given})
    for path, file in skill.tree.files.items():
        if find_secrets(file.content.decode("utf-8", "replace"), at_random=False):
            raise SkillInvalid(
                f"{draft.name}: {path} has what looks like a secret", "pass it as an argument"
            )
    return skill


def _content(path: object, given: object) -> bytes:
    if not isinstance(path, str) or not isinstance(given, str | bytes):
        raise PolicyError(f"files: must map paths to text or bytes, got {path!r}: {given!r:.80}")
    return given.encode(errors="surrogatepass") if isinstance(given, str) else given


def check_texts(draft: SkillDraft) -> None:
    """Raise PolicyError unless the texts of a draft are texts."""
    for name in ("name", "description", "body", "tests", "task", "model", "maker"):
        if not isinstance(value := getattr(draft, name), str):
            raise PolicyError(f"{name}: must be text, got {value!r:.80}")


def _body(draft: SkillDraft, paths: list[str]) -> str:
    lines = [f"# {draft.name}", "", draft.description, "", "## Files", ""]
    for path in sorted(paths):
        words = f"- `{path}`"
        if path.startswith("scripts/") and path.endswith(".py"):
            words += f": `import {_module(draft.name, path)}`"
        lines.append(words)
    return "\n".join(lines)


def _module(name: str, path: str) -> str:
    return f"skills.{module_name(name)}." + path.removesuffix(".py").replace("/", ".")


def try_out(
    skill: Skill, tests: str, language: str, admission: Admission, policy: Policy,
    make: MakeSupervisor,
) -> None:  # fmt: skip
    """Import each Python script of a skill, or execute its only script, then execute its tests, in
    fresh cells that see the skill below /skills, without tools and network.

    Raises SkillInvalid, with the result, if that fails.
    """
    shown = SharedFiles()
    shown.replace({f"{skill.name}/{path}": each.content for path, each in skill.tree.files.items()})
    programs = [each for each in (_replayed(skill, language), tests) if each]
    if not programs:
        raise SkillInvalid(f"{skill.name}: nothing in it can be tried", "pass tests=")
    supervisor = make(replace(policy, network=Network()), language, shown)

    try:
        for code in programs:
            result = _tried(CallArguments(code=code, language=language), admission, supervisor)
            if not result.ok:
                raise SkillInvalid(
                    f"{skill.name}: failed in a fresh cell: {result.error or result.reason}",
                    "a skill must work without the session, its tools and the network",
                    result=result,
                )
    finally:
        supervisor.close()


def _tried(given: CallArguments, admission: Admission, supervisor: Supervisor) -> SandboxResult:
    call = admission.admit(given)
    if isinstance(call, SandboxResult):
        return call
    with call:
        result = supervisor.execute(call.request)
    return call.end(result)


def _replayed(skill: Skill, language: str) -> str:
    """Return the program that tries the scripts; empty if it can try none."""
    files = skill.tree.files
    if language != PYTHON:
        only = files.get(script_of(skill.name, language))
        return only.content.decode("utf-8", "replace") if only else ""
    scripts = [path for path in files if path.startswith("scripts/") and path.endswith(".py")]
    modules = [_module(skill.name, path) for path in scripts]
    return "\n".join(f"import {name}" for name in modules if _is_importable(name))


def _is_importable(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def keep(
    skill: Skill, store: SkillStore | None, skills: "SandboxSkills | None",
    *, trust: bool, allow_similar: bool,
) -> KeptSkill:  # fmt: skip
    """Keep a skill in a store, by default that of the sandbox, and show it to its later programs if it
    is trusted or nothing has to be."""
    store = store or (skills.source.store if skills else SkillStore())
    kept = store.add(skill, allow_similar=allow_similar)
    if trust:
        store.trust.trust(kept.skill.reference)
    is_trusted = trust or store.trust.is_trusted(skill.name, skill.hash)
    if skills and (is_trusted or not skills.source.require_trust):
        skills.add(kept.skill)
    return kept
