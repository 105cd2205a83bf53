"""SKILL.md: what is written is read again, and the reference validator agrees."""

import string
from pathlib import Path

import pytest
import skills_ref.parser
import skills_ref.validator
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.skills.manifest import SkillManifest, read_manifest, write_manifest
from cellwright.harness.skills.skill import read_skill
from cellwright.harness.text.hidden import first_hidden
from cellwright.policies.errors import SkillInvalid

# From docs/specification.mdx of agentskills/agentskills, its examples whole.
EXAMPLES = {
    "skill-name": "name: skill-name\ndescription: A description of what this skill does and when to use it.",
    "pdf-processing": "name: pdf-processing\ndescription: Extract PDF text, fill forms, merge files. Use when handling PDFs.\n"
    'license: Apache-2.0\nmetadata:\n  author: example-org\n  version: "1.0"',
    "data-analysis": "name: data-analysis\ndescription: Helps with PDFs.\nlicense: Proprietary. LICENSE.txt has complete terms",
    "code-review": "name: code-review\ndescription: Reviews.\ncompatibility: Designed for Claude Code (or similar products)",
    "git-work": "name: git-work\ndescription: Git.\ncompatibility: Requires git, docker, jq, and access to the internet\n"
    "allowed-tools: Bash(git:*) Bash(jq:*) Read",
    "uv-work": "name: uv-work\ndescription: uv.\ncompatibility: Requires Python 3.14+ and uv",
}
WRONG = {
    "upper": ("PDF-Processing", "name: PDF-Processing\ndescription: d"),
    "hyphen": ("-pdf", "name: -pdf\ndescription: d"),
    "two hyphens": ("pdf--processing", "name: pdf--processing\ndescription: d"),
    "long name": ("a" * 65, f"name: {'a' * 65}\ndescription: d"),
    "other folder": ("other", "name: mine\ndescription: d"),
    "no description": ("mine", "name: mine"),
    "empty description": ("mine", 'name: mine\ndescription: ""'),
    "no name": ("mine", "description: d"),
    "twice": ("mine", "name: mine\nname: mine\ndescription: d"),
    "anchor": ("mine", "name: &a mine\ndescription: *a"),
    "lone anchor": ("mine", "name: &a mine\ndescription: d"),
    "tag": ("mine", "name: !!str mine\ndescription: d"),
    "open quote": ("mine", 'name: "mine\ndescription: d'),
    "list": ("mine", "- name\n- mine"),
}


def _write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_bytes(text.encode())
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_specification_are_read_as_the_reference_reads_them(
    tmp_path: Path, name: str
) -> None:
    folder = _write(tmp_path / name, f"---\n{EXAMPLES[name]}\n---\n\n# Steps\n")
    skill, reference = read_skill(folder), skills_ref.parser.read_properties(folder)
    assert skills_ref.validator.validate(folder) == []
    assert (skill.manifest.problems, skill.manifest.body) == ((), "# Steps")
    assert skill.description == reference.description
    assert skill.manifest.metadata == (reference.metadata or {})
    assert skill.manifest.license == (reference.license or "")
    assert " ".join(skill.manifest.allowed_tools) == (reference.allowed_tools or "")


@pytest.mark.parametrize("case", WRONG)
def test_what_the_reference_refuses_is_refused(tmp_path: Path, case: str) -> None:
    name, front = WRONG[case]
    folder = _write(tmp_path / name, f"---\n{front}\n---\n")
    assert skills_ref.validator.validate(folder)
    with pytest.raises(SkillInvalid):
        read_skill(folder)


_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")), max_size=60
).filter(lambda text: not first_hidden(text))  # fmt: skip
_WORDS = st.text(string.ascii_letters + "_:*-.", min_size=1, max_size=12)
_NAMES = st.from_regex(r"[a-z0-9]{1,10}(-[a-z0-9]{1,5}){0,3}", fullmatch=True)


@given(
    _NAMES, _TEXT.filter(str.strip), _TEXT, _TEXT,
    st.dictionaries(_WORDS, _TEXT, max_size=4), st.lists(_WORDS, max_size=4), _TEXT,
)  # fmt: skip
def test_what_is_written_is_read_by_us_and_by_the_reference(
    name: str, description: str, license: str, compatibility: str, metadata: dict[str, str],
    tools: list[str], body: str,
) -> None:  # fmt: skip
    made = SkillManifest(
        name=name, description=description.strip(), license=license.strip(),
        compatibility=compatibility.strip(), metadata=metadata, allowed_tools=tuple(tools),
        body=body.strip(),
    )  # fmt: skip
    data = write_manifest(made)
    assert read_manifest(data, name) == made
    fields, text = skills_ref.parser.parse_frontmatter(data.decode())
    assert skills_ref.validator.validate_metadata(fields, Path(name)) == []
    assert (fields["name"], fields["description"], text) == (name, made.description, made.body)
    assert fields.get("metadata", {}) == metadata
    assert fields.get("allowed-tools", "") == " ".join(tools)


_PLAIN = st.text(string.ascii_letters + string.digits + " .,'()/-_", max_size=30)


@given(
    st.lists(
        st.tuples(st.sampled_from(["name", "description", "license", "metadata", "x"]), _PLAIN),
        max_size=5,
    )
)
def test_whatever_the_reference_accepts_of_generated_front_matter_we_accept_alike(
    pairs: list[tuple[str, str]],
) -> None:
    text = "---\n" + "\n".join(f"{key}: {value}" for key, value in pairs) + "\n---\nbody"
    try:
        fields, _ = skills_ref.parser.parse_frontmatter(text)
        accepted = not skills_ref.validator.validate_metadata(fields)
    except skills_ref.parser.ParseError:
        accepted = False
    try:
        ours = read_manifest(text.encode())
    except SkillInvalid:
        # The reference does not look at the metadata's type, and splits at any `---`.
        assert not accepted or isinstance(fields.get("metadata"), str) or "---" in text[4:-8]
        return
    if accepted:
        assert (ours.name, ours.description) == (
            fields["name"].strip(),
            fields["description"].strip(),
        )
        assert ours.problems == ()


def test_reading_is_lenient_where_the_specification_is_not() -> None:
    text = "\ufeff---\r\nname: a-b\r\ndescription: Use when: asked\r\nallowed-tools: [Read, 'Bash(git add:*) Grep']\r\nversion: 2\r\n---\r\nhi"
    found = read_manifest(text.encode())
    assert found.description == "Use when: asked"
    assert found.allowed_tools == ("Read", "Bash(git add:*)", "Grep")
    assert found.problems == ("unknown field 'version'",)
    assert read_manifest(f"---\nname: a\ndescription: {'d' * 1025}\n---".encode()).problems


def test_writing_is_strict() -> None:
    for wrong in (
        SkillManifest(name="A", description="d"),
        SkillManifest(name="a", description=" "),
        SkillManifest(name="a", description="d" * 1025),
        SkillManifest(name="a", description="d", compatibility="c" * 501),
        SkillManifest(name="a", description="d\u200b"),
        SkillManifest(name="a", description="d", allowed_tools=("Bash(git",)),
        SkillManifest(name="a", description="d", body="\ud800"),
    ):
        with pytest.raises(SkillInvalid):
            write_manifest(wrong)
