"""Completion scripts of bash, zsh and fish, generated from the places of the command line."""

import argparse
from collections.abc import Callable, Iterator

from .places import CommandPlace, Option, Values, places

# For bash and zsh: find the command in the words before, then choose by the option before, or by the
# command.  Words behind `--` belong to the program, and are completed as files.
_CHOICE = """\
    for word in @BEFORE@; do
        [[ $word == -- ]] && { @FILES@; return; }
        case "${place:+$place }$word" in
            @PLACES@) place=${place:+$place }$word ;;
        esac
    done
    case "$place $previous" in
@VALUES@
        *) if [[ $current == -* ]]; then
            case $place in
@OPTIONS@
            esac
        else
            case $place in
@WORDS@
            esac
        fi ;;
    esac
"""
_BASH = """\
# Completion of cellwright for bash: source it, or write it to
# ~/.local/share/bash-completion/completions/cellwright
_cellwright() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local place= word words= names= files=
    COMPREPLY=()
    if [[ $previous == = ]]; then # --policy=strict is three words
        previous=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ $current == = ]]; then
        current=
    fi
@CHOICE@
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $names ]]; then
        while read -r word; do
            [[ $word == "$current"* ]] && COMPREPLY+=("$word")
        done < <("${COMP_WORDS[0]/#\\~/$HOME}" completion --names "$names" 2>/dev/null)
    fi
    # Files are what bash completes when nothing else matches.
    [[ $files ]] || compopt +o default 2>/dev/null || :
}
complete -o default -F _cellwright cellwright
"""
_ZSH = """\
#compdef cellwright
# Completion of cellwright for zsh: write it to a file _cellwright in a directory of $fpath
_cellwright() {
    local current=$words[CURRENT] previous=$words[CURRENT-1] place= word names= files=
    local -a found
    if [[ $current == --*=* ]]; then
        previous=${current%%=*} current=${current#*=}
        compset -P '*='
    fi
@CHOICE@
    [[ -n $names ]] && found+=(${(f)"$(${~words[1]} completion --names $names 2>/dev/null)"})
    local -a is_option
    [[ $current == -* ]] && is_option=(-o)
    (( $#found )) && _describe $is_option cellwright found
    [[ -n $files ]] && _files
}
if [[ $funcstack[1] == _cellwright ]]; then _cellwright "$@"; else compdef _cellwright cellwright; fi
"""
_BEFORE = {"bash": '"${COMP_WORDS[@]:1:COMP_CWORD-1}"', "zsh": '"${(@)words[2,CURRENT-1]}"'}
_FISH = """\
# Completion of cellwright for fish: write it to ~/.config/fish/completions/cellwright.fish
function __cellwright_at --description 'Tell whether the command line is at this command'
    set -l known @PLACES@
    set -l place
    for word in (commandline -opc)[2..]
        test "$word" = --; and return 1
        contains -- (string join ' ' -- $place $word) $known; and set -a place $word
    end
    test "$place" = "$argv"
end
function __cellwright_behind --description 'Tell whether the word belongs to a program, behind --'
    contains -- -- (commandline -opc)
end
complete -c cellwright -f
complete -c cellwright -n __cellwright_behind -F"""
_NAMES = "(eval (commandline -opc)[1] completion --names {} 2>/dev/null)"


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of completion.SHELLS; `parser` has the arguments of every command."""
    found = tuple(places(parser))
    if shell == "fish":
        return "\n".join(_fish(found)) + "\n"
    template, words = (_BASH, _words_of_bash) if shell == "bash" else (_ZSH, _words_of_zsh)
    choice = (
        _CHOICE.replace("@BEFORE@", _BEFORE[shell])
        .replace("@FILES@", "_files" if shell == "zsh" else ":")
        .replace("@PLACES@", "|".join(f'"{each.words}"' for each in found if each.words))
        .replace("@VALUES@", "\n".join(_value_cases(found, words)))
        .replace("@OPTIONS@", "\n".join(_option_cases(found, words)))
        .replace("@WORDS@", "\n".join(_word_cases(found, words)))
    )
    return template.replace("@CHOICE@\n", choice)


Words = Callable[[dict[str, str]], str]  # words with their meanings, as an assignment


def _words_of_bash(words: dict[str, str]) -> str:
    return f'words="{" ".join(words)}"'


def _words_of_zsh(words: dict[str, str]) -> str:
    return f"found=({' '.join(_quoted(_described(*each)) for each in words.items())})"


def _described(word: str, meaning: str) -> str:
    word = word.replace(":", r"\:")
    return f"{word}:{meaning}" if meaning else word


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _assignments(values: Values, words: Words, commands: dict[str, str]) -> str:
    """Return assignments of what can follow, for bash or zsh."""
    known = commands | dict.fromkeys(values.words, "")
    parts = [words(known)] if known else []
    parts += [f"names={values.names}"] if values.names else []
    parts += ["files=1"] if values.has_files else []
    return "; ".join(parts) or ":"


def _value_cases(found: tuple[CommandPlace, ...], words: Words) -> Iterator[str]:
    """Yield a case for each group of options that take the same, wherever they occur."""
    groups: dict[Values, list[str]] = {}
    taken = [(each, option) for each in found for option in each.options if option.values]
    for name in dict.fromkeys(option.name for _, option in taken):
        here = [(place, option) for place, option in taken if option.name == name]
        everywhere = [o.values for p in found for o in p.options if o.name == name]
        if len(set(everywhere)) == 1:
            groups.setdefault(here[0][1].values or Values(), []).append(f'*" {name}"')
            continue
        for place, option in here:
            groups.setdefault(option.values or Values(), []).append(f'"{place.words} {name}"')
    for values, patterns in groups.items():
        yield f"        {'|'.join(patterns)}) {_assignments(values, words, {})} ;;"


def _option_cases(found: tuple[CommandPlace, ...], words: Words) -> Iterator[str]:
    for place in found:
        known = {option.name: option.help for option in place.options}
        yield f'                "{place.words}") {words(known)} ;;'


def _word_cases(found: tuple[CommandPlace, ...], words: Words) -> Iterator[str]:
    for place in found:
        yield f'                "{place.words}") {_assignments(place.values, words, place.commands)} ;;'


def _fish(found: tuple[CommandPlace, ...]) -> Iterator[str]:
    yield _FISH.replace("@PLACES@", " ".join(f"'{each.words}'" for each in found if each.words))
    for place in found:
        line = f"complete -c cellwright -n '__cellwright_at {place.words}'"
        for name, summary in place.commands.items():
            yield f"{line} -a {name} -d {_quoted_for_fish(summary)}"
        if taken := _fish_values(place.values):
            yield f"{line}{' -F' if place.values.has_files else ''}{taken}"
        elif place.values.has_files:
            yield f"{line} -F"
        for option in place.options:
            yield f"{line} {_fish_option(option)}"


def _fish_option(option: Option) -> str:
    name = option.name
    spelt = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
    if option.values is not None:
        spelt += (" -r -F" if option.values.has_files else " -x") + _fish_values(option.values)
    return f"{spelt} -d {_quoted_for_fish(option.help)}"


def _fish_values(values: Values) -> str:
    known = " ".join((*values.words, *([_NAMES.format(values.names)] if values.names else ())))
    return f" -a {_quoted_for_fish(known)}" if known else ""


def _quoted_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
