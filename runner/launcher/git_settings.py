"""Settings of a git repository that name no command, and lead to no other file.

Programs make repositories in a project, such as dependencies that are cloned.  git on the host obeys
the settings of each that a person enters, or that the index of the project names.  Whatever is not
known here is refused: most settings of git can have a command run (git-config(1)).
"""

import re

MOST_BYTES = 64 * 1024

_KEYS = {
    "core": """repositoryformatversion filemode bare logallrefupdates ignorecase precomposeunicode
        symlinks autocrlf eol safecrlf protecthfs protectntfs sharedrepository compression
        bigfilethreshold abbrev commitgraph preloadindex sparsecheckout sparsecheckoutcone quotepath
        longpaths trustctime checkstat""",
    "extensions": "objectformat compatobjectformat refstorage partialclone preciousobjects noop",
    "remote": "url pushurl fetch push mirror tagopt prune promisor partialclonefilter skipfetchall",
    "branch": "remote pushremote merge rebase description",
    "submodule": "url active branch recurse",
    "user": "name email",
    "author": "name email",
    "committer": "name email",
    "commit": "gpgsign",
    "tag": "gpgsign",
    "gc": "auto autodetach",
    "pull": "rebase ff",
    "push": "default autosetupremote",
    "fetch": "prune",
    "merge": "ff conflictstyle",
    "init": "defaultbranch",
    "advice": "detachedhead",
}
_KNOWN = {section: frozenset(keys.split()) for section, keys in _KEYS.items()}
_SECTION = re.compile(r'\[([A-Za-z0-9-]+)(?: "(?:[^"\\\x00-\x1f]|\\.)*")?\]')
_SETTING = re.compile(r"([A-Za-z][A-Za-z0-9-]*)(?: *= *(.*))?")
_BESIDES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # control characters that git reads otherwise
_HELPER = re.compile(r"^\"?[A-Za-z0-9+.-]*::")  # gitremote-helpers(7): `ext::` names a command


def why_not(text: bytes) -> str:
    """Return why a file of settings may not be used; "" if it may."""
    if len(text) > MOST_BYTES:
        return f"settings of more than {MOST_BYTES} bytes"
    words = text.decode("utf-8", "surrogateescape")
    if _BESIDES.search(words):
        return "control characters in settings"
    section = ""
    for line in (each.strip(" \t") for each in words.split("\n")):
        if not line or line[0] in "#;":
            continue
        if found := _SECTION.fullmatch(line):
            section = found[1].lower()
            continue
        found = _SETTING.fullmatch(line)
        name = f"{section}.{found[1].lower()}" if found else "a line that is not understood"
        if not found or found[1].lower() not in _KNOWN.get(section, ()) or line.endswith("\\"):
            return f"a program of a cell may not set {name}"
        if _HELPER.match(found[2] or ""):
            return f"a program of a cell may not set {name} to a helper"
    return ""
