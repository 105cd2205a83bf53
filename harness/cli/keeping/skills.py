"""`cellwright skills`: lists, shows, checks, trusts, keeps and copies skills."""

import argparse
import re
import sys
from pathlib import Path

import msgspec

from ....policies.argument_checks import did_you_mean
from ....policies.errors import SkillError, SkillInvalid, SkillNotFound
from ...skills.manifest import FILE, SkillManifest, check_name, write_manifest
from ...skills.skill import Skill, read_skill
from ...skills.skill_store import export_skill, named
from ...skills.skills import PROJECT, FoundSkill, Skills, file_of
from ...text.terminal_text import harmless, harmless_line, print_header
from ..options import FAILED, SUCCEEDED, USAGE_ERROR, add_json, add_subcommands, print_json

_LISTED = "see `cellwright skills list`"
_SECONDS_A_DAY = 24 * 3600
_GAP = re.compile(r"\n{4,}")
_BODY = (
    "# {name}\n\nSay what to do, step by step. Put code into scripts/, details into references/.\n"
)


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    add_json(add_command("list", "list the skills that were found, and which are trusted", _list))
    show = add_command("show", "print a skill, also an untrusted one, and its reference", _show)
    show.add_argument("name", metavar="NAME", help="the skill; NAME@HASH is one of several")
    show.add_argument("file", nargs="?", metavar="FILE", help=f"a file of it; default {FILE}")
    search = add_command("search", "find trusted skills by words", _search)
    search.add_argument("query", metavar="QUERY", help="words, or a name")
    search.add_argument("--limit", type=int, default=5, metavar="N", help="default 5")
    add_json(search, "object")
    new = add_command("new", "write a folder with a SKILL.md to fill in", _new)
    new.add_argument("name", metavar="NAME", help="of a-z, 0-9 and hyphens")
    new.add_argument(
        "--in", dest="directory", metavar="DIR", default=PROJECT,
        help=f"the parent of the new folder; default {PROJECT}, where `list` looks",
    )  # fmt: skip
    new.add_argument(
        "--description", metavar="D", default="Say what it does, and when to use it.",
        help="what it does, and when to use it; default a sentence to replace",
    )  # fmt: skip
    check = add_command("check", "check folders against the specification and our limits", _check)
    check.add_argument("folders", nargs="+", metavar="FOLDER", help="a folder with a SKILL.md")
    trust = add_command("trust", "trust the files of a skill as they are now", _trust)
    trust.add_argument("reference", metavar="NAME@HASH", help="as `show` prints it")
    trust.add_argument("--revoke", action="store_true", help="end the trust instead")
    remove = add_command(
        "remove", "end the trust in a skill and remove what was kept of it", _remove
    )
    remove.add_argument("name", metavar="NAME", help="folders outside the store stay")
    remove.add_argument(
        "--version", type=int, default=0, metavar="N", help="remove only that version; default all"
    )
    export = add_command("export", "write a skill as a folder, to carry it elsewhere", _export)
    export.add_argument("name", metavar="NAME", help="the skill; NAME@HASH is one of several")
    export.add_argument("directory", metavar="DIR", help="the parent of the new folder")
    imports = add_command("import", "keep a copy of a folder; it is not trusted by that", _import)
    imports.add_argument("folder", metavar="FOLDER", help="a folder with a SKILL.md")
    imports.add_argument(
        "--similar", action="store_true", help="keep it although another is like it"
    )
    prune = add_command("prune", "remove kept skills that were not used for some days", _prune)
    prune.add_argument(
        "--days", type=float, required=True, metavar="D", help="remove what was not used for D days"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", dest="skill_folders", action="append", metavar="DIR",
        help="a folder of skills; may be repeated; default .agents/skills here and in your home",
    )  # fmt: skip
    parser.add_argument("--store", metavar="DIR", help="where skills are kept; default yours")


def run(options: argparse.Namespace) -> int:
    skills = Skills(options.skill_folders, store=options.store)
    try:
        return options.action(skills, options) or SUCCEEDED
    except SkillError as error:
        print(f"cellwright: {harmless(str(error))}", file=sys.stderr)
        return USAGE_ERROR


def _list(skills: Skills, options: argparse.Namespace) -> None:
    found = skills.found()
    if options.json:
        print_json([msgspec.to_builtins(each) for each in found])
        return
    print_header(f"{'REFERENCE':50} {'STATE':9} DESCRIPTION")
    if not found:
        print("cellwright: no skills", file=sys.stderr)
    for each in found:
        told = each.description if each.hash else f"{each.place}: {each.problem}"
        print(f"{harmless(_shown(each)):50} {_state(each):9} {harmless(_line(told))}")


def _shown(found: FoundSkill) -> str:
    return found.reference if found.hash else found.name


def _state(found: FoundSkill) -> str:
    if not found.hash:
        return "invalid"
    return "trusted" if found.is_trusted else "untrusted"


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _show(skills: Skills, options: argparse.Namespace) -> None:
    skill = _one(skills, options.name)
    if options.file is not None:
        print(_readable(file_of(skill, options.file).decode("utf-8", "backslashreplace")))
        return
    state = "trusted" if skills.store.trust.is_trusted(skill.name, skill.hash) else "untrusted"
    print(f"{skill.reference} {state}\n{harmless(skill.place)}\n")
    for path, file in skill.tree.files.items():
        print(f"{len(file.content):9,} {'x' if file.is_executable else ' '} {harmless_line(path)}")
    text = next(
        file.content for path, file in skill.tree.files.items() if path.lower() == FILE.lower()
    )
    print("\n" + _readable(text.decode()))


def _readable(text: str) -> str:
    """Return a text for a terminal, with hidden characters escaped and long gaps counted."""
    return _GAP.sub(lambda gap: f"\n⟨{len(gap[0]) - 1:,} blank lines⟩\n", harmless(text).rstrip())


def _search(skills: Skills, options: argparse.Namespace) -> None:
    told = skills.search(options.query, options.limit)
    if options.json:
        print_json(told)
        return
    print_header(f"{'NAME':24} DESCRIPTION")
    for each in told["found"]:
        print(f"{each['name']:24} {harmless(_line(each['description']))}")
    if hint := told.get("hint"):
        print(f"cellwright: {harmless(hint)}", file=sys.stderr)
    if not skills.usable() and skills.found():
        print("cellwright: no skill is trusted: see `cellwright skills list`", file=sys.stderr)


def _new(_: Skills, options: argparse.Namespace) -> None:
    name = check_name(options.name)
    folder = Path(options.directory, name)
    manifest = SkillManifest(
        name=name, description=options.description, body=_BODY.format(name=name)
    )
    data = write_manifest(manifest)
    try:
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(data)
    except OSError as error:
        raise SkillError(f"cannot write {folder}: {error.strerror}") from None
    print(folder)


def _check(_: Skills, options: argparse.Namespace) -> int:
    status = SUCCEEDED
    for folder in options.folders:
        try:
            skill = read_skill(folder)
            problems = list(skill.manifest.problems)
        except SkillInvalid as error:
            skill, problems = None, [error.what]
        for problem in problems:
            print(f"{harmless(folder)}: {harmless(problem)}", file=sys.stderr)
        if skill and not problems:
            print(skill.reference)
        status = FAILED if problems else status
    return status


def _trust(skills: Skills, options: argparse.Namespace) -> None:
    name, hash = named(options.reference)
    if options.revoke:
        if not skills.store.trust.revoke(name, hash):
            raise SkillNotFound(f"{options.reference} was not trusted")
        print(f"{options.reference} untrusted")
        return
    skill = _one(skills, options.reference)
    skills.store.trust.trust(skill.reference)
    print(f"{skill.reference} trusted")


def _remove(skills: Skills, options: argparse.Namespace) -> None:
    name = check_name(options.name)
    was_trusted = name in skills.store.trust.all()
    if not skills.store.remove(name, options.version) and not was_trusted:
        names = (each.name for each in skills.found())
        hint = did_you_mean(name, names, _LISTED)
        raise SkillNotFound(f"no skill {name!r} is kept or trusted", hint)


def _export(skills: Skills, options: argparse.Namespace) -> None:
    print(harmless(str(export_skill(_one(skills, options.name), options.directory))))


def _import(skills: Skills, options: argparse.Namespace) -> None:
    kept = skills.store.add(read_skill(options.folder), allow_similar=options.similar)
    print(f"{kept.skill.reference} kept as version {kept.version}")
    if not skills.store.trust.is_trusted(kept.skill.name, kept.skill.hash):
        print(f"cellwright: untrusted; read it: cellwright skills show {kept.skill.name}",
              file=sys.stderr)  # fmt: skip


def _prune(skills: Skills, options: argparse.Namespace) -> None:
    for each in skills.store.prune(options.days * _SECONDS_A_DAY):
        print(each)


def _one(skills: Skills, wanted: str) -> Skill:
    """Return the first skill that was found of a name or reference, trusted or not."""
    found = skills.every(wanted.partition("@")[0])
    for each in found:
        if wanted in (each.name, each.reference):
            return each
    known = ", ".join(each.reference for each in found)
    names = (each.name for each in skills.found())
    hint = f"there is {known}" if known else did_you_mean(wanted, names, _LISTED)
    raise SkillNotFound(f"no skill {ascii(wanted)[:120]}", hint)
