"""`cellwright completion`: prints a script that completes commands, options and their known values.

The script is generated from the parser.  Where nothing else matches, the shell completes file names.
"""

import argparse
from collections.abc import Iterator

from ...policies.languages import language_names
from ...policies.loading import profile_names
from ...policies.policy import CGROUP, OPTIONAL_LAYERS
from .commands import complete_parser
from .options import SUCCEEDED
from .parsing import commands_of

SHELLS = ("bash", "zsh", "fish")
# For bash and zsh: find the command in the words before, then choose by the last of them or by the
# command.
_CHOICE = """\
    for word in @BEFORE@; do
        case "${place:+$place }$word" in
            @PLACES@) place=${place:+$place }$word ;;
        esac
    done
    case $previous in
@VALUES@
        *) case $place in
@WORDS@
        esac ;;
    esac"""
_BASH = """\
# Completion of cellwright for bash: source it, or write it to
# ~/.local/share/bash-completion/completions/cellwright
_cellwright() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} place= word words=
@CHOICE@
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _cellwright cellwright
"""
_ZSH = """\
#compdef cellwright
# Completion of cellwright for zsh: write it to a file _cellwright in a directory of $fpath
_cellwright() {
    local current=$words[CURRENT] previous=$words[CURRENT-1] place= word
    local -a found
@CHOICE@
    compadd -a found
    _files
}
if [[ $funcstack[1] == _cellwright ]]; then _cellwright "$@"; else compdef _cellwright cellwright; fi
"""
_BEFORE = {"bash": '"${COMP_WORDS[@]:1:COMP_CWORD-1}"', "zsh": '"${(@)words[2,CURRENT-1]}"'}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    print(completion(options.shell, complete_parser()), end="")
    return SUCCEEDED


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of SHELLS; `parser` has the arguments of every command."""
    places = dict(_places(parser, ()))
    if shell == "fish":
        return "\n".join(_fish(places)) + "\n"
    made, template = ("words={}", _BASH) if shell == "bash" else ("found=({})", _ZSH)
    quote = (lambda text: f'"{text}"') if shell == "bash" else str

    def case(pattern: str, words: tuple[str, ...]) -> str:
        return f"        {pattern}) {made.format(quote(' '.join(words)))} ;;"

    below = [" ".join(place) for place in places if place]
    values = [case(f"{option}", words) for option, words in _VALUES.items()]
    words = [case(f'"{" ".join(place)}"', known) for place, known in places.items()]
    return (
        template.replace("@CHOICE@", _CHOICE)
        .replace("@BEFORE@", _BEFORE[shell])
        .replace("@PLACES@", "|".join(f'"{each}"' for each in below))
        .replace("@VALUES@", "\n".join(values))
        .replace("@WORDS@", "\n".join(words))
    )


_VALUES = {
    "--policy": profile_names(),
    "--language": language_names(),
    "--optional": (*OPTIONAL_LAYERS, CGROUP),
}


def _places(
    parser: argparse.ArgumentParser, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield each command, as the words that lead to it, with the words that may follow."""
    below = commands_of(parser)
    options = tuple(option for action in parser._actions for option in action.option_strings)
    yield place, (*(name for name, _ in below), *options)
    for name, each in below:
        yield from _places(each, (*place, name))


def _fish(places: dict[tuple[str, ...], tuple[str, ...]]) -> Iterator[str]:
    yield "# Completion of cellwright for fish: ~/.config/fish/completions/cellwright.fish"
    for place, words in places.items():
        last = place[-1:]
        seen = f"__fish_seen_subcommand_from {last[0]}" if last else "__fish_use_subcommand"
        if len(place) > 1:
            seen = f"__fish_seen_subcommand_from {place[0]}; and {seen}"
        for word in words:
            yield f"complete -c cellwright -n '{seen}' {_fish_word(word)}"


def _fish_word(word: str) -> str:
    if not word.startswith("-"):
        return f"-a {word}"
    values = f" -x -a '{' '.join(_VALUES[word])}'" if word in _VALUES else ""
    return (f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}") + values
